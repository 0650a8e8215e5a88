// The resolver: top-k positions of one decode step -> device rows, fetching missing rows from the host on the way.
//
// One cluster of blocks works on one batch row. Each looks its share of the entries up and sends for the first rows that it misses;
// then all tell each other what they found (exchange.cuh) and every block works out the same ranks and victims by itself, while
// rows travel. A block answers its own entries, writes the state of every kBlocks-th miss, and copies its share of the rows.
//
// The longest chain without a miss: positions -> pages -> table -> exchange. The state is read before the exchange and written
// behind it (but for what eviction by scores reads, and for a lease's first step: those take another cluster barrier).
//
// Every number depends on entry order and slot order alone, never on timing: miss ranks follow the first occurrences in the
// row, victims the rule of victims.cuh. Two rows of one step must not name the same request slot: they would race for
// victims (bytes stay in bounds).
#pragma once
#include "exchange.cuh"
#include "fetch.cuh"
#include "scores.cuh"
#include "slot_table.cuh"

namespace hisparse {

template <int kBlocks>
__device__ __forceinline__ void store_rows(const ResolveParams& p, int32_t row, int block, const Entries<kBlocks>& e) {
#pragma unroll
  for (int u = 0; u < e.kCount; u++)
    if (e.index(u, block) < p.k) p.out[row * p.out_stride + e.index(u, block)] = e.row[u];
}

__device__ __forceinline__ void count_entries(int32_t* header, uint32_t counted) {
  if ((threadIdx.x & 31) != 0) return;
  if (counted & 0xffffu) atomicAdd(&header[kResidentEntries], static_cast<int32_t>(counted & 0xffffu));
  if (counted >> 16) atomicAdd(&header[kErrorEntries], static_cast<int32_t>(counted >> 16));
}

// Brings to shared memory what a row with hot rows needs: its loads leave together with those of the pages.
__device__ __forceinline__ void request_lease(const ResolveParams& p, const int32_t* lease, const Shared& s) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < p.num_hot_pages; i += kResolveThreads) copy_async(s.hot_pages + i, lease + i);
  if (threadIdx.x == 0) {
    copy_async(&s.row->first_host_base, p.host_bases);
    copy_async(&s.row->first_device_base, p.device_bases);
  }
  commit_copies();
}

// Looks the wanted entries up. Lease, stamps and cleared shared memory are ready behind its barrier.
template <int kBlocks, bool kScores>
__device__ __forceinline__ void find_hot(const ResolveParams& p, const SlotState& state, const Shared& s, Entries<kBlocks>& e) {
  constexpr int kAtOnce = e.kCount == 2 ? 2 : 1;
  const uint32_t* table = table_of(p, state.slot);
  TableView views[kAtOnce];
#pragma unroll
  for (int u = 0; u < kAtOnce; u++) views[u].load(p, table, !state.stale(), static_cast<int32_t>(e.word[u]));
  if constexpr (!kScores) request_stamps(p, state.slot, s);
  commit_copies();
  wait_for_copies<0>();  // of every thread, before this block tells others anything: then they may write stamps
  __syncthreads();
#pragma unroll
  for (int first = 0; first < e.kCount; first += kAtOnce) {
#pragma unroll
    for (int u = 0; u < kAtOnce; u++)
      if (first > 0) views[u].load(p, table, !state.stale(), static_cast<int32_t>(e.word[first + u]));
#pragma unroll
    for (int u = 0; u < kAtOnce; u++) {
      const int32_t slot = views[u].find(p, static_cast<int32_t>(e.word[first + u]));
      if (slot >= 0) e.word[first + u] = kHit | static_cast<uint32_t>(slot);
    }
  }
}

// A block goes through the whole row four times 512 entries at a time; entry `u` of a thread is this one.
__device__ __forceinline__ int scanned_entry(int u) { return u * kResolveThreads + static_cast<int>(threadIdx.x); }

