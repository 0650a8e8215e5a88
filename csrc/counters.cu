// What the resolver has counted, summed over the index groups and written straight into pinned host memory: one small launch
// ahead of a decode step. The counts grow for ever, modulo 2^32, so that a sample that nobody reads loses nothing.
#include <cuda_runtime_api.h>

#include "launch.h"

namespace hisparse {
namespace {

constexpr int kSumThreads = 512;
constexpr int kSlotsPerBlock = kSumThreads / 32;
constexpr unsigned kWholeWarp = 0xffffffffu;

// One warp a request slot, a lane every 32nd group. A block writes its slots side by side: the link carries whole lines.
__global__ void __launch_bounds__(kSumThreads) sum_counters_kernel(const __grid_constant__ SumCountersParams p) {
  __shared__ int32_t result[kSlotsPerBlock * kSummedColumns];
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int first_slot = static_cast<int>(blockIdx.x) * kSlotsPerBlock, slot = min(first_slot + warp, p.num_slots - 1);
  uint32_t sums[kSummedColumns] = {};
  for (int group = lane; group < p.groups; group += 32) {
    const int32_t* header = p.header + (int64_t{group} * p.num_slots + slot) * kHeaderColumns;
    const int4 counts = *reinterpret_cast<const int4*>(header + kResidentEntries);
    sums[0] += counts.x;
    sums[1] += counts.y;
    sums[2] += counts.z;
    sums[3] += counts.w;
    sums[4] += static_cast<uint32_t>(counts.z) * static_cast<uint32_t>(p.group_layers[group]);
  }
#pragma unroll
  for (int column = 0; column < kSummedColumns; column++) {
    const uint32_t sum = __reduce_add_sync(kWholeWarp, sums[column]);
    if (lane == 0) result[warp * kSummedColumns + column] = static_cast<int32_t>(sum);
  }
  __syncthreads();
  const int count = min(kSlotsPerBlock, p.num_slots - first_slot) * kSummedColumns;
  if (thread < count) p.out[int64_t{first_slot} * kSummedColumns + thread] = result[thread];
}

}  // namespace

int launch_sum_counters(const SumCountersParams& params, void* stream) {
  const int blocks = (params.num_slots + kSlotsPerBlock - 1) / kSlotsPerBlock;
  sum_counters_kernel<<<blocks, kSumThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return cudaGetLastError();
}

}  // namespace hisparse
