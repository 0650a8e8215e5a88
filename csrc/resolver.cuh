// The resolver: top-k positions of one decode step -> device rows, fetching missing rows from the host on the way.
//
// One cluster of blocks works on one batch row. Every block of it resolves the whole row by itself from the same state
// (cheaper than handing a plan over), then copies its share of the misses; only the leader (rank 0) writes outputs and
// state. The cluster barrier keeps the leader's writes behind the helpers' reads; arriving costs nothing and the leader
// waits only while its copies are under way.
//
// Every number depends on entry order and slot order alone, never on timing:
//   miss rank: order of first occurrence in the row;
//   victims: empty slots, then the oldest age class, then younger ones; of the last class the small slot numbers. Misses
//   take them by rank: the slots of the classes that leave whole, by number, then those of the last class, by number.
// Two rows of one step must not name the same request slot: they would race for victims (bytes stay in bounds).
#pragma once
#include "rows.cuh"

namespace hisparse {

constexpr uint32_t kFullMask = 0xffffffffu;
constexpr int kEntriesPerThread = kMaxTopK / kThreads;
constexpr uint32_t kVacant = 0xffffffffu;  // lookup table
constexpr uint32_t kUnresolved = 0xffffu;  // answer: neither a slot nor a rank yet
constexpr uint32_t kRankBit = 0x8000u;     // answer: a miss rank rather than a slot
// Victim order 0 is "empty", 1 the oldest age class, kAgeUnits + 1 the youngest. Used and absent slots are no victims.
constexpr int kVictimOrders = kAgeUnits + 2;
constexpr uint32_t kNoVictim = 255;
constexpr int kHistogramBins = 96;  // three per lane of a warp

struct Counts {
  int32_t distinct, found;  // wanted rows, and how many of them a hot slot holds
};

// Dynamic shared memory of one block, in this order; resolver_shared_bytes is its size.
struct Shared {
  uint32_t* table;       // [1 << table_bits] entry index, open addressing
  int32_t* wanted;       // [k] host row of an entry
  int32_t* hot_pages;    // [num_hot_pages]
  uint32_t* histogram;   // [kHistogramBins] slots per victim order
  uint32_t* warp_sums;   // [2 * kWarps]
  uint32_t* warp_counts; // [kWarps] resident | errors << 16
  Counts* counts;
  uint16_t* answer;      // [k] kUnresolved, a slot, or kRankBit | miss rank; valid at first occurrences
  uint16_t* miss_entry;  // [k] miss rank -> entry index
  uint16_t* victim;      // [k] miss rank -> slot
  char* ring;            // bulk copies only
};

inline int table_bits_for(int k) {
  int bits = 7;
  while ((1 << bits) < 4 * k) bits++;  // load at most one quarter: a warp pays for its worst lane
  return bits;
}

__host__ __device__ __forceinline__ int64_t align_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

__host__ __device__ __forceinline__ int64_t resolver_shared_bytes(int k, int num_hot_pages, int table_bits) {
  return align_up((int64_t{4} << table_bits) + 4 * (int64_t{k} + num_hot_pages + kHistogramBins + 3 * kWarps) + 16 + 6 * int64_t{k}, 128);
}

__device__ __forceinline__ Shared carve(char* memory, int k, int num_hot_pages, int table_bits) {
  Shared s;
  s.table = reinterpret_cast<uint32_t*>(memory);
  s.wanted = reinterpret_cast<int32_t*>(s.table + (1 << table_bits));
  s.hot_pages = s.wanted + k;
  s.histogram = reinterpret_cast<uint32_t*>(s.hot_pages + num_hot_pages);
  s.warp_sums = s.histogram + kHistogramBins;
  s.warp_counts = s.warp_sums + 2 * kWarps;
  s.counts = reinterpret_cast<Counts*>(s.warp_counts + kWarps);
  s.answer = reinterpret_cast<uint16_t*>(reinterpret_cast<char*>(s.counts) + 16);
  s.miss_entry = s.answer + k;
  s.victim = s.miss_entry + k;
  s.ring = memory + resolver_shared_bytes(k, num_hot_pages, table_bits);
  return s;
}

__device__ __forceinline__ uint32_t table_home(int32_t host_row, int table_bits) {
  return (static_cast<uint32_t>(host_row) * 2654435769u) >> (32 - table_bits);
}

// What one thread knows of its entries: entry u is index u * kThreads + threadIdx.x.
struct Entries {
  int32_t position[kEntriesPerThread];
  int32_t logical[kEntriesPerThread];
  int32_t row[kEntriesPerThread];    // device row once known, else -1
  int32_t place[kEntriesPerThread];  // place in the lookup table, or -1: not wanted from the hot buffer
  int32_t first[kEntriesPerThread];  // first occurrence of the same host row
};

__device__ __forceinline__ int entry_index(int u) { return u * kThreads + static_cast<int>(threadIdx.x); }

__device__ __forceinline__ void load_positions(const ResolveParams& p, int32_t row, Entries& e) {
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++) {
    const int i = entry_index(u);
    e.position[u] = i < p.k ? p.top_k[row * p.top_k_stride + i] : -1;
  }
}