__device__ __forceinline__ uint32_t lanes_before() { return (1u << (threadIdx.x & 31)) - 1; }

// How many of these misses were not sent for at once: the first ones were.
template <int kBlocks, int kInFlight>
__device__ __forceinline__ int count_left(const ResolveParams& p, int u, uint32_t missing) {
  return max(0, __popc(missing) - loaded_at_once<kBlocks, kInFlight>(p, scanned_entry(u) / 32));
}

// What a thread sees of the whole row.
struct RowWords {
  uint32_t word[kScans];
  uint32_t missing[kScans];  // which of the 32 entries around it are misses
};

// Counts misses. Ends with a block barrier; returns whether there are any.
template <int kBlocks, int kInFlight, bool kScores>
__device__ __forceinline__ bool look_over(const ResolveParams& p, const Shared& s, const Entries<kBlocks>& e, RowWords& words) {
  uint32_t any = 0;
  int wanted = 0;
#pragma unroll
  for (int u = 0; u < kScans; u++)
    if constexpr (kBlocks == 1 && !kScores)
      words.word[u] = e.word[u];  // the same entries
    else
      words.word[u] = scanned_entry(u) < p.k ? s.row->words[scanned_entry(u)] : kNothing;
#pragma unroll
  for (int u = 0; u < kScans; u++) {
    words.missing[u] = __ballot_sync(kFullMask, words.word[u] < kHit);
    wanted += __popc(__ballot_sync(kFullMask, words.word[u] != kNothing));
    any |= words.missing[u];
    if ((threadIdx.x & 31) == 0)
      s.row->sums[scanned_entry(u) / 32] = __popc(words.missing[u]) | (count_left<kBlocks, kInFlight>(p, u, words.missing[u]) << 16);
  }
  if ((threadIdx.x & 31) == 0 && wanted) atomicAdd(&s.row->counts.wanted, wanted);
  return __syncthreads_or(any != 0) != 0;
}

// Misses | left << 16, in all and ahead of 32 entries at a time: lane i holds it for those that this warp scans as its turn
// 2 * (i - warp / 2) / kResolveWarps.
struct Ranks {
  uint32_t ahead, total;

  __device__ __forceinline__ uint32_t before(int u) const {
    return __shfl_sync(kFullMask, ahead, scanned_entry(u) / 64);
  }
};

__device__ __forceinline__ Ranks sum_ranks(const Shared& s) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / 32;
  static_assert(kScans * kResolveWarps == 64, "two sums a lane");
  const uint32_t even = s.row->sums[2 * lane], odd = s.row->sums[2 * lane + 1];
  const uint32_t upto = warp_inclusive_sum(even + odd);
  return {warp & 1 ? upto - odd : upto - odd - even, __shfl_sync(kFullMask, upto, 31)};
}

// Writes a miss down under its rank; `before` are the misses | left << 16 ahead of the 32 entries, `at` and `left` count on from there.
__device__ __forceinline__ uint32_t note_miss(const Shared& s, int entry, uint32_t host_row, uint32_t before, int at, int left) {
  const uint32_t rank = (before & 0xffffu) + at;
  s.row->miss_row[rank] = static_cast<int32_t>(host_row);
  s.row->miss_entry[rank] = static_cast<uint16_t>(entry);
  s.row->words[entry] = kRanked | rank;
  if (left >= 0) s.row->left[(before >> 16) + left] = static_cast<uint16_t>(rank);
  return rank;
}

// Of equal misses the smallest entry counts: ranks them anew. Rare, an indexer selects no position twice. Ends with a block barrier.
template <int kBlocks, int kInFlight>
__device__ __forceinline__ uint32_t settle_repeats(const ResolveParams& p, const Shared& s, const RowWords& words) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int u = 0; u < kScans; u++)
    if (words.word[u] < kHit) atomicMax(&s.row->keys[s.row->victim[scanned_entry(u)]], first_code(scanned_entry(u)));
  __syncthreads();
  uint32_t firsts[kScans], lefts[kScans];
