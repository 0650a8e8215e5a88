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

// The same without misses: another block may answer them, and what this one stored might arrive after that.
template <int kBlocks>
__device__ __forceinline__ void store_answers(const ResolveParams& p, int32_t row, int block, const Entries<kBlocks>& e) {
#pragma unroll
  for (int u = 0; u < e.kCount; u++)
    if (e.index(u, block) < p.k && e.word[u] >= kHit) p.out[row * p.out_stride + e.index(u, block)] = e.row[u];
}

__device__ __forceinline__ void count_entries(int32_t* header, uint32_t counted) {
  if ((threadIdx.x & 31) != 0) return;
  if (counted & 0xffffu) atomicAdd(&header[kResidentEntries], static_cast<int32_t>(counted & 0xffffu));
  if (counted >> 16) atomicAdd(&header[kErrorEntries], static_cast<int32_t>(counted >> 16));
}

// Brings to shared memory what a row with hot rows needs: its loads leave together with those of the pages.
template <bool kScores>
__device__ __forceinline__ void request_state(const ResolveParams& p, int32_t slot, const int32_t* lease, const Shared& s) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < p.num_hot_pages; i += kResolveThreads) copy_async(s.hot_pages + i, lease + i);
  if (threadIdx.x == 0) {
    copy_async(&s.row->first_host_base, p.host_bases);
    copy_async(&s.row->first_device_base, p.device_bases);
  }
  if constexpr (!kScores) request_stamps(p, slot, s);
  commit_copies();
}