__device__ __forceinline__ int64_t load_index(const void* values, int64_t i, int wide) {
  return wide ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
}

__device__ __forceinline__ void load_logical_pages(const ResolveParams& p, int32_t row, int64_t seq_len, Entries& e) {
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++) {
    const int page = e.position[u] >> p.page_shift;
    const bool valid = e.position[u] >= 0 && e.position[u] < seq_len && page < p.max_pages;
    e.logical[u] = valid ? p.page_rows[row * p.page_rows_stride + page] : 0;
  }
}

// Answers resident entries and marks wanted ones (place = 0, wanted[i] = host row). Returns resident | errors << 16.
__device__ __forceinline__ uint32_t classify(const ResolveParams& p, bool has_lease, Shared& s, Entries& e) {
  int32_t device[kEntriesPerThread];
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++) {
    const bool valid = e.logical[u] > 0 && e.logical[u] <= p.num_logical_pages;
    device[u] = valid ? p.page_table[e.logical[u]] : -1;
  }
  uint32_t counted = 0;
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++) {
    const int32_t offset = e.position[u] & ((1 << p.page_shift) - 1);
    const bool wanted = device[u] == 0 && has_lease;
    e.row[u] = -1;
    e.place[u] = wanted ? 0 : -1;
    if (wanted) {
      s.wanted[entry_index(u)] = (e.logical[u] << p.page_shift) | offset;
      s.answer[entry_index(u)] = kUnresolved;
    } else if (device[u] > 0) {
      e.row[u] = (device[u] << p.page_shift) | offset;
      counted += 1;
    } else if (e.position[u] >= 0) {
      counted += 1u << 16;
    }
  }
  return counted;
}

// Enters the wanted rows into the lookup table; of equal rows the smallest index stays. Returns how many were new.
__device__ __forceinline__ int insert_wanted(int table_bits, Shared& s, Entries& e) {
  const uint32_t mask = (1u << table_bits) - 1;
  int inserted = 0;
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++) {
    if (e.place[u] < 0) continue;
    const uint32_t i = static_cast<uint32_t>(entry_index(u));
    const int32_t host_row = s.wanted[i];
    uint32_t place = table_home(host_row, table_bits);
    while (true) {
      const uint32_t other = atomicCAS(&s.table[place], kVacant, i);
      if (other == kVacant) {
        inserted++;
        break;
      }
      if (s.wanted[other] == host_row) {
        atomicMin(&s.table[place], i);
        break;
      }
      place = (place + 1) & mask;
    }
    e.place[u] = static_cast<int32_t>(place);
  }
  return inserted;
}

// First occurrence of the entry that wants what a hot slot holds, or kVacant.
__device__ __forceinline__ uint32_t find_wanted(int32_t host_row, int table_bits, const Shared& s) {
  const uint32_t mask = (1u << table_bits) - 1;
  uint32_t place = table_home(host_row, table_bits);
  while (true) {
    const uint32_t i = s.table[place];
    if (i == kVacant || s.wanted[i] == host_row) return i;
    place = (place + 1) & mask;
  }
}

// Pointers are computed where they are used: registers are what this kernel is short of.
struct SlotState {
  int32_t slot;
  int32_t lease_generation;
  uint32_t clock;
  bool stale;  // the tags belong to an earlier lease: every slot counts as empty

  __device__ __forceinline__ int32_t* header(const ResolveParams& p) const { return p.header + int64_t{slot} * kHeaderColumns; }
  __device__ __forceinline__ int32_t* tags(const ResolveParams& p) const { return p.tags + slot * p.tags_stride; }
  __device__ __forceinline__ uint8_t* stamps(const ResolveParams& p) const { return p.stamps + slot * p.stamps_stride; }
};

__device__ __forceinline__ SlotState load_state(const ResolveParams& p, int32_t slot) {
  const int4 head = *reinterpret_cast<const int4*>(p.header + int64_t{slot} * kHeaderColumns);
  return {slot, head.x, static_cast<uint32_t>(head.z), head.x != head.y};
}

