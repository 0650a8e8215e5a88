// How the rows of misses travel: pieces of at most kPasses x 512 bytes, one a warp, two in flight. All loads of a piece leave
// before anything waits for them, so a piece costs one round trip over the link.
#pragma once
#include "lookup.cuh"

namespace hisparse {

// Pieces that a warp has under way: as registers allow. Where a row has one block, many rows keep the link busy.
__host__ __device__ constexpr int in_flight(int blocks, bool scores) { return blocks == 1 || scores ? 1 : 2; }

constexpr int32_t kNoPiece = -1;

// How many misses of 32 entries have their first piece loaded at once, by the warp that found them.
template <int kBlocks, int kInFlight>
__device__ __forceinline__ int loaded_at_once(const ResolveParams& p, int piece) {
  if (p.copy_method != kCopyLoads || p.late_loads) return 0;
  if (kBlocks >= 4) return kInFlight;
  return piece / (kResolveWarps * kBlocks) < kInFlight ? 1 : 0;
}

// The copies of one warp. A job is rank * pieces + piece of that miss.
template <int kBlocks, int kPasses, int kInFlight>
struct RowFetch {
  const ResolveParams& p;
  const Shared& s;
  int block;
  int32_t jobs[kInFlight];            // before ranking: the entry
  int4 held[kInFlight][kPasses];

  __device__ __forceinline__ RowFetch(const ResolveParams& p, const Shared& s, int block) : p(p), s(s), block(block) {
#pragma unroll
    for (int r = 0; r < kInFlight; r++) jobs[r] = kNoPiece;
  }

  // Computed anew where they are used: registers are short. Rows of at most 1,024 bytes are what kPasses = 2 is for.
  __device__ __forceinline__ int pieces_per_row() const { return kPasses == 2 ? 1 : (p.row_bytes + kPasses * 512 - 1) / (kPasses * 512); }
  __device__ __forceinline__ int pieces() const { return pieces_per_row() * p.layers; }  // of one miss, in all layers

  // The first misses that this warp has found leave at once; repeats of a row may travel twice.
  __device__ __forceinline__ void load_at_once(const Entries<kBlocks>& e) {
    if (p.copy_method != kCopyLoads || p.late_loads) return;
    uint32_t missing = 0;
#pragma unroll
    for (int r = 0; r < kInFlight; r++) {
      const int u = kBlocks >= 4 ? 0 : r;
      if (r == 0 || kBlocks < 4) missing = __ballot_sync(kFullMask, e.word[u] < kHit);
      if (missing == 0) continue;
      const int lane = __ffs(static_cast<int>(missing)) - 1;
      missing &= missing - 1;
      jobs[r] = e.piece(u, block) * 32 + lane;
      load(r, s.row->first_host_base + static_cast<int64_t>(__shfl_sync(kFullMask, e.word[u], lane)) * p.host_row_bytes, 0);
    }
  }

  // Ranks are known from here on: takes the jobs of `load_at_once` over and starts as many more as the warp can hold.
  __device__ __forceinline__ void load_more(int misses, int misses_left) {
#pragma unroll
    for (int r = 0; r < kInFlight; r++) {
      if (jobs[r] != kNoPiece)
        jobs[r] = static_cast<int32_t>(s.row->words[jobs[r]] & kRankMask) * pieces();
      else
        load_next(r, misses, misses_left);
    }
  }

  // Victims are known from here on.
  __device__ __forceinline__ void finish(int misses, int misses_left) {
    bool busy = true;
    while (busy) {
      busy = false;
#pragma unroll
      for (int r = 0; r < kInFlight; r++) {
        if (jobs[r] == kNoPiece) continue;
        store(r);
        load_next(r, misses, misses_left);
        busy |= jobs[r] != kNoPiece;
      }
    }
  }

 private:
  struct Piece {
    int rank, layer, part;
  };

  __device__ __forceinline__ Piece piece_of(int32_t job) const {
    if (pieces() == 1) return {job, 0, 0};
    const int rank = job / pieces(), piece = job - rank * pieces();
    const int layer = pieces_per_row() == 1 ? piece : piece / pieces_per_row();
    return {rank, layer, piece - layer * pieces_per_row()};
  }

  // Blocks take the rows that are left in turn, warps as they come.
  __device__ __forceinline__ void load_next(int r, int misses, int misses_left) {
    jobs[r] = kNoPiece;
    if (p.copy_method != kCopyLoads) return;
    const int total = misses_left + misses * (pieces() - 1);
    int ticket = 0;
    if ((threadIdx.x & 31) == 0) ticket = atomicAdd(&s.row->counts.next_row, 1);
    const int row = __shfl_sync(kFullMask, ticket, 0) * kBlocks + block;
    if (row >= total) return;
    if (row < misses_left) {
      jobs[r] = s.row->left[row] * pieces();
    } else {
      const int rank = (row - misses_left) / (pieces() - 1);
      jobs[r] = rank * pieces() + 1 + (row - misses_left - rank * (pieces() - 1));
    }
    const Piece piece = piece_of(jobs[r]);
    const int64_t base = piece.layer == 0 ? s.row->first_host_base : p.host_bases[piece.layer];
    load(r, base + s.row->miss_row[piece.rank] * p.host_row_bytes, piece.part);
  }

  __device__ __forceinline__ void load(int r, int64_t row_address, int part) {
    const int first = part * kPasses * 32 + (static_cast<int>(threadIdx.x) & 31), vectors = p.row_bytes / 16;
    const int4* source = reinterpret_cast<const int4*>(row_address);
#pragma unroll
    for (int v = 0; v < kPasses; v++)
      if (first + v * 32 < vectors) held[r][v] = load_host(source + first + v * 32);
  }

  __device__ __forceinline__ void store(int r) {
    const Piece piece = piece_of(jobs[r]);
    const int64_t device_row = hot_row(s.hot_pages, s.row->victim[piece.rank], p.page_shift);
    const int64_t base = piece.layer == 0 ? s.row->first_device_base : p.device_bases[piece.layer];
    int4* target = reinterpret_cast<int4*>(base + device_row * p.row_bytes);
    const int first = piece.part * kPasses * 32 + (static_cast<int>(threadIdx.x) & 31), vectors = p.row_bytes / 16;
#pragma unroll
    for (int v = 0; v < kPasses; v++)
      if (first + v * 32 < vectors) target[first + v * 32] = held[r][v];
  }
};

}  // namespace hisparse
