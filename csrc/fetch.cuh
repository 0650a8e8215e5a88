// How the rows of misses travel: pieces of at most kPasses x 512 bytes, a warp has up to kInFlight under way. All loads of a warp's
// pieces leave before anything waits for them, so they cost one round trip over the link together.
//
// They travel through registers. A warp knows what has arrived by six counters only, and the loads here hold one of them: between
// their start and their end the kernel reads no global memory, lest that read be counted, and waited for, together with them.
#pragma once
#include "lookup.cuh"

namespace hisparse {

// Pieces that a warp has under way, as registers allow. Where a row has one block, many rows keep the link busy; where it has four
// or eight, one request that misses much beside others that miss nothing must do so by itself, with small pieces too.
__host__ __device__ constexpr int in_flight(int blocks, int passes, bool scores) {
  if (blocks == 1 || scores) return 1;
  return blocks >= 4 && passes == 2 ? 3 : 2;
}

constexpr int32_t kNoPiece = -1;

// How many misses of 32 entries have their first piece loaded at once, by the warp that found them.
template <int kBlocks, int kInFlight>
__device__ __forceinline__ int loaded_at_once(const ResolveParams& p, int piece) {
  if (p.copy_method != kCopyLoads) return 0;
  if (kBlocks >= 4) return kInFlight;
  return piece / (kResolveWarps * kBlocks) < kInFlight ? 1 : 0;
}

// The copies of one warp. A job is piece << 16 | rank of the miss, kept from ranking on: which misses were sent for before that, the
// row's pieces say.
template <int kBlocks, int kPasses, int kInFlight>
struct RowFetch {
  const ResolveParams& p;
  const Shared& s;
  int block;
  int32_t jobs[kInFlight];
  int4 held[kInFlight][kPasses];

  __device__ __forceinline__ RowFetch(const ResolveParams& p, const Shared& s, int block) : p(p), s(s), block(block) {}

  // Computed anew where they are used: registers are short. Rows of at most 1,024 bytes are what kPasses = 2 is for.
  __device__ __forceinline__ int pieces_per_row() const { return kPasses == 2 ? 1 : (p.row_bytes + kPasses * 512 - 1) / (kPasses * 512); }
  __device__ __forceinline__ int pieces() const { return pieces_per_row() * p.layers; }  // of one miss, in all layers

  // Sends for the first misses that this warp has found; repeats of a row may travel twice.
  __device__ __forceinline__ void load_at_once(const Entries<kBlocks>& e) {
    if (p.copy_method != kCopyLoads) return;
    int64_t address[kInFlight];
    bool wanted[kInFlight];
    uint32_t missing = 0;
#pragma unroll
    for (int r = 0; r < kInFlight; r++) {
      const int u = kBlocks >= 4 ? 0 : r;
      if (r == 0 || kBlocks < 4) missing = __ballot_sync(kFullMask, e.word[u] < kHit);
      wanted[r] = missing != 0;
      const int lane = wanted[r] ? __ffs(static_cast<int>(missing)) - 1 : 0;
      missing &= missing - 1;
      address[r] = s.row->first_host_base + static_cast<int64_t>(__shfl_sync(kFullMask, e.word[u], lane)) * p.host_row_bytes;
    }
#pragma unroll
    for (int r = 0; r < kInFlight; r++) load(r, address[r], 0, wanted[r]);
  }

  // Ranks are known from here on: takes over what `load_at_once` has sent for. A warp that sent for nothing sends for the next rows.
  __device__ __forceinline__ void load_more(int misses, int misses_left) {
    bool none = true;
    uint32_t missing = 0;
#pragma unroll
    for (int r = 0; r < kInFlight; r++) {
      const int piece = Entries<kBlocks>::piece(kBlocks >= 4 ? 0 : r, block);
      if (r == 0 || kBlocks < 4) missing = p.copy_method == kCopyLoads && piece * 32 < p.k ? s.row->pieces[piece].missing : 0;
      jobs[r] = kNoPiece;
      if (missing == 0) continue;
      jobs[r] = static_cast<int32_t>(s.row->words[piece * 32 + __ffs(static_cast<int>(missing)) - 1] & kRankMask);
      missing &= missing - 1;
      none = false;
    }
    if (none) load_next(misses, misses_left);
  }

  // Victims are known from here on.
  __device__ __forceinline__ void finish(int misses, int misses_left) {
#pragma unroll 1
    while (true) {
      int taken = 0;
#pragma unroll
      for (int r = 0; r < kInFlight; r++) {
        if (jobs[r] == kNoPiece) continue;
        store(r);
        taken++;
      }
      if (taken == 0) return;
      load_next(misses, misses_left);
    }
  }

 private:
  __device__ __forceinline__ int layer_of(int piece) const { return pieces_per_row() == 1 ? piece : piece / pieces_per_row(); }

  // Blocks take the rows that are left in turn, warps as they come.
  __device__ __forceinline__ void load_next(int misses, int misses_left) {
    const int total = p.copy_method == kCopyLoads ? misses_left + misses * (pieces() - 1) : 0;
    int ticket = 0;
    if ((threadIdx.x & 31) == 0) ticket = atomicAdd(&s.row->counts.next_row, kInFlight);
    ticket = __shfl_sync(kFullMask, ticket, 0);
    int64_t address[kInFlight];
    int part[kInFlight];
#pragma unroll
    for (int r = 0; r < kInFlight; r++) {
      const int row = (ticket + r) * kBlocks + block;
      jobs[r] = kNoPiece;
      address[r] = 0;
      part[r] = 0;
      if (row >= total) continue;
      int rank, piece = 0;
      if (row < misses_left) {
        rank = s.row->left[row];
      } else {
        rank = (row - misses_left) / (pieces() - 1);
        piece = 1 + (row - misses_left) - rank * (pieces() - 1);
      }
      jobs[r] = piece << 16 | rank;
      const int layer = layer_of(piece);
      part[r] = piece - layer * pieces_per_row();
      const int64_t base = layer == 0 ? s.row->first_host_base : p.host_bases[layer];
      address[r] = base + s.row->miss_row[rank] * p.host_row_bytes;
    }
#pragma unroll
    for (int r = 0; r < kInFlight; r++) load(r, address[r], part[r], jobs[r] != kNoPiece);
  }

  // A warp's loads of all its pieces stand together, without a branch between them: then none waits for another.
  __device__ __forceinline__ void load(int r, int64_t row_address, int part, bool wanted) {
    const int first = part * kPasses * 32 + (static_cast<int>(threadIdx.x) & 31), vectors = wanted ? p.row_bytes / 16 : 0;
    const int4* source = reinterpret_cast<const int4*>(row_address);
#pragma unroll
    for (int v = 0; v < kPasses; v++)
      if (first + v * 32 < vectors) held[r][v] = load_host(source + first + v * 32);
  }

  __device__ __forceinline__ void store(int r) {
    const int piece = jobs[r] >> 16, layer = layer_of(piece), part = piece - layer * pieces_per_row();
    const int64_t device_row = hot_row(s.hot_pages, s.row->victim[jobs[r] & kRankMask], p.page_shift);
    const int64_t base = layer == 0 ? s.row->first_device_base : p.device_bases[layer];
    int4* target = reinterpret_cast<int4*>(base + device_row * p.row_bytes);
    const int first = part * kPasses * 32 + (static_cast<int>(threadIdx.x) & 31), vectors = p.row_bytes / 16;
#pragma unroll
    for (int v = 0; v < kPasses; v++)
      if (first + v * 32 < vectors) target[first + v * 32] = held[r][v];
  }
};

}  // namespace hisparse
