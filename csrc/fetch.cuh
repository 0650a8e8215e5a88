// How the rows of misses travel: pieces of at most kPasses x 512 bytes, one a warp, two in flight, through shared memory. All reads
// of a piece leave before anything waits for them, so a piece costs one round trip over the link.
#pragma once
#include "lookup.cuh"

namespace hisparse {

// Pieces that a warp has under way. Where a row has one block, many rows keep the link busy; scores need the shared memory.
constexpr int kScoredInFlight = 1;
__host__ __device__ constexpr int in_flight(int blocks, bool scores) { return scores ? kScoredInFlight : blocks == 1 ? 1 : 2; }
__host__ __device__ constexpr int ring_bytes_of(int in_flight, int passes) { return kResolveWarps * in_flight * passes * 512; }

constexpr int32_t kNoPiece = -1;

// How many misses of 32 entries have their first piece loaded at once, by the warp that found them.
template <int kBlocks, int kInFlight>
__device__ __forceinline__ int loaded_at_once(const ResolveParams& p, int piece) {
  if (p.copy_method != kCopyLoads || p.late_loads) return 0;
  if (kBlocks >= 4) return kInFlight;
  return piece / (kResolveWarps * kBlocks) < kInFlight ? 1 : 0;
}

// The copies of one warp. A job is piece << 16 | rank of the miss; before ranking the entry. jobs[0] is the next to be stored.
template <int kBlocks, int kPasses, int kInFlight>
struct RowFetch {
  const ResolveParams& p;
  const Shared& s;
  int block;
  int32_t jobs[kInFlight];

  __device__ __forceinline__ RowFetch(const ResolveParams& p, const Shared& s, int block) : p(p), s(s), block(block) {
#pragma unroll
    for (int r = 0; r < kInFlight; r++) jobs[r] = kNoPiece;
  }

  // Computed anew where they are used: registers are short. Rows of at most 1,024 bytes are what kPasses = 2 is for.
  __device__ __forceinline__ int pieces_per_row() const { return kPasses == 2 ? 1 : (p.row_bytes + kPasses * 512 - 1) / (kPasses * 512); }
  __device__ __forceinline__ int pieces() const { return pieces_per_row() * p.layers; }  // of one miss, in all layers

  // Sends for the first misses that this warp has found; repeats of a row may travel twice. Copies go in groups, kInFlight a
  // call of this function and of the next, empty ones included: so all know which groups are younger than theirs.
  __device__ __forceinline__ void load_at_once(const Entries<kBlocks>& e) {
    uint32_t missing = 0;
#pragma unroll
    for (int r = 0; r < kInFlight; r++) {
      const int u = kBlocks >= 4 ? 0 : r;
      if (r == 0 || kBlocks < 4) missing = __ballot_sync(kFullMask, e.word[u] < kHit);
      if (missing != 0 && p.copy_method == kCopyLoads && !p.late_loads) {
        const int lane = __ffs(static_cast<int>(missing)) - 1;
        missing &= missing - 1;
        jobs[r] = e.piece(u, block) * 32 + lane;
        load(r, s.row->first_host_base + static_cast<int64_t>(__shfl_sync(kFullMask, e.word[u], lane)) * p.host_row_bytes, 0);
      }
      commit_copies();
    }
  }

  // Ranks are known from here on: takes the jobs of `load_at_once` over and sends for as many more as the warp can hold.
  __device__ __forceinline__ void load_more(int misses, int misses_left) {
#pragma unroll 1
    for (int r = 0; r < kInFlight; r++) {
      const int32_t job = take_first();
      jobs[kInFlight - 1] = job == kNoPiece ? load_next(r, misses, misses_left) : static_cast<int32_t>(s.row->words[job] & kRankMask);
      commit_copies();
    }
  }

  // Victims are known from here on. When a piece is stored, kInFlight - 1 groups are younger than its own.
  __device__ __forceinline__ void finish(int misses, int misses_left) {
#pragma unroll 1
    for (int r = 0, idle = 0; idle < kInFlight; r = (r + 1) % kInFlight) {
      const int32_t job = take_first();
      jobs[kInFlight - 1] = kNoPiece;
      idle = job == kNoPiece ? idle + 1 : 0;
      if (job != kNoPiece) {
        wait_for_copies<kInFlight - 1>();
        store(r, job);
        jobs[kInFlight - 1] = load_next(r, misses, misses_left);
      }
      commit_copies();
    }
  }

 private:
  __device__ __forceinline__ int32_t take_first() {
    const int32_t first = jobs[0];
#pragma unroll
    for (int r = 0; r + 1 < kInFlight; r++) jobs[r] = jobs[r + 1];
    return first;
  }

  __device__ __forceinline__ int layer_of(int piece) const { return pieces_per_row() == 1 ? piece : piece / pieces_per_row(); }

  // Blocks take the rows that are left in turn, warps as they come. Returns the job, if there was one left.
  __device__ __forceinline__ int32_t load_next(int r, int misses, int misses_left) {
    if (p.copy_method != kCopyLoads) return kNoPiece;
    const int total = misses_left + misses * (pieces() - 1);
    int ticket = 0;
    if ((threadIdx.x & 31) == 0) ticket = atomicAdd(&s.row->counts.next_row, 1);
    const int row = __shfl_sync(kFullMask, ticket, 0) * kBlocks + block;
    if (row >= total) return kNoPiece;
    int rank, piece = 0;
    if (row < misses_left) {
      rank = s.row->left[row];
    } else {
      rank = (row - misses_left) / (pieces() - 1);
      piece = 1 + (row - misses_left) - rank * (pieces() - 1);
    }
    const int layer = layer_of(piece);
    const int64_t base = layer == 0 ? s.row->first_host_base : p.host_bases[layer];
    load(r, base + s.row->miss_row[rank] * p.host_row_bytes, piece - layer * pieces_per_row());
    return piece << 16 | rank;
  }

  // This lane's place in the warp's part of the ring; no other lane touches what it holds.
  __device__ __forceinline__ int4* held(int r) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) & 31;
    return reinterpret_cast<int4*>(s.ring) + (warp * kInFlight + r) * kPasses * 32 + lane;
  }

  __device__ __forceinline__ void load(int r, int64_t row_address, int part) {
    const int first = part * kPasses * 32 + (static_cast<int>(threadIdx.x) & 31), vectors = p.row_bytes / 16;
    const int4* source = reinterpret_cast<const int4*>(row_address);
#pragma unroll
    for (int v = 0; v < kPasses; v++)
      if (first + v * 32 < vectors) copy_async(held(r) + v * 32, source + first + v * 32);
  }

  __device__ __forceinline__ void store(int r, int32_t job) {
    const int piece = job >> 16, layer = layer_of(piece), part = piece - layer * pieces_per_row();
    const int64_t device_row = hot_row(s.hot_pages, s.row->victim[job & kRankMask], p.page_shift);
    const int64_t base = layer == 0 ? s.row->first_device_base : p.device_bases[layer];
    int4* target = reinterpret_cast<int4*>(base + device_row * p.row_bytes);
    const int first = part * kPasses * 32 + (static_cast<int>(threadIdx.x) & 31), vectors = p.row_bytes / 16;
#pragma unroll
    for (int v = 0; v < kPasses; v++)
      if (first + v * 32 < vectors) target[first + v * 32] = held(r)[v * 32];
  }
};

}  // namespace hisparse
