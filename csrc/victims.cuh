// Replacement: which hot slots leave, and in which order misses take their places.
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
  uint32_t now;  // stamp of this step
  int32_t held;  // slots below it hold a row; -1: tags and table belong to an earlier lease, every slot counts as empty

  __device__ __forceinline__ bool stale() const { return held < 0; }
  __device__ __forceinline__ int32_t filled() const { return max(held, 0); }

  __device__ __forceinline__ int32_t* header(const ResolveParams& p) const { return p.header + int64_t{slot} * kHeaderColumns; }
  __device__ __forceinline__ int32_t* tags(const ResolveParams& p) const { return p.tags + slot * p.tags_stride; }
  __device__ __forceinline__ uint8_t* stamps(const ResolveParams& p) const { return p.stamps + slot * p.stamps_stride; }
};

__device__ __forceinline__ SlotState load_state(const ResolveParams& p, int32_t slot, const Shared& s) {
  const int4 head = *reinterpret_cast<const int4*>(p.header + int64_t{slot} * kHeaderColumns);
  if (threadIdx.x == 0) s.row->head = head;
  const uint32_t unit = static_cast<uint32_t>(max(1, p.buffer_size / kAgeUnits));
  return {slot, static_cast<uint32_t>(head.z) / unit & 255u, head.x != head.y ? -1 : head.w};
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

// Sum over the warps before this one; sums[kResolveWarps] was written before the last block barrier.
__device__ __forceinline__ uint32_t sum_of_warps_before(const uint32_t* sums) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / 32;
  return __reduce_add_sync(kFullMask, lane < warp ? sums[lane] : 0u);
}

// One byte of ones for each of four bits.
__device__ __forceinline__ uint32_t byte_mask(uint32_t bits) { return ((bits * 0x00204081u) & 0x01010101u) * 255u; }

// Victim orders of four neighbouring slots with these stamps, before any of them is used.
__device__ __forceinline__ uint32_t unused_orders(const ResolveParams& p, const SlotState& state, int slot, uint32_t stamps) {
  const int held = state.filled() - slot, present = p.buffer_size - slot;
  const uint32_t empty = held >= 4 ? 0u : held <= 0 ? kFullMask : kFullMask << (8 * held);
  const uint32_t absent = present >= 4 ? 0u : kFullMask << (8 * present);
  const uint32_t age = __vminu4(__vsub4(state.now * 0x01010101u, stamps), kAgeUnits * 0x01010101u);
  return (__vsub4((kAgeUnits + 1) * 0x01010101u, age) & ~empty) | absent;
}

// The same of slots that s.used tells.
__device__ __forceinline__ uint32_t orders_of_four(const ResolveParams& p, const SlotState& state, int slot, const Shared& s) {
  const uint32_t stamps = *reinterpret_cast<const uint32_t*>(state.stamps(p) + slot);
  return unused_orders(p, state, slot, stamps) | byte_mask((s.used[slot >> 5] >> (slot & 31)) & 15u);
}

// Where a group's orders lie: threads that read neighbouring stretches of them meet in different banks.
__device__ __forceinline__ int skewed(int group) { return group + (group >> 5); }

// Sends for the stamps; each thread takes those that it has sent for.
__device__ __forceinline__ void request_stamps(const ResolveParams& p, int32_t slot, const Shared& s) {
  const auto* stamps = reinterpret_cast<const uint32_t*>(p.stamps + slot * p.stamps_stride);
#pragma unroll 1
  for (int g = static_cast<int>(threadIdx.x); g < (p.buffer_size + 3) / 4; g += kResolveThreads) copy_async(&s.orders[skewed(g)], &stamps[g]);
}

// Turns stamps into orders, as if no slot were used in this step: it need not wait for what the step wants.
__device__ __forceinline__ void order_slots(const ResolveParams& p, const SlotState& state, const Shared& s) {
#pragma unroll 2
  for (int g = static_cast<int>(threadIdx.x); g < (p.buffer_size + 3) / 4; g += kResolveThreads)
    s.orders[skewed(g)] = unused_orders(p, state, 4 * g, s.orders[skewed(g)]);
}

