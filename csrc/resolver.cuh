// The resolver: top-k positions of one decode step -> device rows, fetching missing rows from the host on the way.
//
// One cluster of blocks works on one batch row. Every block of it resolves the whole row by itself from the same state
// (cheaper than handing a plan over), then copies its share of the misses; only the leader (rank 0) writes outputs and
// state. The cluster barrier keeps the leader's writes behind the helpers' reads; arriving costs nothing and the leader
// waits only while its copies are under way.
//
// Every number depends on entry order and slot order alone, never on timing: miss ranks follow the first occurrences in the
// row, victims the rule of victims.cuh. Two rows of one step must not name the same request slot: they would race for
// victims (bytes stay in bounds).
#pragma once
#include "victims.cuh"

namespace hisparse {

// Ranks the misses in entry order, publishes host row and rank of each; returns their number.
__device__ __forceinline__ int rank_misses(const uint32_t (&ballots)[kEntriesPerThread], const Entries& e, const Shared& s) {
  static_assert(kEntriesPerThread == 2, "counts of the two halves share one word");
  const uint32_t lane_bit = 1u << (threadIdx.x & 31);
  const BlockPrefix sums = prefix_of_warps(s.warp_sums);
  const uint32_t half_total = sums.total & 0xffffu;
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++) {
    if (!(ballots[u] & lane_bit)) continue;
    const uint32_t before = u == 0 ? sums.before & 0xffffu : half_total + (sums.before >> 16);
    const uint32_t rank = before + __popc(ballots[u] & (lane_bit - 1));
    s.miss_row[rank] = e.host_row[u];
    s.answer[e.place[u]] = static_cast<uint16_t>(kRankBit | rank);
  }
  return static_cast<int>(half_total + (sums.total >> 16));
}

__device__ __forceinline__ void store_rows(const ResolveParams& p, int32_t row, const Entries& e) {
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++)
    if (entry_index(u) < p.k) p.out[row * p.out_stride + entry_index(u)] = e.row[u];
}

// Called by the leader's first warp, the only writer of this header line.
__device__ __forceinline__ void add_counters(int32_t* header, const Shared& s, int hot, int fetched, int failed) {
  const uint32_t counted = __reduce_add_sync(kFullMask, s.warp_counts[threadIdx.x & 31]);
  const int resident = static_cast<int>(counted & 0xffffu), errors = static_cast<int>(counted >> 16) + failed;
  if (threadIdx.x != 0) return;
  if (resident) atomicAdd(&header[kResidentEntries], resident);
  if (hot) atomicAdd(&header[kHotEntries], hot);
  if (fetched) atomicAdd(&header[kFetchedRows], fetched);
  if (errors) atomicAdd(&header[kErrorEntries], errors);
}

// The leader's writes of a step without misses; hits have refreshed their stamps.
__device__ __forceinline__ void finish_hits(const ResolveParams& p, int32_t row, const Entries& e, const Shared& s, const SlotState& state,
                                            int hot_entries) {
  int32_t* header = state.header(p);
  store_rows(p, row, e);
  if ((threadIdx.x & 31) == 0 && hot_entries) atomicAdd(&header[kHotEntries], hot_entries);
  if (threadIdx.x < 32) add_counters(header, s, 0, 0, 0);
  if (threadIdx.x == 0) header[kClock] = static_cast<int32_t>(state.clock + kClockPerStep);
}

// The leader's writes of a step with misses; they run behind the cluster barrier, while rows are under way.
template <int kGroups>
__device__ __forceinline__ void finish_misses(const ResolveParams& p, int32_t row, Entries& e, const Shared& s, const SlotState& state,
                                              int hot_entries, int misses, int fetched) {
  int32_t* header = state.header(p);
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++)
    if (e.row[u] < 0 && e.host_row[u] >= 0) {
      const int rank = s.answer[e.place[u]] & (kRankBit - 1);
      if (rank < fetched) e.row[u] = hot_row(s.hot_pages, s.victim[rank], p.page_shift);
    }
  store_rows(p, row, e);
  if ((threadIdx.x & 31) == 0 && hot_entries) atomicAdd(&header[kHotEntries], hot_entries);
  if (threadIdx.x < 32) add_counters(header, s, -misses, fetched, misses - fetched);
  if (state.stale) {
#pragma unroll
    for (int g = 0; g < kGroups; g++)
      if (OwnSlots<kGroups>::first(g) < p.buffer_size)
        *reinterpret_cast<int4*>(state.tags(p) + OwnSlots<kGroups>::first(g)) = make_int4(-1, -1, -1, -1);
    __syncthreads();
  }
  const uint8_t now = static_cast<uint8_t>(state.now(p));
  for (int m = static_cast<int>(threadIdx.x); m < fetched; m += kThreads) {
    state.tags(p)[s.victim[m]] = s.miss_row[m];
    state.stamps(p)[s.victim[m]] = now;
  }
  if (threadIdx.x == 0) {
    header[kStateGeneration] = state.lease_generation;
    header[kClock] = static_cast<int32_t>(state.clock + fetched + kClockPerStep);
  }
}