// A thread owns kGroups x 4 neighbouring slots.
template <int kGroups>
struct OwnSlots {
  static constexpr int kEarly = kGroups <= 2 ? kGroups : 0;  // loaded ahead of need, as registers allow
  int4 tags[kEarly + 1];
  uint32_t stamps[kEarly + 1];  // four bytes each
  uint32_t orders[kGroups];     // victim order, one byte per slot

  static __device__ __forceinline__ int first(int g) { return (static_cast<int>(threadIdx.x) * kGroups + g) * 4; }
};

template <int kGroups>
__device__ __forceinline__ void load_group(const ResolveParams& p, const SlotState& state, bool held, int g, int4& tags, uint32_t& stamps) {
  const int slot = OwnSlots<kGroups>::first(g);
  tags = make_int4(-1, -1, -1, -1);
  stamps = 0;
  if (!held || slot >= p.buffer_size) return;
  tags = *reinterpret_cast<const int4*>(state.tags(p) + slot);
  stamps = *reinterpret_cast<const uint32_t*>(state.stamps(p) + slot);
}

// Publishes hits, refreshes their stamps (leader only) and orders the other slots as victims. Returns the hits.
template <int kGroups>
__device__ __forceinline__ int match_slots(const ResolveParams& p, const SlotState& state, uint32_t now, bool leader, int table_bits,
                                           Shared& s, OwnSlots<kGroups>& own) {
  int found = 0;
#pragma unroll
  for (int g = 0; g < kGroups; g++) {
    const int slot = own.first(g);
    const int held = OwnSlots<kGroups>::kEarly ? g : 0;
    if (!OwnSlots<kGroups>::kEarly) load_group<kGroups>(p, state, !state.stale, g, own.tags[0], own.stamps[0]);
    const int32_t tag[4] = {own.tags[held].x, own.tags[held].y, own.tags[held].z, own.tags[held].w};
    const uint32_t stamps = own.stamps[held];
    uint32_t fresh = stamps;
    own.orders[g] = 0;
#pragma unroll
    for (int b = 0; b < 4; b++) {
      uint32_t order = 0;
      if (slot + b >= p.buffer_size) {
        order = kNoVictim;
      } else if (tag[b] >= 0) {
        const uint32_t i = find_wanted(tag[b], table_bits, s);
        const uint32_t age = (now - (stamps >> (8 * b))) & 255u;
        order = kAgeUnits + 1 - min(age, static_cast<uint32_t>(kAgeUnits));
        if (i != kVacant) {
          s.answer[i] = static_cast<uint16_t>(slot + b);
          fresh = (fresh & ~(255u << (8 * b))) | (now << (8 * b));
          order = kNoVictim;
          found++;
        }
      }
      own.orders[g] |= order << (8 * b);
    }
    // Neighbouring bytes of unused slots are written back as they were; what a helper reads of a used slot does not matter.
    if (leader && fresh != stamps) *reinterpret_cast<uint32_t*>(state.stamps(p) + slot) = fresh;
  }
  return found;
}

__device__ __forceinline__ uint32_t warp_inclusive_sum(uint32_t value) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t below = __shfl_up_sync(kFullMask, value, step);
    if (lane >= step) value += below;
  }
  return value;
}

struct BlockPrefix {
  uint32_t before, total;
};

// Sum over the warps before this one, and over all; sums[kWarps] was written before the last block barrier.
__device__ __forceinline__ BlockPrefix prefix_of_warps(const uint32_t* sums) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const uint32_t own = sums[lane];
  const uint32_t inclusive = warp_inclusive_sum(own);
  return {__shfl_sync(kFullMask, inclusive - own, warp), __shfl_sync(kFullMask, inclusive, 31)};
}

struct Threshold {
  uint32_t order;      // the last victim order needed; orders below it leave whole
  uint32_t below;      // slots of orders below it
  uint32_t available;  // slots that may leave at all
};

// Each warp finds the same threshold by itself: the first order at which the running count reaches `needed`.
__device__ __forceinline__ Threshold victim_threshold(const uint32_t* histogram, uint32_t needed) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const uint32_t a = histogram[3 * lane], b = histogram[3 * lane + 1], c = histogram[3 * lane + 2];
  const uint32_t upto = warp_inclusive_sum(a + b + c);
  const uint32_t before = upto - (a + b + c);
  const uint32_t reached = __ballot_sync(kFullMask, upto >= needed);
  uint32_t order = 3 * lane, below = before;
  if (below + a < needed) {
    below += a, order++;
    if (below + b < needed) below += b, order++;
  }
  const int source = reached ? __ffs(static_cast<int>(reached)) - 1 : 31;
  return {__shfl_sync(kFullMask, order, source), __shfl_sync(kFullMask, below, source), __shfl_sync(kFullMask, upto, 31)};
}