// Looks the wanted entries up. Lease, orders and cleared shared memory are ready behind its barrier: all stamps are read before this
// block tells others anything, and then they may write stamps.
template <int kBlocks, bool kScores>
__device__ __forceinline__ void find_hot(const ResolveParams& p, const SlotState& state, const Shared& s, Entries<kBlocks>& e) {
  constexpr int kAtOnce = e.kCount == 2 ? 2 : 1;
  const uint32_t* table = table_of(p, state.slot);
  TableView views[kAtOnce];
#pragma unroll
  for (int u = 0; u < kAtOnce; u++) views[u].load(p, table, !state.stale(), static_cast<int32_t>(e.word[u]));
  wait_for_copies<0>();
  if constexpr (!kScores) order_slots(p, state, s);
  __syncthreads();
  if constexpr (!kScores) count_orders(p, s);  // while the table is read
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

// A block goes through the whole row four times 512 entries at a time; entry `u` of a thread is this one, in piece / 32.
__device__ __forceinline__ int scanned_entry(int u) { return u * kResolveThreads + static_cast<int>(threadIdx.x); }

__device__ __forceinline__ uint32_t lanes_before() { return (1u << (threadIdx.x & 31)) - 1; }

// Misses | left << 16, of the row and ahead of its pieces. Every warp works it out by itself; lane i has it for piece 2 i or, in odd
// warps, 2 i + 1: those are the pieces that the warp scans.
struct RowSums {
  uint32_t ahead, total;

  __device__ __forceinline__ uint32_t ahead_of(int u) const { return __shfl_sync(kFullMask, ahead, scanned_entry(u) / 64); }
};

__device__ __forceinline__ RowSums sum_up(uint32_t even, uint32_t odd) {
  static_assert(kPieces == 64, "two a lane");
  const uint32_t upto = warp_inclusive_sum(even + odd);
  return {upto - odd - ((threadIdx.x / 32) & 1 ? 0 : even), __shfl_sync(kFullMask, upto, 31)};
}

__device__ __forceinline__ PieceSummary piece_of_row(const ResolveParams& p, const Shared& s, int piece) {
  return piece * 32 < p.k ? s.row->pieces[piece] : PieceSummary{0, 0};
}

template <int kBlocks, int kInFlight>
__device__ __forceinline__ RowSums sum_pieces(const ResolveParams& p, const Shared& s) {
  uint32_t counted[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int piece = 2 * (static_cast<int>(threadIdx.x) & 31) + i, misses = __popc(piece_of_row(p, s, piece).missing);
    counted[i] = misses | (max(0, misses - loaded_at_once<kBlocks, kInFlight>(p, piece)) << 16);
  }
  return sum_up(counted[0], counted[1]);
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
__device__ __forceinline__ uint32_t settle_repeats(const ResolveParams& p, const Shared& s) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  int32_t host_row[kScans];
  uint32_t firsts[kScans], lefts[kScans];
#pragma unroll
  for (int u = 0; u < kScans; u++) {
    const int entry = scanned_entry(u);
    const bool misses = (piece_of_row(p, s, entry / 32).missing >> lane) & 1u;
    host_row[u] = misses ? s.row->miss_row[s.row->words[entry] & kRankMask] : -1;
    if (misses) atomicMax(&s.row->keys[s.row->victim[entry]], first_code(entry));
  }
  __syncthreads();
#pragma unroll
  for (int u = 0; u < kScans; u++) {
    const int entry = scanned_entry(u), at = __popc(piece_of_row(p, s, entry / 32).missing & lanes_before());
    const bool is_first = host_row[u] >= 0 && s.row->keys[s.row->victim[entry]] == first_code(entry);
    firsts[u] = __ballot_sync(kFullMask, is_first);
    lefts[u] = __ballot_sync(kFullMask, is_first && at >= loaded_at_once<kBlocks, kInFlight>(p, entry / 32));
    if (lane == 0) s.row->sums[entry / 32] = __popc(firsts[u]) | (__popc(lefts[u]) << 16);
  }
  __syncthreads();
  const RowSums counted = sum_up(s.row->sums[2 * lane], s.row->sums[2 * lane + 1]);
#pragma unroll
  for (int u = 0; u < kScans; u++) {
    const uint32_t before = counted.ahead_of(u);
    if (!((firsts[u] >> lane) & 1u)) continue;
    const int entry = scanned_entry(u), left = (lefts[u] >> lane) & 1u ? __popc(lefts[u] & lanes_before()) : -1;
    const uint32_t row = static_cast<uint32_t>(host_row[u]);
    s.row->keys[s.row->victim[entry]] = note_miss(s, entry, row, before, __popc(firsts[u] & lanes_before()), left);
  }
  __syncthreads();
#pragma unroll
  for (int u = 0; u < kScans; u++)
    if (host_row[u] >= 0 && !((firsts[u] >> lane) & 1u))
      s.row->words[scanned_entry(u)] = kRanked | kRepeats | s.row->keys[s.row->victim[scanned_entry(u)]];
  __syncthreads();
  return counted.total;
}

// Ranks the misses in entry order and keeps the slots of hits. Ends with a block barrier; returns misses | left << 16.
template <int kBlocks, int kInFlight, bool kScores>
__device__ __forceinline__ uint32_t rank_misses(const ResolveParams& p, int table_bits, const Shared& s, const RowSums& sums) {
  constexpr int kTogether = 2;  // as registers allow: their atomics that are waited for leave together
#pragma unroll 1
  for (int first = 0; first < kScans; first += kTogether) {
    uint32_t word[kTogether], kept[kTogether], other[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; i++) word[i] = scanned_entry(first + i) < p.k ? s.row->words[scanned_entry(first + i)] : kNothing;
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      kept[i] = kNoVictim;
      if (word[i] >= kHit && word[i] != kNothing) kept[i] = keep_slot<kScores>(static_cast<int>(word[i] & ~kHit), s);
      if (word[i] < kHit) other[i] = enter_miss(word[i], table_bits, s);
    }
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      if (kept[i] != kNoVictim) atomicAdd(&s.row->histogram[kept[i]], kFullMask);  // one less
      const uint32_t before = sums.ahead_of(first + i), missing = __ballot_sync(kFullMask, word[i] < kHit);
      if (word[i] >= kHit) continue;
      const int entry = scanned_entry(first + i), at = __popc(missing & lanes_before());
      note_miss(s, entry, word[i], before, at, at - loaded_at_once<kBlocks, kInFlight>(p, entry / 32));
      bool repeated;
      s.row->victim[entry] = static_cast<uint16_t>(settle_place(word[i], other[i], table_bits, s, repeated));
      if (repeated) atomicOr(&s.row->counts.duplicates, 1);
    }
  }
  __syncthreads();
  return s.row->counts.duplicates ? settle_repeats<kBlocks, kInFlight>(p, s) : sums.total;
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
  uint16_t* places = places_of(p, table);
