// The resolver: top-k positions of one decode step -> device rows, fetching missing rows from the host on the way.
//
// One cluster of blocks works on one batch row. Each looks its share of the entries up and starts the first rows that it misses;
// then all tell each other what they found (exchange.cuh) and every block works out the same ranks and victims by itself.
// A block answers its own entries, writes the state of the rows that they miss, and copies its share of the rows.
//
// The longest chain without a miss: positions -> pages -> table -> exchange. With misses ranks and victims follow while the first
// rows travel. All global reads of the state lie before the second cluster barrier, all its writes but stamps of hits behind it.
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
__device__ __forceinline__ void prepare_row(const ResolveParams& p, const int32_t* lease, const Shared& s) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < p.num_hot_pages; i += kResolveThreads) copy_to_shared(s.hot_pages + i, lease + i);
  if (threadIdx.x == 0) {
    copy_to_shared(&s.row->first_host_base, p.host_bases);
    copy_to_shared(&s.row->first_device_base, p.device_bases);
  }
}

// Looks the wanted entries up and answers those that are hot. The lease and the cleared shared memory are ready behind its barrier.
template <int kBlocks>
__device__ __forceinline__ void find_hot(const ResolveParams& p, const SlotState& state, Entries<kBlocks>& e) {
  constexpr int kAtOnce = e.kCount == 2 ? 2 : 1;
  const uint32_t* table = table_of(p, state.slot);
  TableView views[kAtOnce];
#pragma unroll
  for (int u = 0; u < kAtOnce; u++) views[u].load(p, table, !state.stale(), static_cast<int32_t>(e.word[u]));
  wait_for_copies_to_shared();
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

// Whether the first piece of a miss is loaded late: `missing` are the misses among the 32 entries around it.
template <int kBlocks, int kInFlight>
__device__ __forceinline__ bool is_left(const ResolveParams& p, int u, uint32_t missing) {
  return __popc(missing & lanes_before()) >= loaded_at_once<kBlocks, kInFlight>(p, scanned_entry(u) / 32);
}

__device__ __forceinline__ void note_sums(const Shared& s, int u, uint32_t misses, uint32_t left) {
  if ((threadIdx.x & 31) == 0) s.row->sums[scanned_entry(u) / 32] = __popc(misses) | (__popc(left) << 16);
}

// Whether any entry of the row is missing, and how many were asked of the hot buffer. Ends with a block barrier.
__device__ __forceinline__ bool anything_missing(const ResolveParams& p, const Shared& s) {
  bool missing = false;
  int wanted = 0;
#pragma unroll
  for (int u = 0; u < kScans; u++) {
    const uint32_t word = scanned_entry(u) < p.k ? s.row->words[scanned_entry(u)] : kNothing;
    missing |= word < kHit;
    wanted += word != kNothing;
  }
  wanted = __reduce_add_sync(kFullMask, wanted);
  if ((threadIdx.x & 31) == 0 && wanted) atomicAdd(&s.row->counts.wanted, wanted);
  return __syncthreads_or(missing) != 0;
}

// Marks used slots, enters misses where repeats meet, counts misses. Ends with a block barrier.
template <int kBlocks, int kInFlight>
__device__ __forceinline__ void scan_words(const ResolveParams& p, int table_bits, const Shared& s) {
#pragma unroll 1
  for (int u = 0; u < kScans; u++) {
    const int entry = scanned_entry(u);
    const uint32_t word = entry < p.k ? s.row->words[entry] : kNothing;
    const uint32_t missing = __ballot_sync(kFullMask, word < kHit);
    note_sums(s, u, missing, __ballot_sync(kFullMask, word < kHit && is_left<kBlocks, kInFlight>(p, u, missing)));
    if (word < kHit) {
      bool repeated;
      s.row->victim[entry] = static_cast<uint16_t>(enter_miss(word, table_bits, s, repeated));
      if (repeated) s.row->counts.duplicates = 1;
    } else if (word != kNothing) {
      atomicOr(&s.used[(word & ~kHit) >> 5], 1u << (word & 31u));
    }
  }
  __syncthreads();
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

// A miss is the first of its row unless repeats have lost that to a smaller entry.
__device__ __forceinline__ bool is_first_miss(const ResolveParams& p, const Shared& s, int u, bool duplicates) {
  const int entry = scanned_entry(u);
  if (entry >= p.k || s.row->words[entry] >= kHit) return false;
  return !duplicates || s.row->keys[s.row->victim[entry]] == first_code(entry);
}

// Of equal misses the smallest entry counts. Rare: an indexer selects no position twice. Ends with a block barrier.
template <int kBlocks, int kInFlight>
__device__ __forceinline__ void settle_repeats(const ResolveParams& p, const Shared& s) {
#pragma unroll 1
  for (int u = 0; u < kScans; u++) {
    const int entry = scanned_entry(u);
    if (entry < p.k && s.row->words[entry] < kHit) atomicMax(&s.row->keys[s.row->victim[entry]], first_code(entry));
  }
  __syncthreads();
#pragma unroll 1
  for (int u = 0; u < kScans; u++) {
    const uint32_t missing = __ballot_sync(kFullMask, is_first_miss(p, s, u, false)), firsts = __ballot_sync(kFullMask, is_first_miss(p, s, u, true));
    const bool left = ((firsts >> (threadIdx.x & 31)) & 1u) && is_left<kBlocks, kInFlight>(p, u, missing);
    note_sums(s, u, firsts, __ballot_sync(kFullMask, left));
  }
  __syncthreads();
}

// Ranks the misses in entry order: host row of every rank, ranks of what is not loaded yet, and instead of a miss's word its rank.
// Ends with a block barrier; returns misses | left << 16.
template <int kBlocks, int kInFlight>
__device__ __forceinline__ uint32_t rank_misses(const ResolveParams& p, const Shared& s) {
  const bool duplicates = s.row->counts.duplicates != 0;
  if (duplicates) settle_repeats<kBlocks, kInFlight>(p, s);
  const Ranks ranks = sum_ranks(s);
#pragma unroll 1
  for (int u = 0; u < kScans; u++) {
    const int entry = scanned_entry(u);
    const uint32_t missing = __ballot_sync(kFullMask, is_first_miss(p, s, u, false));
    if (missing == 0) continue;
    const bool is_first = is_first_miss(p, s, u, duplicates);
    const uint32_t firsts = __ballot_sync(kFullMask, is_first);
    const bool left = is_first && is_left<kBlocks, kInFlight>(p, u, missing);
    const uint32_t left_here = __ballot_sync(kFullMask, left);
    const uint32_t before = ranks.before(u), rank = (before & 0xffffu) + __popc(firsts & lanes_before());
    if (!is_first) continue;
    s.row->miss_row[rank] = static_cast<int32_t>(s.row->words[entry]);
    s.row->words[entry] = kRanked | rank;
    if (left) s.row->left[(before >> 16) + __popc(left_here & lanes_before())] = static_cast<uint16_t>(rank);
    if (duplicates) s.row->keys[s.row->victim[entry]] = rank;
  }
  __syncthreads();
  if (duplicates) {
#pragma unroll 1
    for (int u = 0; u < kScans; u++) {
      const int entry = scanned_entry(u);
      if (entry < p.k && s.row->words[entry] < kHit) s.row->words[entry] = kRanked | kRepeats | s.row->keys[s.row->victim[entry]];
    }
    __syncthreads();
  }
  return ranks.total;
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

// Answers the block's own misses and writes down what their slots hold now. Victims are known, all blocks have read the state.
template <int kBlocks>
__device__ __forceinline__ void take_slots(const ResolveParams& p, int32_t row, int block, const SlotState& state, const Shared& s) {
#pragma unroll 1
  for (int u = 0; u < Entries<kBlocks>::kCount; u++) {
    const int entry = Entries<kBlocks>::index(u, block);
    const uint32_t word = entry < p.k ? s.row->words[entry] : kNothing;
    if (word < kRanked || word == kNothing) continue;
    const int slot = s.row->victim[word & kRankMask];
    p.out[row * p.out_stride + entry] = hot_row(s.hot_pages, slot, p.page_shift);
    if (word & kRepeats) continue;
    const int32_t host_row = s.row->miss_row[word & kRankMask];
    uint32_t* table = table_of(p, state.slot);
    const int32_t leaving = slot < state.filled() ? state.tags(p)[slot] : -1;
    table_insert(p, table, static_cast<uint32_t>(host_row), static_cast<uint32_t>(slot));
    if (leaving >= 0) table_erase(p, table, static_cast<uint32_t>(leaving), static_cast<uint32_t>(slot));
    state.tags(p)[slot] = host_row;
    state.stamps(p)[slot] = static_cast<uint8_t>(state.now);
    if (p.slot_pages == nullptr) continue;
    const int32_t position = p.top_k[row * p.top_k_stride + entry];
    p.slot_pages[state.slot * p.slot_pages_stride + slot] = static_cast<uint16_t>(position >> p.page_shift);
  }
}

// By one thread of the row, once all blocks have read the header.
__device__ __forceinline__ void write_header(const ResolveParams& p, const SlotState& state, const Shared& s, int misses) {
  int32_t* header = state.header(p);
  const int wanted = s.row->counts.wanted;
  if (wanted == 0) return;
  header[kClock] = static_cast<int32_t>(static_cast<uint32_t>(header[kClock]) + static_cast<uint32_t>(misses) + kClockPerStep);
  if (wanted > misses) atomicAdd(&header[kHotEntries], wanted - misses);
  if (misses == 0) return;
  atomicAdd(&header[kFetchedRows], misses);
  header[kFilledSlots] = min(p.buffer_size, state.filled() + misses);
  if (state.stale()) header[kStateGeneration] = header[kLeaseGeneration];
}

// kPasses x 512 bytes of a row travel at a time. kScores: p.scores are there and choose the victims.
template <int kBlocks, int kPasses, bool kScores>
__global__ void __launch_bounds__(kResolveThreads, 2) resolve_kernel(const __grid_constant__ ResolveParams p, const int table_bits) {
  constexpr int kInFlight = in_flight(kBlocks, kScores);
  const Shared s = carve(block_shared_memory(), p.buffer_size);
  const int block = static_cast<int>(blockIdx.x);
  const int32_t row = static_cast<int32_t>(blockIdx.y);
  open_exchange<kBlocks>(s, p.k);
  if (p.overlap_launch) {  // shared memory is all that may be touched before the kernel ahead of this one has ended
    clear_shared(s, p.buffer_size, table_bits);
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
  const SlotState state = load_state(p, slot);
  prepare_row(p, lease, s);
  if (!p.overlap_launch) clear_shared(s, p.buffer_size, table_bits);
  count_entries(state.header(p), classify(p, has_lease, page, e));
  if (!has_lease) {  // a translation and nothing else
    store_rows(p, row, block, e);
    return;
  }

  find_hot(p, state, e);
  fetch.load_at_once(e);
  if constexpr (kBlocks > 1) cluster_wait();  // every block's barrier is ready
#pragma unroll
  for (int u = 0; u < e.kCount; u++) {
    send_words<kBlocks>(p, e.piece(u, block), e.word[u], s);
    if (e.word[u] < kHit || e.word[u] == kNothing) continue;
    const int hot = static_cast<int>(e.word[u] & ~kHit);
    e.row[u] = hot_row(s.hot_pages, hot, p.page_shift);
    state.stamps(p)[hot] = static_cast<uint8_t>(state.now);
  }
  store_rows(p, row, block, e);
  receive_words<kBlocks>(s);
  if (p.copy_method == kCopyLookup) return;

  const bool writes_header = block == 0 && threadIdx.x == 0;
  if (!anything_missing(p, s)) {
    if (writes_header) write_header(p, state, s, 0);
    return;
  }
  scan_words<kBlocks, kInFlight>(p, table_bits, s);
  if constexpr (kScores) request_scores(p, row, state, s);
  const uint32_t ranked = rank_misses<kBlocks, kInFlight>(p, s);
  const int misses = static_cast<int>(ranked & 0xffffu), misses_left = static_cast<int>(ranked >> 16);
  fetch.load_more(misses, misses_left);
  if (state.stale()) forget_slots<kBlocks>(p, state, block);
  if constexpr (!kScores)
    choose_victims(p, state, static_cast<uint32_t>(misses), s);
  else
    choose_by_score(p, state, static_cast<uint32_t>(misses), s);
  if constexpr (kBlocks > 1) {  // all blocks have read stamps, or have forgotten the slots
    cluster_arrive();
    cluster_wait();
  }
  take_slots<kBlocks>(p, row, block, state, s);
  if (writes_header) write_header(p, state, s, misses);
  fetch.finish(misses, misses_left);
}

}  // namespace hisparse
