// How the blocks of a row tell each other what their entries found: every block sends its words to all, itself included, into
// shared memory, where a barrier counts the bytes. No fence is needed, so host rows already under way are not waited for.
#pragma once
#include "lookup.cuh"

namespace hisparse {

// Starts the barrier and announces it; no block may send before all have done this.
template <int kBlocks>
__device__ __forceinline__ void open_exchange(const Shared& s, int k) {
  if constexpr (kBlocks > 1) {
    if (threadIdx.x == 0)
      barrier_expect(s.row->arrived, static_cast<uint32_t>(k + 31) / 32 * (32 * sizeof(uint32_t) + sizeof(PieceSummary)));
    cluster_arrive();
  }
}

// Words of 32 entries at a time, and which of them are misses: eight lanes hold 16 bytes each for one block.
template <int kBlocks>
__device__ __forceinline__ void send_words(const ResolveParams& p, int piece, uint32_t word, const Shared& s) {
  if (piece * 32 >= p.k) return;  // the whole warp
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const PieceSummary summary{__ballot_sync(kFullMask, word < kHit), __ballot_sync(kFullMask, word != kNothing)};
  if constexpr (kBlocks == 1) {
    s.row->words[piece * 32 + lane] = word;
    if (lane == 0) s.row->pieces[piece] = summary;
  } else {
    const int first = (lane & 7) * 4;
    const uint4 four = make_uint4(__shfl_sync(kFullMask, word, first), __shfl_sync(kFullMask, word, first + 1),
                                  __shfl_sync(kFullMask, word, first + 2), __shfl_sync(kFullMask, word, first + 3));
    if (lane < kBlocks) send_to_block(s.row->pieces + piece, make_uint2(summary.missing, summary.wanted), s.row->arrived, lane);
#pragma unroll
    for (int target = lane >> 3; target < kBlocks; target += 4) send_to_block(s.row->words + piece * 32 + first, four, s.row->arrived, target);
  }
}

// Every word of the row is in this block's shared memory when it returns.
template <int kBlocks>
__device__ __forceinline__ void receive_words(const Shared& s) {
  if constexpr (kBlocks > 1)
    barrier_wait(s.row->arrived, 0);
  else
    __syncthreads();
}

}  // namespace hisparse
