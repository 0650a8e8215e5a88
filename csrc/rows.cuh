// Copies of scattered rows from pinned host memory to the device: the part that the link bounds.
// A block copies every stride-th row of a plan; a row is one (miss, layer) pair.
#pragma once
#include "intrinsics.cuh"
#include "params.h"

namespace hisparse {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

__device__ __forceinline__ int32_t hot_row(const int32_t* hot_pages, int slot, int page_shift) {
  return (hot_pages[slot >> page_shift] << page_shift) | (slot & ((1 << page_shift) - 1));
}

// A block's share of one row's misses: first, first + stride, ... below count. wanted[entry_of[m]] is the host row of miss m,
// its target is slot victim[m]. Rows are numbered miss by miss, the layers of one miss side by side.
struct MissRows {
  const ResolveParams& p;
  const int32_t* wanted;
  const uint16_t* entry_of;
  const uint16_t* victim;
  const int32_t* hot_pages;
  int32_t first, stride, count;

  __device__ __forceinline__ int total() const { return first < count ? (count - first + stride - 1) / stride * p.layers : 0; }

  __device__ __forceinline__ const int4* source(int row) const {
    const int index = p.layers == 1 ? row : row / p.layers;
    const int64_t host_row = wanted[entry_of[first + index * stride]];
    return reinterpret_cast<const int4*>(p.host_bases[row - index * p.layers] + host_row * p.host_row_bytes);
  }

  __device__ __forceinline__ int4* target(int row) const {
    const int index = p.layers == 1 ? row : row / p.layers;
    const int64_t device_row = hot_row(hot_pages, victim[first + index * stride], p.page_shift);
    return reinterpret_cast<int4*>(p.device_bases[row - index * p.layers] + device_row * p.row_bytes);
  }
};

// One warp carries kRows rows at a time; every load of them is issued before the first store, so that a row costs one round
// trip over the link and not one per pass. kPasses x 32 lanes x 16 bytes cover a row; kPasses = 0 takes rows of any size,
// two passes at a time.
template <int kRows, int kPasses>
struct WarpCopy {
  static constexpr int kHeld = kPasses ? kPasses : 2;
  int4 held[kRows][kHeld];

  template <typename Rows>
  __device__ __forceinline__ void load(const Rows& rows, int row_vectors, int row, int step, int total, int first_vector) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (row + r * step >= total) continue;
      const int4* source = rows.source(row + r * step);
#pragma unroll
      for (int v = 0; v < kHeld; v++) {
        const int vector = first_vector + v * 32 + lane;
        if (vector < row_vectors) held[r][v] = load_host(source + vector);
      }
    }
  }

  template <typename Rows>
  __device__ __forceinline__ void store(const Rows& rows, int row_vectors, int row, int step, int total, int first_vector) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (row + r * step >= total) continue;
      int4* target = rows.target(row + r * step);  // found again rather than kept: registers are short
#pragma unroll
      for (int v = 0; v < kHeld; v++) {
        const int vector = first_vector + v * 32 + lane;
        if (vector < row_vectors) target[vector] = held[r][v];
      }
    }
  }
};

// Copies all rows with the warps numbered `warp` of `warps`. `meanwhile` runs once, after the first loads are under way.
template <int kRows, int kPasses, typename Rows, typename Meanwhile>
__device__ __forceinline__ void copy_rows_by_loads(const Rows& rows, int row_bytes, int warp, int warps, Meanwhile meanwhile) {
  const int row_vectors = row_bytes / 16;
  const int total = rows.total();
  const int step = kPasses ? row_vectors : 32 * WarpCopy<kRows, kPasses>::kHeld;
  bool first_batch = true;
  for (int row = warp; row < total || first_batch; row += kRows * warps)
    for (int vector = 0; vector < row_vectors; vector += step) {
      WarpCopy<kRows, kPasses> copy;
      copy.load(rows, row_vectors, row, warps, total, vector);
      if (first_batch) meanwhile();
      first_batch = false;
      copy.store(rows, row_vectors, row, warps, total, vector);
    }
}

// One thread owns one stage of a ring in shared memory and carries one row at a time through it.
template <typename Rows, typename Meanwhile>
__device__ __forceinline__ void copy_rows_by_bulk(const Rows& rows, int row_bytes, char* ring, int stages, Meanwhile meanwhile) {
  const int stage = static_cast<int>(threadIdx.x);
  const int total = rows.total();
  char* slot = ring + static_cast<int64_t>(stage) * row_bytes;
  uint64_t* barrier = reinterpret_cast<uint64_t*>(ring + static_cast<int64_t>(stages) * row_bytes) + stage;
  const bool works = stage < stages && stage < total;
  if (works) {
    barrier_init(barrier);
    fence_async_shared();
    bulk_load(slot, rows.source(stage), row_bytes, barrier);
  }
  meanwhile();
  if (!works) return;
  uint32_t phase = 0;
  for (int row = stage; row < total; row += stages) {
    barrier_wait(barrier, phase);
    phase ^= 1;
    bulk_store(rows.target(row), slot, row_bytes);
    if (row + stages < total) {
      bulk_wait_read();
      bulk_load(slot, rows.source(row + stages), row_bytes, barrier);
    }
  }
  bulk_wait_all();
}

}  // namespace hisparse