// kPasses: see WarpCopy; only for kCopyLoads.
template <int kGroups, int kCopy, int kPasses>
__global__ void __launch_bounds__(kThreads, 1) resolve_kernel(const __grid_constant__ ResolveParams p, const int table_bits,
                                                              const int ring_stages) {
  const Shared s = carve(block_shared_memory(), p.k, p.num_hot_pages, table_bits);
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int blocks = static_cast<int>(gridDim.x), block_rank = static_cast<int>(blockIdx.x);
  const int32_t row = static_cast<int32_t>(blockIdx.y);
  const bool leader = block_rank == 0;

  if (p.overlap_launch) {  // shared memory is all that may be touched before the kernel ahead of this one has ended
    clear_table(s, table_bits);
    wait_for_previous_kernel();
  }
  Entries e;
  load_positions(p, row, e);
  const int64_t req_slot = load_index(p.req_slots, row, p.wide_req_slots);
  const bool slot_exists = req_slot >= 0 && req_slot < p.num_slots;
  const int32_t slot = slot_exists ? static_cast<int32_t>(req_slot) : 0;  // the header of slot 0 counts the errors
  const int64_t seq_len = slot_exists ? load_index(p.seq_lens, row, p.wide_seq_lens) : 0;
  const int32_t* lease = p.hot_pages + slot * p.hot_pages_stride;
  const bool has_lease = slot_exists && lease[0] > 0;
  const bool padding = row >= *p.num_real_rows;
  if (!leader && (padding || !has_lease)) return;  // nothing to copy: the whole cluster agrees
  if (padding) {
#pragma unroll
    for (int u = 0; u < kEntriesPerThread; u++) e.row[u] = -1;
    store_rows(p, row, e);
    return;
  }

  load_pages(p, row, seq_len, e);
  const SlotState state = load_state(p, slot);
  OwnSlots<kGroups> own;
#pragma unroll
  for (int g = 0; g < own.kEarly; g++) own.load(p, state, has_lease && !state.stale, g, g);
  if (has_lease) {
    if (!p.overlap_launch) clear_table(s, table_bits);
    for (int i = thread; i < p.num_hot_pages; i += kThreads) s.hot_pages[i] = lease[i];
  }
  const uint32_t counted = __reduce_add_sync(kFullMask, classify(p, has_lease, e));
  if (lane == 0) s.warp_counts[warp] = counted;
  if (!__syncthreads_or(e.host_row[0] >= 0 || e.host_row[1] >= 0)) {  // all resident: a translation and nothing else
    if (leader) store_rows(p, row, e);
    if (leader && warp == 0) add_counters(state.header(p), s, 0, 0, 0);
    return;
  }

  const int inserted = __reduce_add_sync(kFullMask, insert_wanted(table_bits, s, e));
  if (lane == 0 && inserted) atomicAdd(&s.counts->distinct, inserted);
  __syncthreads();
  const int found = __reduce_add_sync(kFullMask, match_slots<kGroups>(p, state, leader, table_bits, s, own));
  if (lane == 0 && found) atomicAdd(&s.counts->found, found);
  __syncthreads();

  // Hits are final now; what is still unresolved is a miss or repeats one.
  const int hot_entries = __reduce_add_sync(kFullMask, (e.host_row[0] >= 0) + (e.host_row[1] >= 0));
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++) {
    if (e.host_row[u] < 0) continue;
    const uint32_t answer = s.answer[e.place[u]];
    if (answer != kUnresolved)
      e.row[u] = hot_row(s.hot_pages, static_cast<int>(answer), p.page_shift);
    else
      atomicMax(&s.keys[e.place[u]], first_code(entry_index(u)));
  }
  if (s.counts->distinct == s.counts->found) {
    if (leader) finish_hits(p, row, e, s, state, hot_entries);
    return;
  }
  if (blocks > 1) cluster_arrive();  // the tags and stamps of this row have been read
  count_orders<kGroups>(own, s);
  __syncthreads();

  uint32_t ballots[kEntriesPerThread];
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++) {
    const bool unresolved = e.row[u] < 0 && e.host_row[u] >= 0;
    ballots[u] = __ballot_sync(kFullMask, unresolved && s.keys[e.place[u]] == first_code(entry_index(u)));
  }
  if (lane == 0) s.warp_sums[warp] = __popc(ballots[0]) | (__popc(ballots[1]) << 16);
  __syncthreads();
  const int misses = rank_misses(ballots, e, s);
  __syncthreads();

  // Host rows are known before their victims: the first loads leave now and travel while victims are chosen.
  MissRows rows{p, s.miss_row, s.victim, s.hot_pages, block_rank, blocks, misses};
  WarpCopy<kPasses == 2 && kGroups < 8 ? 2 : 1, kPasses> copy(p.row_bytes, warp, kWarps);
  if constexpr (kCopy == kCopyLoads) copy.load(rows);
  if constexpr (kCopy == kCopyBulk) start_bulk_copies(rows, p.row_bytes, s.ring, ring_stages);

  const Threshold threshold = victim_threshold(s.histogram, misses);
  // Fewer victims than misses cannot happen while tags are unique and buffer_size >= k; if it does, entries fail alone.
  const int fetched = min(misses, static_cast<int>(threshold.available));
  const uint32_t candidates = count_candidates<kGroups>(own, threshold.order);
  const uint32_t upto = warp_inclusive_sum(candidates);
  if (lane == 31) s.warp_sums[kWarps + warp] = upto;
  __syncthreads();
  const BlockPrefix sums = prefix_of_warps(s.warp_sums + kWarps);
  place_victims<kGroups>(own, threshold, sums.before + upto - candidates, fetched, s);
  __syncthreads();

  if (blocks > 1) cluster_wait();
  if (leader) finish_misses<kGroups>(p, row, e, s, state, hot_entries, misses, fetched);
  rows.count = fetched;
  if constexpr (kCopy == kCopyLoads) copy.finish(rows);
  if constexpr (kCopy == kCopyBulk) finish_bulk_copies(rows, p.row_bytes, s.ring, ring_stages);
}

}  // namespace hisparse