#pragma unroll
  for (int u = 0; u < kScans; u++) {
    const int entry = scanned_entry(u);
    const bool is_first = words.word[u] < kHit && s.row->keys[s.row->victim[entry]] == first_code(entry);
    const int at = __popc(words.missing[u] & lanes_before());
    firsts[u] = __ballot_sync(kFullMask, is_first);
    lefts[u] = __ballot_sync(kFullMask, is_first && at >= loaded_at_once<kBlocks, kInFlight>(p, entry / 32));
    if (lane == 0) s.row->sums[entry / 32] = __popc(firsts[u]) | (__popc(lefts[u]) << 16);
  }
  __syncthreads();
  const Ranks ranks = sum_ranks(s);
#pragma unroll
  for (int u = 0; u < kScans; u++) {
    const uint32_t before = ranks.before(u);
    if (!((firsts[u] >> lane) & 1u)) continue;
    const int entry = scanned_entry(u), left = (lefts[u] >> lane) & 1u ? __popc(lefts[u] & lanes_before()) : -1;
    s.row->keys[s.row->victim[entry]] = note_miss(s, entry, words.word[u], before, __popc(firsts[u] & lanes_before()), left);
  }
  __syncthreads();
#pragma unroll
  for (int u = 0; u < kScans; u++)
    if (words.word[u] < kHit && !((firsts[u] >> lane) & 1u))
      s.row->words[scanned_entry(u)] = kRanked | kRepeats | s.row->keys[s.row->victim[scanned_entry(u)]];
  __syncthreads();
  return ranks.total;
}

// Ranks the misses in entry order and keeps the slots of hits. Ends with a block barrier; returns misses | left << 16.
template <int kBlocks, int kInFlight, bool kScores>
__device__ __forceinline__ uint32_t rank_misses(const ResolveParams& p, int table_bits, const Shared& s, const RowWords& words) {
  uint32_t kept[kScans], other[kScans];
#pragma unroll
  for (int u = 0; u < kScans; u++) {  // all atomics that are waited for leave together
    const bool hit = words.word[u] >= kHit && words.word[u] != kNothing;
    kept[u] = kNoVictim;
    if (hit) kept[u] = keep_slot<kScores>(static_cast<int>(words.word[u] & ~kHit), s);
    if (words.word[u] < kHit) other[u] = enter_miss(words.word[u], table_bits, s);
  }
  const Ranks ranks = sum_ranks(s);
#pragma unroll
  for (int u = 0; u < kScans; u++) {
    if (kept[u] != kNoVictim) atomicAdd(&s.row->histogram[kept[u]], kFullMask);  // one less
    const uint32_t before = ranks.before(u);
    const int entry = scanned_entry(u), at = __popc(words.missing[u] & lanes_before());
    if (words.word[u] >= kHit) continue;
    note_miss(s, entry, words.word[u], before, at, at - loaded_at_once<kBlocks, kInFlight>(p, entry / 32));
    bool repeated;
    s.row->victim[entry] = static_cast<uint16_t>(settle_place(words.word[u], other[u], table_bits, s, repeated));
    if (repeated) atomicOr(&s.row->counts.duplicates, 1);
  }
  __syncthreads();
  return s.row->counts.duplicates ? settle_repeats<kBlocks, kInFlight>(p, s, words) : ranks.total;
}

// Every slot counts as empty from here on: this block's share of tags and table.
template <int kBlocks>
__device__ __forceinline__ void forget_slots(const ResolveParams& p, const SlotState& state, int block) {
  const int first = block * kResolveThreads + static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int i = first; i < p.buffer_size; i += kBlocks * kResolveThreads) state.tags(p)[i] = -1;
#pragma unroll 1
  for (int i = first; i < 4 << p.home_bits; i += kBlocks * kResolveThreads)
    reinterpret_cast<int4*>(table_of(p, state.slot))[i] = make_int4(-1, -1, -1, -1);
  fence_all_blocks();
}

