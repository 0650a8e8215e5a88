// Replacement by the scores that the indexer gave in this very step: the rows with the lowest leave.
//
// A score becomes a key, an unsigned number in the same order. Eight bits at a time, from the highest bit in which keys differ
// down, a histogram says where the last row that must leave lies; most steps need two or three looks. Equal scores are told
// apart by age, then by slot number. Misses take the slots that leave by number.
#pragma once
#include "victims.cuh"

namespace hisparse {

constexpr uint32_t kEmptyKey = 0;                  // below every score
constexpr uint32_t kMinusInfinity = 0xff800000u;   // as a float
constexpr uint32_t kLowestKey = ~kMinusInfinity;   // also of what has no score, or one that is no number
constexpr uint32_t kNoVictimKey = 0xffffffffu;     // above every score: the slot is read in this step, or does not exist
constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;
constexpr int kHistograms = 3;  // one is counted in, one may still be read, one is cleared

// Behind everything else in a block's shared memory, where scores decide.
struct ScoreMemory {
  uint32_t* keys;        // [buffer_size, in whole 16]
  uint32_t* histograms;  // [kHistograms, kDigits]
};

constexpr int64_t score_shared_bytes(int buffer_size) { return 16 + 16 * int64_t{order_words(buffer_size)} + 4 * kHistograms * kDigits; }

// What a block of compute capability 9.0 and 10.0 may have; a launch that needs more of it fails with "too many resources requested".
static_assert(resolver_shared_bytes(kMaxBufferSize, kMaxBufferSize / 64) + score_shared_bytes(kMaxBufferSize) <= 227 * 1024,
              "the largest buffer in pages of 64 must fit");

__device__ __forceinline__ ScoreMemory carve_scores(const ResolveParams& p, const Shared& s) {
  auto* keys = reinterpret_cast<uint32_t*>(s.hot_pages + (p.num_hot_pages + 3) / 4 * 4);
  return {keys, keys + 4 * order_words(p.buffer_size)};
}

// A thread's slots are neighbours, four to a group.
struct OwnGroups {
  int first, last;

