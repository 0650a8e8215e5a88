// Rows that a short extend selected and that are not in its scratch yet: each is copied from pinned host memory once a layer.
#include <algorithm>

#include "intrinsics.cuh"
#include "launch.h"

namespace hisparse {
namespace {

constexpr int kUnionThreads = 256;
constexpr int kUnionWarps = kUnionThreads / 32;
constexpr int kMostUnionBlocks = 264;
constexpr int kRowsInFlight = 4;
constexpr int kHeldVectors = 3;
constexpr unsigned kWholeWarp = 0xffffffffu;

// Scratch row of an id on a host-only page, else -1. Host-only pages have the first places of the scratch.
__device__ __forceinline__ int32_t wanted_row(const UnionFetchParams& p, int64_t id) {
  const int64_t page = id >> p.page_shift;
  if (id < 0 || page > p.num_logical_pages) return -1;
  const int32_t place = p.table[page];
  if (place < 1 || place > p.host_places) return -1;
  return (place << p.page_shift) | static_cast<int32_t>(id & ((int64_t{1} << p.page_shift) - 1));
}

// Whether this thread is the one to copy `row`. Most ids repeat what a neighbouring token selected: look before the atomic.
__device__ __forceinline__ bool claim(const UnionFetchParams& p, int32_t row) {
  if (row < 0) return false;
  const uint32_t bit = 1u << (row & 31);
  uint32_t* word = p.marks + (row >> 5);
  return !(*static_cast<volatile uint32_t*>(word) & bit) && !(atomicOr(word, bit) & bit);
}

// The warp copies the rows of all lanes in `winners`, several at a time: a row costs one round trip over the link.
__device__ __forceinline__ void copy_winners(const UnionFetchParams& p, unsigned winners, int64_t id, int32_t row) {
  const int lane = static_cast<int>(threadIdx.x) & 31, vectors = p.row_bytes / 16;
  const char* host = reinterpret_cast<const char*>(*p.host_base);
  char* scratch = reinterpret_cast<char*>(*p.scratch_base);
  while (winners) {
    const int4* sources[kRowsInFlight];
    int4* targets[kRowsInFlight];
#pragma unroll
    for (int r = 0; r < kRowsInFlight; r++) {
      const int owner = __ffs(static_cast<int>(winners)) - 1;
      const int64_t source = __shfl_sync(kWholeWarp, id, max(owner, 0)), target = __shfl_sync(kWholeWarp, row, max(owner, 0));
      sources[r] = owner < 0 ? nullptr : reinterpret_cast<const int4*>(host + source * p.row_bytes);
      targets[r] = reinterpret_cast<int4*>(scratch + target * p.row_bytes);
      winners &= winners - 1;
    }
    for (int first = lane; first - lane < vectors; first += 32 * kHeldVectors) {
      int4 held[kRowsInFlight][kHeldVectors];
#pragma unroll
      for (int r = 0; r < kRowsInFlight; r++)
#pragma unroll
        for (int v = 0; v < kHeldVectors; v++)
          if (sources[r] && first + 32 * v < vectors) held[r][v] = load_host(sources[r] + first + 32 * v);
#pragma unroll
      for (int r = 0; r < kRowsInFlight; r++)
#pragma unroll
        for (int v = 0; v < kHeldVectors; v++)
          if (sources[r] && first + 32 * v < vectors) targets[r][first + 32 * v] = held[r][v];
    }
  }
}

// A warp takes `step` ids at a time, few where there are few: each row that is copied has as much of the link as can be.
__global__ void __launch_bounds__(kUnionThreads) union_fetch_kernel(const __grid_constant__ UnionFetchParams p, int step) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int64_t warps = int64_t{gridDim.x} * kUnionWarps;
  int64_t first = (int64_t{blockIdx.x} * kUnionWarps + threadIdx.x / 32) * step;
  unsigned long long fetched = 0;
  for (; first < p.count; first += warps * step) {
    const int64_t i = first + lane;
    const int64_t id = lane < step && i < p.count ? p.ids[i] : -1;
    const int32_t row = wanted_row(p, id);
    const unsigned winners = __ballot_sync(kWholeWarp, claim(p, row));
    fetched += __popc(winners);
    copy_winners(p, winners, id, row);
  }
  if (lane == 0 && fetched) atomicAdd(reinterpret_cast<unsigned long long*>(p.fetched), fetched);
}

}  // namespace

int launch_union_fetch(const UnionFetchParams& params, void* stream) {
  if (params.count == 0 || params.host_places == 0) return cudaSuccess;
  const int64_t blocks = std::min<int64_t>((params.count + kUnionWarps - 1) / kUnionWarps, kMostUnionBlocks);
  const int64_t warps = blocks * kUnionWarps;
  const int step = static_cast<int>(std::min<int64_t>((params.count + warps - 1) / warps, 32));
  union_fetch_kernel<<<static_cast<unsigned>(blocks), kUnionThreads, 0, static_cast<cudaStream_t>(stream)>>>(params, step);
  return cudaGetLastError();
}

}  // namespace hisparse