// Ranks the misses in entry order; returns their number.
__device__ __forceinline__ int rank_misses(const uint32_t (&ballots)[kEntriesPerThread], Shared& s) {
  static_assert(kEntriesPerThread == 2, "counts of the two halves share one word");
  const uint32_t lane_bit = 1u << (threadIdx.x & 31);
  const BlockPrefix sums = prefix_of_warps(s.warp_sums);
  const uint32_t half_total = sums.total & 0xffffu;
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++) {
    if (!(ballots[u] & lane_bit)) continue;
    const uint32_t before = u == 0 ? sums.before & 0xffffu : half_total + (sums.before >> 16);
    const uint32_t rank = before + __popc(ballots[u] & (lane_bit - 1));
    s.miss_entry[rank] = static_cast<uint16_t>(entry_index(u));
    s.answer[entry_index(u)] = static_cast<uint16_t>(kRankBit | rank);
  }
  return static_cast<int>(half_total + (sums.total >> 16));
}

template <int kGroups>
__device__ __forceinline__ uint32_t count_candidates(const OwnSlots<kGroups>& own, uint32_t threshold) {
  uint32_t counted = 0;  // below the threshold | at the threshold << 16
#pragma unroll
  for (int g = 0; g < kGroups; g++)
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const uint32_t order = (own.orders[g] >> (8 * b)) & 255u;
      counted += order < threshold ? 1u : order == threshold ? 1u << 16 : 0u;
    }
  return counted;
}

template <int kGroups>
__device__ __forceinline__ void place_victims(const OwnSlots<kGroups>& own, Threshold threshold, uint32_t before, uint32_t needed,
                                              Shared& s) {
  uint32_t below = before & 0xffffu, at = threshold.below + (before >> 16);
#pragma unroll
  for (int g = 0; g < kGroups; g++)
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const uint32_t order = (own.orders[g] >> (8 * b)) & 255u;
      uint32_t rank = kMaxTopK;
      if (order < threshold.order) rank = below++;
      if (order == threshold.order) rank = at++;
      if (rank < needed) s.victim[rank] = static_cast<uint16_t>(own.first(g) + b);
    }
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

// The leader's state writes of a step with misses; runs behind the cluster barrier.
template <int kGroups>
__device__ __forceinline__ void write_state(const ResolveParams& p, const Shared& s, const SlotState& state, const OwnSlots<kGroups>& own,
                                            int fetched, uint32_t now) {
  if (state.stale) {
#pragma unroll
    for (int g = 0; g < kGroups; g++)
      if (own.first(g) < p.buffer_size) *reinterpret_cast<int4*>(state.tags(p) + own.first(g)) = make_int4(-1, -1, -1, -1);
    __syncthreads();
  }
  for (int m = static_cast<int>(threadIdx.x); m < fetched; m += kThreads) {
    state.tags(p)[s.victim[m]] = s.wanted[s.miss_entry[m]];
    state.stamps(p)[s.victim[m]] = static_cast<uint8_t>(now);
  }
  if (threadIdx.x == 0) {
    state.header(p)[kStateGeneration] = state.lease_generation;
    state.header(p)[kClock] = static_cast<int32_t>(state.clock + fetched + kClockPerStep);
  }
}