// Notes the use of the block's hits. kSkip: a stamp that says so already is left alone, which most do where nothing is missed.
template <int kBlocks, bool kSkip>
__device__ __forceinline__ void refresh_stamps(const ResolveParams& p, const SlotState& state, const Shared& s, const Entries<kBlocks>& e) {
#pragma unroll
  for (int u = 0; u < e.kCount; u++) {
    if (e.word[u] < kHit || e.word[u] == kNothing) continue;
    const int slot = static_cast<int>(e.word[u] & ~kHit);
    if (!kSkip || order_of(slot, s) != kAgeUnits + 1) state.stamps(p)[slot] = static_cast<uint8_t>(state.now);
  }
}

// Answers the block's share of the misses and writes down what their slots hold now. The last warps begin: they have no rows that
// were sent for at once.
template <int kBlocks>
__device__ __forceinline__ void take_slots(const ResolveParams& p, int32_t row, int block, const SlotState& state, const Shared& s, int misses) {
  uint32_t* table = table_of(p, state.slot);
#pragma unroll 1
  for (int rank = (kResolveThreads - 1 - static_cast<int>(threadIdx.x)) * kBlocks + block; rank < misses; rank += kResolveThreads * kBlocks) {
    const int slot = s.row->victim[rank], entry = s.row->miss_entry[rank];
    const int32_t host_row = s.row->miss_row[rank];
    const int32_t leaving = slot < state.filled() ? state.tags(p)[slot] : -1;
    p.out[row * p.out_stride + entry] = hot_row(s.hot_pages, slot, p.page_shift);
    state.stamps(p)[slot] = static_cast<uint8_t>(state.now);
    if (p.slot_pages != nullptr) {
      const int32_t position = p.top_k[row * p.top_k_stride + entry];
      p.slot_pages[state.slot * p.slot_pages_stride + slot] = static_cast<uint16_t>(position >> p.page_shift);
    }
    table_replace(p, table, static_cast<uint32_t>(host_row), leaving, static_cast<uint32_t>(slot));
    state.tags(p)[slot] = host_row;
  }
  if (!s.row->counts.duplicates) return;
#pragma unroll 1
  for (int entry = block * kResolveThreads + static_cast<int>(threadIdx.x); entry < p.k; entry += kBlocks * kResolveThreads) {
    const uint32_t word = s.row->words[entry];
    if (word >= (kRanked | kRepeats) && word != kNothing)
      p.out[row * p.out_stride + entry] = hot_row(s.hot_pages, s.row->victim[word & kRankMask], p.page_shift);
  }
}

// By one thread of the row, once all blocks have read the header.
__device__ __forceinline__ void write_header(const ResolveParams& p, const SlotState& state, const Shared& s, int misses) {
  int32_t* header = state.header(p);
  const int wanted = s.row->counts.wanted;
  if (wanted == 0) return;
  header[kClock] = static_cast<int32_t>(static_cast<uint32_t>(s.row->head.z) + static_cast<uint32_t>(misses) + kClockPerStep);
  if (wanted > misses) atomicAdd(&header[kHotEntries], wanted - misses);
  if (misses == 0) return;
  atomicAdd(&header[kFetchedRows], misses);
  header[kFilledSlots] = min(p.buffer_size, state.filled() + misses);
  if (state.stale()) header[kStateGeneration] = s.row->head.x;
}