  __device__ __forceinline__ explicit OwnGroups(int buffer_size) {
    const int each = (buffer_size + 4 * kResolveThreads - 1) / (4 * kResolveThreads);
    first = static_cast<int>(threadIdx.x) * each;
    last = min(first + each, (buffer_size + 3) / 4);
  }
};

__device__ __forceinline__ uint32_t score_key(uint32_t bits) {
  if ((bits << 1) > (kMinusInfinity << 1)) return kLowestKey;  // no number
  if ((bits << 1) == 0) bits = 0;                              // zeros of both signs are equal
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Lowest and highest key of a row that may leave; lowest above highest if only empty slots may.
struct KeyRange {
  uint32_t low, high;

  // Keys from 1 on in their order, empty slots 0: the number of bits is small where scores are close to each other.
  __device__ __forceinline__ uint32_t rebased(uint32_t key) const { return key == kEmptyKey ? 0 : key - low + 1; }
  __device__ __forceinline__ int bits() const { return low > high ? 1 : 32 - __clz(static_cast<int>(high - low + 1)); }
};

// Sends for the scores of all held slots; they arrive in `keys` while the misses are ranked. Reads the state of the slots.
__device__ __forceinline__ void request_scores(const ResolveParams& p, int32_t row, const SlotState& state, const Shared& s) {
  const int64_t seq_len = load_index(p.seq_lens, row, p.wide_seq_lens);
  const uint32_t columns = row < p.score_rows && seq_len > 0 ? static_cast<uint32_t>(min(int64_t{p.score_columns}, seq_len)) : 0;
  const uint32_t* scores = reinterpret_cast<const uint32_t*>(p.scores + row * p.scores_stride);
  const uint2* pages = reinterpret_cast<const uint2*>(p.slot_pages + state.slot * p.slot_pages_stride);
  const int32_t offset_mask = (1 << p.page_shift) - 1;
  const ScoreMemory memory = carve_scores(p, s);
  const OwnGroups own(p.buffer_size);
#pragma unroll 1  // registers are short, and a second group lies in sectors that the first has brought
  for (int g = own.first; g < own.last; g++) {
    const int4 tags = reinterpret_cast<const int4*>(state.tags(p))[g];
    const uint2 page = pages[g];
    const uint32_t position[4] = {(page.x & 0xffffu) << p.page_shift | (tags.x & offset_mask), (page.x >> 16) << p.page_shift | (tags.y & offset_mask),
                                  (page.y & 0xffffu) << p.page_shift | (tags.z & offset_mask), (page.y >> 16) << p.page_shift | (tags.w & offset_mask)};
#pragma unroll
    for (int b = 0; b < 4; b++) {
      if (4 * g + b < state.filled() && position[b] < columns)
        copy_async(&memory.keys[4 * g + b], &scores[position[b]]);
      else
        memory.keys[4 * g + b] = kMinusInfinity;
    }
  }
  commit_copies();
}

// Scores become keys, where they lie; each thread sees to those that it has sent for.
__device__ __forceinline__ KeyRange take_keys(const ResolveParams& p, const SlotState& state, const Shared& s, const ScoreMemory& memory) {
  const OwnGroups own(p.buffer_size);
  KeyRange range{kNoVictimKey, 0};
  wait_for_copies<0>();
  for (int g = own.first; g < own.last; g++) {
    const uint4 four = reinterpret_cast<const uint4*>(memory.keys)[g];
    uint32_t keys[4] = {four.x, four.y, four.z, four.w};
    const uint32_t used = s.used[g >> 3] >> (4 * (g & 7));
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const int slot = 4 * g + b;
      const bool stays = slot >= p.buffer_size || ((used >> b) & 1u);
      keys[b] = stays ? kNoVictimKey : slot >= state.filled() ? kEmptyKey : score_key(keys[b]);
      if (stays || keys[b] == kEmptyKey) continue;
      range.low = min(range.low, keys[b]);
      range.high = max(range.high, keys[b]);
    }
    reinterpret_cast<uint4*>(memory.keys)[g] = make_uint4(keys[0], keys[1], keys[2], keys[3]);
  }
  return range;
}

// Of all threads. Ends with a block barrier.
__device__ __forceinline__ KeyRange range_of_block(KeyRange own, const Shared& s) {
  static_assert(2 * kResolveWarps <= 32);
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t low = __reduce_min_sync(kFullMask, own.low), high = __reduce_max_sync(kFullMask, own.high);
  if (lane == 0) {
    s.row->warp_sums[warp] = low;
    s.row->warp_sums[kResolveWarps + warp] = high;
  }
  __syncthreads();
  const uint32_t word = s.row->warp_sums[lane];
  return {__reduce_min_sync(kFullMask, lane < kResolveWarps ? word : kNoVictimKey),
          __reduce_max_sync(kFullMask, lane < kResolveWarps ? 0u : word)};
}

struct Digit {
  uint32_t digit, below, count;  // the digit at which the running count reaches what is needed; how many are below it, and at it
};

// Each warp finds it by itself.
__device__ __forceinline__ Digit find_digit(const uint32_t* histogram, uint32_t needed) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const uint4 first = reinterpret_cast<const uint4*>(histogram)[2 * lane], second = reinterpret_cast<const uint4*>(histogram)[2 * lane + 1];
  const uint32_t counts[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  uint32_t total = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) total += counts[i];
  const uint32_t upto = warp_inclusive_sum(total);
  const uint32_t reached = __ballot_sync(kFullMask, upto >= needed);
  Digit found{8u * lane, upto - total, counts[0]};
#pragma unroll
  for (int i = 1; i < 8; i++)
    if (found.below + found.count < needed) found = {found.digit + 1, found.below + found.count, counts[i]};
  const int source = __ffs(static_cast<int>(reached)) - 1;
  return {__shfl_sync(kFullMask, found.digit, source), __shfl_sync(kFullMask, found.below, source), __shfl_sync(kFullMask, found.count, source)};
}

// Which slots leave: those whose rebased key >> shift is below `prefix`, and of those at it the orders below `order` and the
// first `ties` of that order, by slot number.
struct Cut {
  uint32_t prefix;
  int shift;
  uint32_t order, ties;
};