// kPasses: see WarpCopy; only for kCopyLoads.
template <int kGroups, int kCopy, int kPasses>
__global__ void __launch_bounds__(kThreads, 1) resolve_kernel(const __grid_constant__ ResolveParams p, const int table_bits,
                                                              const int ring_stages) {
  Shared s = carve(block_shared_memory(), p.k, p.num_hot_pages, table_bits);
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int blocks = static_cast<int>(gridDim.x), block_rank = static_cast<int>(blockIdx.x);
  const int32_t row = static_cast<int32_t>(blockIdx.y);
  const bool leader = block_rank == 0;

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

  load_logical_pages(p, row, seq_len, e);
  const SlotState state = load_state(p, slot);
  OwnSlots<kGroups> own;
#pragma unroll
  for (int g = 0; g < own.kEarly; g++) load_group<kGroups>(p, state, has_lease && !state.stale, g, own.tags[g], own.stamps[g]);
  if (has_lease) {
    for (int i = thread; i < (1 << table_bits) / 4; i += kThreads)
      reinterpret_cast<uint4*>(s.table)[i] = make_uint4(kVacant, kVacant, kVacant, kVacant);
    for (int i = thread; i < p.num_hot_pages; i += kThreads) s.hot_pages[i] = lease[i];
  }
  if (thread < kHistogramBins) s.histogram[thread] = 0;
  if (thread == 0) *s.counts = {0, 0};
  const uint32_t counted = __reduce_add_sync(kFullMask, classify(p, has_lease, s, e));
  if (lane == 0) s.warp_counts[warp] = counted;
  const int any_wanted = __syncthreads_or(e.place[0] >= 0 || e.place[1] >= 0);
  if (!any_wanted) {  // all resident: a translation and nothing else
    if (leader) store_rows(p, row, e);
    if (leader && warp == 0) add_counters(state.header(p), s, 0, 0, 0);
    return;
  }

  const int inserted = __reduce_add_sync(kFullMask, insert_wanted(table_bits, s, e));
  if (lane == 0 && inserted) atomicAdd(&s.counts->distinct, inserted);
  __syncthreads();

  const uint32_t now = (state.clock / static_cast<uint32_t>(max(1, p.buffer_size / kAgeUnits))) & 255u;
  const int found = __reduce_add_sync(kFullMask, match_slots<kGroups>(p, state, now, leader, table_bits, s, own));
  if (lane == 0 && found) atomicAdd(&s.counts->found, found);
  __syncthreads();

  // Hits are final now. First occurrences that are still unresolved are the misses.
  uint32_t ballots[kEntriesPerThread];
  int wanted_entries = 0;
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++) {
    const bool wanted = e.place[u] >= 0;
    e.first[u] = wanted ? static_cast<int32_t>(s.table[e.place[u]]) : 0;
    const uint32_t answer = wanted ? s.answer[e.first[u]] : kUnresolved;
    if (answer != kUnresolved) e.row[u] = hot_row(s.hot_pages, static_cast<int>(answer), p.page_shift);
    ballots[u] = __ballot_sync(kFullMask, wanted && answer == kUnresolved && e.first[u] == entry_index(u));
    if (!wanted || answer != kUnresolved) e.first[u] = -1;  // from here on: the entry whose fetch answers this one
    wanted_entries += wanted;
  }
  const int hot_entries = __reduce_add_sync(kFullMask, wanted_entries);
  if (s.counts->distinct == s.counts->found) {
    if (!leader) return;
    store_rows(p, row, e);
    if (lane == 0 && hot_entries) atomicAdd(&state.header(p)[kHotEntries], hot_entries);
    if (warp == 0) add_counters(state.header(p), s, 0, 0, 0);
    if (thread == 0) state.header(p)[kClock] = static_cast<int32_t>(state.clock + kClockPerStep);
    return;
  }
  if (blocks > 1) cluster_arrive();  // the tags and stamps of this row have been read

#pragma unroll
  for (int g = 0; g < kGroups; g++)
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const uint32_t order = (own.orders[g] >> (8 * b)) & 255u;
      if (order != kNoVictim) atomicAdd(&s.histogram[order], 1u);
    }
  if (lane == 0) s.warp_sums[warp] = __popc(ballots[0]) | (__popc(ballots[1]) << 16);
  __syncthreads();

  const int misses = rank_misses(ballots, s);
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

  const MissRows rows{p, s.wanted, s.miss_entry, s.victim, s.hot_pages, block_rank, blocks, fetched};
  const auto finish = [&] {
    if (blocks > 1) {
      __syncwarp();
      cluster_wait();
    }
    if (!leader) return;
#pragma unroll
    for (int u = 0; u < kEntriesPerThread; u++)
      if (e.first[u] >= 0) {
        const int rank = s.answer[e.first[u]] & (kRankBit - 1);
        if (rank < fetched) e.row[u] = hot_row(s.hot_pages, s.victim[rank], p.page_shift);
      }
    store_rows(p, row, e);
    if (lane == 0 && hot_entries) atomicAdd(&state.header(p)[kHotEntries], hot_entries);
    if (warp == 0) add_counters(state.header(p), s, -misses, fetched, misses - fetched);
    write_state<kGroups>(p, s, state, own, fetched, now);
  };
  if constexpr (kCopy == kCopyLoads) copy_rows_by_loads<kPasses == 2 ? 2 : 1, kPasses>(rows, p.row_bytes, warp, kWarps, finish);
  if constexpr (kCopy == kCopyBulk) copy_rows_by_bulk(rows, p.row_bytes, s.ring, ring_stages, finish);
  if constexpr (kCopy == kCopyNone) finish();
}

}  // namespace hisparse
