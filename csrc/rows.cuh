// Copies of listed rows from pinned host memory to the device, for what is not a resolve: gathers and measurements of the link.
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

}  // namespace hisparse