// Equal scores: the longest unused leave. Orders of all slots are in s.orders afterwards.
__device__ __forceinline__ Cut cut_by_age(const ResolveParams& p, const SlotState& state, KeyRange range, uint32_t key, uint32_t needed,
                                          const Shared& s, const ScoreMemory& memory) {
  const OwnGroups own(p.buffer_size);
  for (int g = own.first; g < own.last; g++) {
    const uint32_t orders = orders_of_four(p, state, 4 * g, s);
    s.orders[g] = orders;
    for (int b = 0; b < 4; b++) {
      const uint32_t own_key = memory.keys[4 * g + b];
      if (own_key != kNoVictimKey && range.rebased(own_key) == key) atomicAdd(&s.row->histogram[(orders >> (8 * b)) & 255u], 1u);
    }
  }
  __syncthreads();
  const Threshold threshold = victim_threshold(s.row->histogram, needed);
  return {key, 0, threshold.order, needed - threshold.below};
}

__device__ __forceinline__ Cut cut_by_score(const ResolveParams& p, const SlotState& state, KeyRange range, uint32_t needed, const Shared& s,
                                            const ScoreMemory& memory) {
  const OwnGroups own(p.buffer_size);
  uint32_t prefix = 0;
  int shift = range.bits();
  for (int look = 0;; look++) {
    const int next = max(0, shift - kDigitBits);
    uint32_t* histogram = memory.histograms + look % kHistograms * kDigits;
    for (int g = own.first; g < own.last; g++) {
      const uint4 four = reinterpret_cast<const uint4*>(memory.keys)[g];
      const uint32_t keys[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int b = 0; b < 4; b++) {
        const uint32_t rebased = range.rebased(keys[b]);
        if (keys[b] == kNoVictimKey || (look > 0 && rebased >> shift != prefix)) continue;
        atomicAdd(&histogram[(rebased >> next) & ((1u << (shift - next)) - 1)], 1u);
      }
    }
    __syncthreads();
    // All have read it in the look before, and it is counted in again in the look after the next.
    uint32_t* read_before = memory.histograms + (look + 2) % kHistograms * kDigits;
    if (static_cast<int>(threadIdx.x) < kDigits) read_before[threadIdx.x] = 0;
    const Digit found = find_digit(histogram, needed);
    needed -= found.below;
    prefix = prefix << (shift - next) | found.digit;
    shift = next;
    if (found.count == needed) return {prefix, shift, kNoVictim, 0};
    if (shift == 0) return cut_by_age(p, state, range, prefix, needed, s, memory);
  }
}

// 1 for a slot that leaves, 1 << 16 for one of the ties, else 0.
__device__ __forceinline__ uint32_t leaving(const Cut& cut, KeyRange range, uint32_t key, uint32_t order) {
  const uint32_t digits = range.rebased(key) >> cut.shift;
  if (key == kNoVictimKey || digits > cut.prefix) return 0;
  if (digits < cut.prefix || cut.order == kNoVictim || order < cut.order) return 1;
  return order == cut.order ? 1u << 16 : 0;
}

// As choose_victims, by the scores that have been requested; s.row->warp_sums is free. Ends with a block barrier.
__device__ __forceinline__ void choose_by_score(const ResolveParams& p, const SlotState& state, uint32_t needed, const Shared& s) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / 32;
  const ScoreMemory memory = carve_scores(p, s);
  for (int i = static_cast<int>(threadIdx.x); i < kHistograms * kDigits; i += kResolveThreads) memory.histograms[i] = 0;
  const KeyRange range = range_of_block(take_keys(p, state, s, memory), s);
  const Cut cut = cut_by_score(p, state, range, needed, s, memory);

  const OwnGroups own(p.buffer_size);
  uint32_t counted = 0;  // own slots that leave | ties << 16
  for (int g = own.first; g < own.last; g++)
#pragma unroll
    for (int b = 0; b < 4; b++) counted += leaving(cut, range, memory.keys[4 * g + b], (s.orders[g] >> (8 * b)) & 255u);
  const uint32_t upto = warp_inclusive_sum(counted);
  if (lane == 31) s.row->warp_sums[warp] = upto;
  __syncthreads();
  const uint32_t before = sum_of_warps_before(s.row->warp_sums) + upto - counted;
  uint32_t leave = before & 0xffffu, ties = before >> 16;
  for (int g = own.first; g < own.last && counted; g++)
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const uint32_t which = leaving(cut, range, memory.keys[4 * g + b], (s.orders[g] >> (8 * b)) & 255u);
      if (which == 1u || (which && ties < cut.ties)) s.row->victim[leave + min(ties, cut.ties)] = static_cast<uint16_t>(4 * g + b);
      leave += which & 0xffffu;
      ties += which >> 16;
    }
  __syncthreads();
}

}  // namespace hisparse
