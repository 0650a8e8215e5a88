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

__device__ __forceinline__ int64_t load_index(const void* values, int64_t i, int wide) {
  return wide ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
}

// A block's share of one row's misses: first, first + stride, ... below count. Miss m goes from host row miss_row[m] to slot
// victim[m]. Rows are numbered miss by miss, the layers of one miss side by side.
struct MissRows {
  const ResolveParams& p;
  const int32_t* miss_row;
  const uint16_t* victim;
  const int32_t* hot_pages;
  int32_t first, stride, count;

  __device__ __forceinline__ int total() const { return first < count ? (count - first + stride - 1) / stride * p.layers : 0; }

  __device__ __forceinline__ const int4* source(int row) const {
    const int index = p.layers == 1 ? row : row / p.layers;
    const int64_t host_row = miss_row[first + index * stride];
    return reinterpret_cast<const int4*>(p.host_bases[row - index * p.layers] + host_row * p.host_row_bytes);
  }

  __device__ __forceinline__ int4* target(int row) const {
    const int index = p.layers == 1 ? row : row / p.layers;
    const int64_t device_row = hot_row(hot_pages, victim[first + index * stride], p.page_shift);
    return reinterpret_cast<int4*>(p.device_bases[row - index * p.layers] + device_row * p.row_bytes);
  }
};

// One warp's part of a copy of many rows: kRows rows at a time, every load of them issued before the first store, so that a
// row costs one round trip over the link and not one per pass. kPasses x 32 lanes x 16 bytes cover a row; kPasses = 0 takes
// rows of any size, two passes at a time. `load` starts the first batch: it needs sources only; `finish` does the rest.
template <int kRows, int kPasses>
struct WarpCopy {
  static constexpr int kHeld = kPasses ? kPasses : 2;
  int row_vectors, warp, warps;
  int4 held[kRows][kHeld];

  __device__ __forceinline__ WarpCopy(int row_bytes, int warp, int warps) : row_vectors(row_bytes / 16), warp(warp), warps(warps) {}

  template <typename Rows>
  __device__ __forceinline__ void load(const Rows& rows) {
    load_batch(rows, rows.total(), warp, 0);
  }

  template <typename Rows>
  __device__ __forceinline__ void finish(const Rows& rows) {
    const int total = rows.total();
    for (int row = warp; row < total; row += kRows * warps)
      for (int vector = 0; vector < row_vectors; vector += 32 * kHeld) {
        if (row != warp || vector != 0) load_batch(rows, total, row, vector);
        store_batch(rows, total, row, vector);
      }
  }

 private:
  template <typename Rows>
  __device__ __forceinline__ void load_batch(const Rows& rows, int total, int row, int first_vector) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (row + r * warps >= total) continue;
      const int4* source = rows.source(row + r * warps);
#pragma unroll
      for (int v = 0; v < kHeld; v++) {
        const int vector = first_vector + v * 32 + lane;
        if (vector < row_vectors) held[r][v] = load_host(source + vector);
      }
    }
  }

  template <typename Rows>
  __device__ __forceinline__ void store_batch(const Rows& rows, int total, int row, int first_vector) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (row + r * warps >= total) continue;
      int4* target = rows.target(row + r * warps);
#pragma unroll
      for (int v = 0; v < kHeld; v++) {
        const int vector = first_vector + v * 32 + lane;
        if (vector < row_vectors) target[vector] = held[r][v];
      }
    }
  }
};

__device__ __forceinline__ uint64_t* ring_barrier(char* ring, int stages, int row_bytes) {
  return reinterpret_cast<uint64_t*>(ring + static_cast<int64_t>(stages) * row_bytes) + threadIdx.x;
}

// Bulk copies: one thread owns one stage of a ring in shared memory and carries one row at a time through it.
template <typename Rows>
__device__ __forceinline__ void start_bulk_copies(const Rows& rows, int row_bytes, char* ring, int stages) {
  const int stage = static_cast<int>(threadIdx.x);
  if (stage >= stages || stage >= rows.total()) return;
  uint64_t* barrier = ring_barrier(ring, stages, row_bytes);
  barrier_init(barrier);
  fence_async_shared();
  bulk_load(ring + static_cast<int64_t>(stage) * row_bytes, rows.source(stage), row_bytes, barrier);
}

template <typename Rows>
__device__ __forceinline__ void finish_bulk_copies(const Rows& rows, int row_bytes, char* ring, int stages) {
  const int stage = static_cast<int>(threadIdx.x), total = rows.total();
  if (stage >= stages || stage >= total) return;
  uint64_t* barrier = ring_barrier(ring, stages, row_bytes);
  char* slot = ring + static_cast<int64_t>(stage) * row_bytes;
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
