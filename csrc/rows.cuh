// Copies of scattered rows from pinned host memory to the device: the part that the link bounds.
// A block copies every stride-th row of a plan; a row is one (miss, layer) pair.
#pragma once
#include "intrinsics.cuh"
#include "params.h"

namespace hisparse {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

// Where the rows of one plan lie. wanted[entry_of[m]] is the host row of miss m, its target is slot victim[m].
struct RowPlan {
  const int32_t* wanted;
  const uint16_t* entry_of;
  const uint16_t* victim;
  const int32_t* hot_pages;
  int32_t first, stride, count;  // this block copies misses first, first + stride, ... below count
};

__device__ __forceinline__ int32_t hot_row(const int32_t* hot_pages, int slot, int page_shift) {
  return (hot_pages[slot >> page_shift] << page_shift) | (slot & ((1 << page_shift) - 1));
}

// A block's rows are numbered miss by miss, the layers of one miss side by side.
struct PlanRow {
  int miss, layer;
};

__device__ __forceinline__ PlanRow plan_row(const ResolveParams& p, const RowPlan& plan, int local_row) {
  const int local_miss = p.layers == 1 ? local_row : local_row / p.layers;
  return {plan.first + local_miss * plan.stride, local_row - local_miss * p.layers};
}

__device__ __forceinline__ const char* row_source(const ResolveParams& p, const RowPlan& plan, int local_row) {
  const PlanRow row = plan_row(p, plan, local_row);
  return reinterpret_cast<const char*>(p.host_bases[row.layer]) + plan.wanted[plan.entry_of[row.miss]] * p.host_row_bytes;
}

__device__ __forceinline__ char* row_target(const ResolveParams& p, const RowPlan& plan, int local_row) {
  const PlanRow row = plan_row(p, plan, local_row);
  const int64_t device_row = hot_row(plan.hot_pages, plan.victim[row.miss], p.page_shift);
  return reinterpret_cast<char*>(p.device_bases[row.layer]) + device_row * p.row_bytes;
}

__device__ __forceinline__ int local_misses(const RowPlan& plan) {
  return plan.first < plan.count ? (plan.count - plan.first + plan.stride - 1) / plan.stride : 0;
}

// One warp carries kRows rows at a time; every load of them is issued before the first store, so that a row costs one round
// trip over the link and not one per pass. kPasses x 32 lanes x 16 bytes cover a row; kPasses = 0 takes rows of any size,
// two passes at a time. `meanwhile` runs once, after the first loads are under way.
template <int kRows, int kPasses>
struct WarpCopy {
  static constexpr int kHeld = kPasses ? kPasses : 2;
  int4 held[kRows][kHeld];

  __device__ __forceinline__ void load(const ResolveParams& p, const RowPlan& plan, int local_row, int total, int first_vector) {
    const int lane = static_cast<int>(threadIdx.x) & 31, row_vectors = p.row_bytes / 16;
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int row = local_row + r * kWarps;
      if (row >= total) continue;
      const int4* source = reinterpret_cast<const int4*>(row_source(p, plan, row));
#pragma unroll
      for (int v = 0; v < kHeld; v++) {
        const int vector = first_vector + v * 32 + lane;
        if (vector < row_vectors) held[r][v] = load_host(source + vector);
      }
    }
  }

  __device__ __forceinline__ void store(const ResolveParams& p, const RowPlan& plan, int local_row, int total, int first_vector) {
    const int lane = static_cast<int>(threadIdx.x) & 31, row_vectors = p.row_bytes / 16;
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (local_row + r * kWarps >= total) continue;
      // Found again rather than kept: registers are what this kernel is short of.
      int4* target = reinterpret_cast<int4*>(row_target(p, plan, local_row + r * kWarps));
#pragma unroll
      for (int v = 0; v < kHeld; v++) {
        const int vector = first_vector + v * 32 + lane;
        if (vector < row_vectors) target[vector] = held[r][v];
      }
    }
  }
};

template <int kRows, int kPasses, typename Meanwhile>
__device__ __forceinline__ void copy_rows_by_loads(const ResolveParams& p, const RowPlan& plan, Meanwhile meanwhile) {
  const int row_vectors = p.row_bytes / 16;
  const int total = local_misses(plan) * p.layers;
  const int step = kPasses ? row_vectors : 32 * WarpCopy<kRows, kPasses>::kHeld;
  bool first_batch = true;
  for (int row = static_cast<int>(threadIdx.x) / 32; row < total || first_batch; row += kRows * kWarps)
    for (int vector = 0; vector < row_vectors; vector += step) {
      WarpCopy<kRows, kPasses> copy;
      copy.load(p, plan, row, total, vector);
      if (first_batch) meanwhile();
      first_batch = false;
      copy.store(p, plan, row, total, vector);
    }
}

// One thread owns one stage of a ring in shared memory and carries one row at a time through it.
template <typename Meanwhile>
__device__ __forceinline__ void copy_rows_by_bulk(const ResolveParams& p, const RowPlan& plan, char* ring, int stages,
                                                  Meanwhile meanwhile) {
  const int stage = static_cast<int>(threadIdx.x);
  const int total = local_misses(plan) * p.layers;
  char* slot = ring + static_cast<int64_t>(stage) * p.row_bytes;
  uint64_t* barrier = reinterpret_cast<uint64_t*>(ring + static_cast<int64_t>(stages) * p.row_bytes) + stage;
  const bool works = stage < stages && stage < total;
  if (works) {
    barrier_init(barrier);
    fence_async_shared();
    bulk_load(slot, row_source(p, plan, stage), p.row_bytes, barrier);
  }
  meanwhile();
  if (!works) return;
  uint32_t phase = 0;
  for (int row = stage; row < total; row += stages) {
    barrier_wait(barrier, phase);
    phase ^= 1;
    bulk_store(row_target(p, plan, row), slot, p.row_bytes);
    if (row + stages < total) {
      bulk_wait_read();
      bulk_load(slot, row_source(p, plan, row + stages), p.row_bytes, barrier);
    }
  }
  bulk_wait_all();
}

}  // namespace hisparse