__device__ __forceinline__ void count_orders(const ResolveParams& p, const Shared& s) {
#pragma unroll 2
  for (int g = static_cast<int>(threadIdx.x); g < (p.buffer_size + 3) / 4; g += kResolveThreads) {
    const uint32_t orders = s.orders[skewed(g)];
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const uint32_t order = (orders >> (8 * b)) & 255u;
      if (order < kHistogramBins) atomicAdd(&s.row->histogram[order], 1u);  // not kNoVictim
    }
  }
}

// The order of a slot before the step used any.
__device__ __forceinline__ uint32_t order_of(int slot, const Shared& s) { return (s.orders[skewed(slot >> 2)] >> (8 * (slot & 3))) & 255u; }

// Takes a slot out of the victims. Returns the order that it was counted under, once however often it is called; else kNoVictim.
// Where scores decide, nothing was counted.
template <bool kScores>
__device__ __forceinline__ uint32_t keep_slot(int slot, const Shared& s) {
  if constexpr (kScores) {
    atomicOr(&s.used[slot >> 5], 1u << (slot & 31));
    return kNoVictim;
  } else {
    const int shift = 8 * (slot & 3);
    return (atomicOr(&s.orders[skewed(slot >> 2)], kNoVictim << shift) >> shift) & 255u;
  }
}

struct Threshold {
  uint32_t order;  // the last victim order needed; orders below it leave whole
  uint32_t below;  // slots of orders below it
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
  return {__shfl_sync(kFullMask, order, source), __shfl_sync(kFullMask, below, source)};
}

// Of four orders, the top bit of each byte that is below `order`, and of each that is at it. Orders are below 127 or kNoVictim.
struct Compared {
  uint32_t below, at;
};

__device__ __forceinline__ Compared compare_orders(uint32_t orders, uint32_t order) {
  const uint32_t limit = (order * 0x01010101u) | 0x80808080u, low = orders & 0x7f7f7f7fu;  // no byte borrows from its neighbour
  const uint32_t below = (limit - 0x01010101u - low) & 0x80808080u, upto = (limit - low) & 0x80808080u;
  return {below, upto & ~below};
}
static_assert(kAgeUnits + 2 < 127);

// Chooses victims. Called by all threads of a block, each block of a row coming to the same answer: s.row->victim[0 .. needed) are
// the slots that leave, by miss rank. Orders are counted and what the step reads is kept. Ends with a block barrier.
// There are always enough: a row's hits and misses are at most k together, and the buffer has k slots at least.
__device__ __forceinline__ void choose_victims(const ResolveParams& p, uint32_t needed, const Shared& s) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread / 32;
  const int all = (p.buffer_size + 3) / 4, own = (all + kResolveThreads - 1) / kResolveThreads;  // groups of four slots
  const int first = thread * own, last = min(first + own, all);                                  // neighbours, so that slots come in order
  const Threshold threshold = victim_threshold(s.row->histogram, needed);
  uint32_t counted = 0;  // own slots below the threshold | at it << 16
#pragma unroll 2
  for (int g = first; g < last; g++) {
    const Compared compared = compare_orders(s.orders[skewed(g)], threshold.order);
    counted += __popc(compared.below) | (__popc(compared.at) << 16);
  }
  const uint32_t upto = warp_inclusive_sum(counted);
  if (lane == 31) s.row->warp_sums[warp] = upto;
  __syncthreads();

  const uint32_t before = sum_of_warps_before(s.row->warp_sums) + upto - counted;
  uint32_t below = before & 0xffffu, at = threshold.below + (before >> 16);
#pragma unroll 1
  for (int g = first; g < last && counted; g++) {
    const Compared compared = compare_orders(s.orders[skewed(g)], threshold.order);
    for (uint32_t leaves = compared.below | compared.at; leaves != 0; leaves &= leaves - 1) {
      const uint32_t bit = leaves & (0u - leaves), rank = compared.below & bit ? below++ : at++;
      if (rank < needed) s.row->victim[rank] = static_cast<uint16_t>(4 * g + (__ffs(static_cast<int>(bit)) - 1) / 8);
    }
  }
  __syncthreads();
}

}  // namespace hisparse