// kPasses x 512 bytes of a row travel at a time. kScores: p.scores are there and choose the victims.
template <int kBlocks, int kPasses, bool kScores>
__global__ void __launch_bounds__(kResolveThreads, 2) resolve_kernel(const __grid_constant__ ResolveParams p, const int table_bits) {
  constexpr int kInFlight = in_flight(kBlocks, kScores);
  const Shared s = carve(block_shared_memory(), p.buffer_size, ring_bytes_of(kInFlight, kPasses));
  const int block = static_cast<int>(blockIdx.x);
  const int32_t row = static_cast<int32_t>(blockIdx.y);
  open_exchange<kBlocks>(s, p.k);
  if (p.overlap_launch) {  // shared memory is all that may be touched before the kernel ahead of this one has ended
    clear_shared<kScores>(s, p.buffer_size, table_bits);
    launch_next_kernel();
    wait_for_previous_kernel();
  }

  Entries<kBlocks> e;
  load_positions(p, row, block, e);
  const int64_t req_slot = load_index(p.req_slots, row, p.wide_req_slots);
  const bool slot_exists = req_slot >= 0 && req_slot < p.num_slots;
  const int32_t slot = slot_exists ? static_cast<int32_t>(req_slot) : 0;  // the header of slot 0 counts the errors
  const int64_t given_len = load_index(p.seq_lens, row, p.wide_seq_lens), seq_len = slot_exists ? given_len : 0;
  if (row >= *p.num_real_rows) {
#pragma unroll
    for (int u = 0; u < e.kCount; u++) e.row[u] = -1;
    store_rows(p, row, block, e);
    return;
  }
  RowFetch<kBlocks, kPasses, kInFlight> fetch(p, s, block);
  const int32_t* lease = p.hot_pages + slot * p.hot_pages_stride;
  const bool has_lease = slot_exists && lease[0] > 0;
  int32_t page[e.kCount];
  load_pages(p, row, seq_len, e, page);
  request_lease(p, lease, s);
  const SlotState state = load_state(p, slot, s);
  if (!p.overlap_launch) clear_shared<kScores>(s, p.buffer_size, table_bits);
  count_entries(state.header(p), classify(p, has_lease, page, e));
  if (!has_lease) {  // a translation and nothing else
    store_rows(p, row, block, e);
    return;
  }

  find_hot<kBlocks, kScores>(p, state, s, e);
  if constexpr (kScores) request_scores(p, row, state, s);
  fetch.load_at_once(e);
  if constexpr (kBlocks > 1) cluster_wait();  // every block's barrier is ready
#pragma unroll
  for (int u = 0; u < e.kCount; u++) {
    send_words<kBlocks>(p, e.piece(u, block), e.word[u], s);
    if (e.word[u] >= kHit && e.word[u] != kNothing) e.row[u] = hot_row(s.hot_pages, static_cast<int>(e.word[u] & ~kHit), p.page_shift);
  }
  store_rows(p, row, block, e);
  if constexpr (!kScores) count_orders(p, state, s);  // while words travel
  receive_words<kBlocks>(s);
  if (p.copy_method == kCopyLookup) return;

  RowWords words;
  const bool writes_header = block == 0 && threadIdx.x == 0;
  if (!look_over<kBlocks, kInFlight, kScores>(p, s, e, words)) {
    refresh_stamps<kBlocks, !kScores>(p, state, s, e);
    if (writes_header) write_header(p, state, s, 0);
    return;
  }
  refresh_stamps<kBlocks, false>(p, state, s, e);
  const uint32_t ranked = rank_misses<kBlocks, kInFlight, kScores>(p, table_bits, s, words);
  const int misses = static_cast<int>(ranked & 0xffffu), misses_left = static_cast<int>(ranked >> 16);
  fetch.load_more(misses, misses_left);
  if (state.stale()) forget_slots<kBlocks>(p, state, block);
  if constexpr (kScores)
    choose_by_score(p, state, static_cast<uint32_t>(misses), s);
  else
    choose_victims(p, static_cast<uint32_t>(misses), s);
  if constexpr (kBlocks > 1)
    if (kScores || state.stale()) {  // all blocks have read stamps, or have forgotten the slots
      cluster_arrive();
      cluster_wait();
    }
  take_slots<kBlocks>(p, row, block, state, s, misses);
  if (writes_header) write_header(p, state, s, misses);
  fetch.finish(misses, misses_left);
}

}  // namespace hisparse
