// The kept table of one request slot and index group: logical id -> hot slot. It says what the tags say, in the other
// direction, so that an entry finds its slot with one read; tags stay the truth that a step writes first.
//
// Two halves of 2^home_bits buckets, eight entries each. An id has one bucket in either half; it is stored in the emptier one.
// An entry is (what the bucket's number leaves open of the id) << slot_bits | slot, so a match needs no look at the tags.
// At the load of one half at most, both buckets of an id being full is a chance below 10^-13 an insertion; such an id stays out,
// is fetched again when it is wanted, and nothing is wrong.
#pragma once
#include "lookup.cuh"

namespace hisparse {

constexpr uint32_t kNoEntry = 0xffffffffu;
constexpr uint32_t kIdMask = (1u << kLogicalIdBits) - 1;

// The bucket of an id in one half, and what an entry of it looks like without its slot.
struct Home {
  uint32_t bucket, pattern;
};

__device__ __forceinline__ Home home_of(const ResolveParams& p, uint32_t id, int half) {
  // Both are one to one on ids: bucket and remainder together are the id.
  const uint32_t mixed = (half == 0 ? id * 0x9E3779B1u : (id ^ (id >> 13)) * 0x85EBCA6Bu) & kIdMask;
  const int rest = kLogicalIdBits - p.home_bits;
  const uint32_t bucket = (static_cast<uint32_t>(half) << p.home_bits) | (mixed >> rest);
  return {bucket, (mixed & ((1u << rest) - 1)) << p.slot_bits};
}

// An entry of this pattern could look like no entry at all: it is never stored.
__device__ __forceinline__ bool storable(const ResolveParams& p, uint32_t pattern) {
  return (pattern | ((1u << p.slot_bits) - 1)) != kNoEntry;
}

__device__ __forceinline__ uint32_t* table_of(const ResolveParams& p, int32_t slot) { return p.table + slot * p.table_stride; }

// Behind the entries: where in the table the row of a slot is entered, so that it is taken out without a search.
__device__ __forceinline__ uint16_t* places_of(const ResolveParams& p, uint32_t* table) {
  return reinterpret_cast<uint16_t*>(table + (16 << p.home_bits));
}
constexpr uint32_t kNoPlace = 0xffffu;  // of a row that found no room; nothing is entered at this place

// One lookup of a whole warp: two lanes share the 32 bytes of a bucket, so the warp reads for 16 of its ids at a time.
struct TableView {
  int4 half_bucket[2][2];  // [which 16 lanes' ids][half of the table]

  __device__ __forceinline__ void load(const ResolveParams& p, const uint32_t* table, bool held, int32_t id) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
    for (int group = 0; group < 2; group++) {
      const int32_t key = __shfl_sync(kFullMask, id, group * 16 + (lane >> 1));
#pragma unroll
      for (int half = 0; half < 2; half++) {
        half_bucket[group][half] = make_int4(-1, -1, -1, -1);
        if (!held || key < 0) continue;
        const uint32_t bucket = home_of(p, static_cast<uint32_t>(key), half).bucket;
        half_bucket[group][half] = reinterpret_cast<const int4*>(table)[bucket * 2 + (lane & 1)];
      }
    }
  }

  // The slot of this lane's id, or -1.
  __device__ __forceinline__ int32_t find(const ResolveParams& p, int32_t id) const {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const uint32_t slot_mask = (1u << p.slot_bits) - 1;
    int32_t found[2] = {-1, -1};
#pragma unroll
    for (int group = 0; group < 2; group++) {
      const int32_t key = __shfl_sync(kFullMask, id, group * 16 + (lane >> 1));
#pragma unroll
      for (int half = 0; half < 2; half++) {
        uint32_t pattern = home_of(p, static_cast<uint32_t>(key), half).pattern;
        if (key < 0 || !storable(p, pattern)) pattern = 1;  // no entry without its slot is odd
        const int4 view = half_bucket[group][half];
        const uint32_t entries[4] = {static_cast<uint32_t>(view.x), static_cast<uint32_t>(view.y), static_cast<uint32_t>(view.z),
                                     static_cast<uint32_t>(view.w)};
#pragma unroll
        for (int i = 0; i < 4; i++)
          if ((entries[i] & ~slot_mask) == pattern) found[group] = static_cast<int32_t>(entries[i] & slot_mask);
      }
      found[group] = max(found[group], __shfl_xor_sync(kFullMask, found[group], 1));
    }
    const int32_t low = __shfl_sync(kFullMask, found[0], (lane & 15) * 2), high = __shfl_sync(kFullMask, found[1], (lane & 15) * 2);
    const int32_t slot = lane < 16 ? low : high;
    return slot < p.buffer_size ? slot : -1;
  }
};

// One bit for each free entry of a bucket. Other blocks write to the table: the read passes the first cache.
__device__ __forceinline__ uint32_t entries_empty(const uint32_t* table, uint32_t bucket) {
  constexpr uint32_t entry = kNoEntry;
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int4 view = load_shared_by_blocks(reinterpret_cast<const int4*>(table) + bucket * 2 + i);
    bits |= static_cast<uint32_t>((static_cast<uint32_t>(view.x) == entry) | (static_cast<uint32_t>(view.y) == entry) << 1 |
                                  (static_cast<uint32_t>(view.z) == entry) << 2 | (static_cast<uint32_t>(view.w) == entry) << 3)
            << (4 * i);
  }
  return bits;
}

// Enters an id that is not in the table; only this thread does. Returns its place, or kNoPlace.
__device__ __forceinline__ uint32_t table_insert(const ResolveParams& p, uint32_t* table, uint32_t id, uint32_t slot) {
  const Home homes[2] = {home_of(p, id, 0), home_of(p, id, 1)};
  const uint32_t empty[2] = {entries_empty(table, homes[0].bucket), entries_empty(table, homes[1].bucket)};
  const int emptier = __popc(empty[0]) >= __popc(empty[1]) ? 0 : 1;
#pragma unroll 1
  for (int attempt = 0; attempt < 2; attempt++) {
    const bool second = (attempt ^ emptier) != 0;
    const Home home = second ? homes[1] : homes[0];
    if (!storable(p, home.pattern)) continue;
    for (uint32_t places = second ? empty[1] : empty[0]; places != 0; places &= places - 1) {
      const uint32_t place = home.bucket * 8 + __ffs(static_cast<int>(places)) - 1;
      if (place != kNoPlace && atomicCAS(table + place, kNoEntry, home.pattern | slot) == kNoEntry) return place;
    }
  }
  return kNoPlace;
}

}  // namespace hisparse
