// Replacement: what a thread keeps of its hot slots, which of them leave, and in which order misses take their places.
// Victims: empty slots, then the oldest age class, then younger ones; of the last class the small slot numbers. Misses take
// them by rank: the slots of the classes that leave whole, by number, then those of the last class, by number.
#pragma once
#include "lookup.cuh"

namespace hisparse {

// Victim order 0 is "empty", 1 the oldest age class, kAgeUnits + 1 the youngest. Used and absent slots are no victims.
constexpr uint32_t kNoVictim = 255;
static_assert(kAgeUnits + 2 <= kHistogramBins);

// Pointers are computed where they are used: registers are what this kernel is short of.
struct SlotState {
  int32_t slot;
  int32_t lease_generation;
  uint32_t clock;
  bool stale;  // the tags belong to an earlier lease: every slot counts as empty

  __device__ __forceinline__ int32_t* header(const ResolveParams& p) const { return p.header + int64_t{slot} * kHeaderColumns; }
  __device__ __forceinline__ int32_t* tags(const ResolveParams& p) const { return p.tags + slot * p.tags_stride; }
  __device__ __forceinline__ uint8_t* stamps(const ResolveParams& p) const { return p.stamps + slot * p.stamps_stride; }
  __device__ __forceinline__ uint32_t now(const ResolveParams& p) const {
    return (clock / static_cast<uint32_t>(max(1, p.buffer_size / kAgeUnits))) & 255u;
  }
};

__device__ __forceinline__ SlotState load_state(const ResolveParams& p, int32_t slot) {
  const int4 head = *reinterpret_cast<const int4*>(p.header + int64_t{slot} * kHeaderColumns);
  return {slot, head.x, static_cast<uint32_t>(head.z), head.x != head.y};
}

// A thread owns kGroups x 4 neighbouring slots.
template <int kGroups>
struct OwnSlots {
  static constexpr int kEarly = kGroups <= 2 ? kGroups : 0;  // groups loaded ahead of need, as registers allow
  int4 tags[kEarly + 1];
  uint32_t stamps[kEarly + 1];  // four bytes each
  uint32_t orders[kGroups];     // victim order, one byte per slot

  static __device__ __forceinline__ int first(int g) { return (static_cast<int>(threadIdx.x) * kGroups + g) * 4; }
  __device__ __forceinline__ uint32_t order(int g, int b) const { return (orders[g] >> (8 * b)) & 255u; }

  __device__ __forceinline__ void load(const ResolveParams& p, const SlotState& state, bool held, int g, int into) {
    tags[into] = make_int4(-1, -1, -1, -1);
    stamps[into] = 0;
    if (!held || first(g) >= p.buffer_size) return;
    tags[into] = *reinterpret_cast<const int4*>(state.tags(p) + first(g));
    stamps[into] = *reinterpret_cast<const uint32_t*>(state.stamps(p) + first(g));
  }
};

// One byte of ones for each of four bits.
__device__ __forceinline__ uint32_t byte_mask(uint32_t bits) { return ((bits * 0x00204081u) & 0x01010101u) * 255u; }

// Publishes hits, refreshes their stamps (leader only) and orders the other slots as victims. Returns the hits.
template <int kGroups>
__device__ __forceinline__ int match_slots(const ResolveParams& p, const SlotState& state, bool leader, int table_bits, const Shared& s,
                                           OwnSlots<kGroups>& own) {
  const uint32_t now4 = state.now(p) * 0x01010101u;
  int hits = 0;
#pragma unroll
  for (int g = 0; g < kGroups; g++) {
    const int slot = own.first(g), at = OwnSlots<kGroups>::kEarly ? g : 0;
    if (!OwnSlots<kGroups>::kEarly) own.load(p, state, !state.stale, g, 0);
    const uint32_t tag[4] = {static_cast<uint32_t>(own.tags[at].x), static_cast<uint32_t>(own.tags[at].y),
                             static_cast<uint32_t>(own.tags[at].z), static_cast<uint32_t>(own.tags[at].w)};
    const uint32_t stamps = own.stamps[at];
    const uint32_t found = match_four(tag, slot, table_bits, s);
    hits += __popc(found);
    const uint32_t used = byte_mask(found);
    const uint32_t empty = byte_mask((tag[0] == kVacant) | (tag[1] == kVacant) << 1 | (tag[2] == kVacant) << 2 | (tag[3] == kVacant) << 3);
    const int present = p.buffer_size - slot;
    const uint32_t absent = present >= 4 ? 0u : present <= 0 ? kFullMask : kFullMask << (8 * present);
    const uint32_t age = __vminu4(__vsub4(now4, stamps), kAgeUnits * 0x01010101u);
    own.orders[g] = (__vsub4((kAgeUnits + 1) * 0x01010101u, age) & ~empty) | used | absent;
    // Neighbouring bytes of unused slots are written back as they were; what a helper reads of a used slot does not matter.
    if (leader && found) *reinterpret_cast<uint32_t*>(state.stamps(p) + slot) = (stamps & ~used) | (now4 & used);
  }
  return hits;
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

template <int kGroups>
__device__ __forceinline__ void count_orders(const OwnSlots<kGroups>& own, const Shared& s) {
#pragma unroll
  for (int g = 0; g < kGroups; g++)
#pragma unroll
    for (int b = 0; b < 4; b++)
      if (own.order(g, b) != kNoVictim) atomicAdd(&s.histogram[own.order(g, b)], 1u);
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
  const uint32_t reached = __ballot_sync(kFullMask, upto >= needed);
  uint32_t order = 3 * lane, below = upto - (a + b + c);
  if (below + a < needed) {
    below += a, order++;
    if (below + b < needed) below += b, order++;
  }
  const int source = reached ? __ffs(static_cast<int>(reached)) - 1 : 31;
  return {__shfl_sync(kFullMask, order, source), __shfl_sync(kFullMask, below, source), __shfl_sync(kFullMask, upto, 31)};
}

// Own slots below the threshold | at it << 16.
template <int kGroups>
__device__ __forceinline__ uint32_t count_candidates(const OwnSlots<kGroups>& own, uint32_t threshold) {
  uint32_t counted = 0;
#pragma unroll
  for (int g = 0; g < kGroups; g++)
#pragma unroll
    for (int b = 0; b < 4; b++) counted += own.order(g, b) < threshold ? 1u : own.order(g, b) == threshold ? 1u << 16 : 0u;
  return counted;
}

// `before` counts the candidates of all threads before this one, as count_candidates does.
template <int kGroups>
__device__ __forceinline__ void place_victims(const OwnSlots<kGroups>& own, Threshold threshold, uint32_t before, uint32_t needed,
                                              const Shared& s) {
  uint32_t below = before & 0xffffu, at = threshold.below + (before >> 16);
#pragma unroll
  for (int g = 0; g < kGroups; g++)
#pragma unroll
    for (int b = 0; b < 4; b++) {
      uint32_t rank = kMaxTopK;
      if (own.order(g, b) < threshold.order) rank = below++;
      if (own.order(g, b) == threshold.order) rank = at++;
      if (rank < needed) s.victim[rank] = static_cast<uint16_t>(own.first(g) + b);
    }
}

}  // namespace hisparse