#pragma unroll 1
  for (int rank = (kResolveThreads - 1 - static_cast<int>(threadIdx.x)) * kBlocks + block; rank < misses; rank += kResolveThreads * kBlocks) {
    const int slot = s.row->victim[rank], entry = s.row->miss_entry[rank];
    const int32_t host_row = s.row->miss_row[rank];
    const uint32_t left = slot < state.filled() ? places[slot] : kNoPlace;
    p.out[row * p.out_stride + entry] = hot_row(s.hot_pages, slot, p.page_shift);
    state.stamps(p)[slot] = static_cast<uint8_t>(state.now);
    state.tags(p)[slot] = host_row;
    if (p.slot_pages != nullptr) {
      const int32_t position = p.top_k[row * p.top_k_stride + entry];
      p.slot_pages[state.slot * p.slot_pages_stride + slot] = static_cast<uint16_t>(position >> p.page_shift);
    }
    const uint32_t place = table_insert(p, table, static_cast<uint32_t>(host_row), static_cast<uint32_t>(slot));
    if (left != kNoPlace) table[left] = kNoEntry;
    places[slot] = static_cast<uint16_t>(place);
  }
  if (!s.row->counts.duplicates) return;
#pragma unroll 1
  for (int entry = block * kResolveThreads + static_cast<int>(threadIdx.x); entry < p.k; entry += kBlocks * kResolveThreads) {
    const uint32_t word = s.row->words[entry];
    if (word >= (kRanked | kRepeats) && word != kNothing)
      p.out[row * p.out_stride + entry] = hot_row(s.hot_pages, s.row->victim[word & kRankMask], p.page_shift);
  }
}

// By one warp of the row, once all blocks have read the header.
__device__ __forceinline__ void write_header(const ResolveParams& p, const SlotState& state, const Shared& s, int misses) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int wanted =
      __reduce_add_sync(kFullMask, __popc(piece_of_row(p, s, lane).wanted) + __popc(piece_of_row(p, s, 32 + lane).wanted));
  int32_t* header = state.header(p);
  if (wanted == 0 || lane != 0) return;
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
  constexpr int kInFlight = in_flight(kBlocks, kPasses, kScores);
  const Shared s = carve(block_shared_memory(), p.buffer_size);
  const int block = static_cast<int>(blockIdx.x);
  const int32_t row = static_cast<int32_t>(blockIdx.y);
  open_exchange<kBlocks>(s, p.k);
  if (p.overlap_launch) {  // shared memory is all that may be touched before the kernel ahead of this one has ended
    clear_shared<kScores>(s, p.buffer_size, table_bits);
    wait_for_previous_kernel();
    launch_next_kernel();
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
  request_state<kScores>(p, slot, lease, s);
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
  store_answers(p, row, block, e);
  receive_words<kBlocks>(s);
  if (p.copy_method == kCopyLookup) return;

  const RowSums sums = sum_pieces<kBlocks, kInFlight>(p, s);
  const bool writes_header = block == 0 && threadIdx.x < 32;
  if (sums.total == 0) {
    refresh_stamps<kBlocks, !kScores>(p, state, s, e);
    if (writes_header) write_header(p, state, s, 0);
    return;
  }
  refresh_stamps<kBlocks, false>(p, state, s, e);
  const uint32_t ranked = rank_misses<kBlocks, kInFlight, kScores>(p, table_bits, s, sums);
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
  if (writes_header) write_header(p, state, s, misses);
  take_slots<kBlocks>(p, row, block, state, s, misses);
  fetch.finish(misses, misses_left);
}

}  // namespace hisparse
