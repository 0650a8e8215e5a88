// Instantiations and launcher of the resolver.
#include <algorithm>

#include "launch.h"
#include "resolver.cuh"

namespace hisparse {
namespace {

struct DeviceLimits {
  int shared_bytes = 0, multiprocessors = 0;
};

cudaError_t device_limits(DeviceLimits& limits) {
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&limits.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return error;
  return cudaDeviceGetAttribute(&limits.multiprocessors, cudaDevAttrMultiProcessorCount, device);
}

// As many blocks per row as fit on three quarters of the device at once. A cluster lies within one group of multiprocessors, and
// such groups are uneven: filling the device to its last cluster makes some clusters queue (H200, batch 32, no miss: 10.4 us with
// four blocks a row, 6.4 with two; with misses the link decides and two are as good).
int choose_cluster(int rows, int multiprocessors) {
  int blocks = 8;
  while (blocks > 1 && rows * blocks > multiprocessors * 3 / 4) blocks /= 2;
  return blocks;
}

template <int kGroups, int kCopy, int kPasses = 0>
cudaError_t launch(const ResolveParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  const auto kernel = resolve_kernel<kGroups, kCopy, kPasses>;
  const int table_bits = table_bits_for(params.k);
  int64_t shared_bytes = resolver_shared_bytes(params.k, params.num_hot_pages, table_bits);
  int stages = 0;
  if constexpr (kCopy == kCopyBulk) {
    stages = static_cast<int>(std::min<int64_t>(160, (limits.shared_bytes - shared_bytes) / (params.row_bytes + 8)));
    if (stages < 1) return cudaErrorInvalidValue;
    shared_bytes += static_cast<int64_t>(stages) * (params.row_bytes + 8);
  }
  if (shared_bytes > limits.shared_bytes) return cudaErrorInvalidValue;
  // Idempotent and cheap; must be repeated per device, so it is simply repeated.
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)))
    return error;
  const int blocks = params.cluster_blocks > 0 ? params.cluster_blocks : choose_cluster(params.rows, limits.multiprocessors);
  cudaLaunchAttribute attributes[2]{};
  int num_attributes = 0;
  if (blocks > 1) {
    attributes[num_attributes].id = cudaLaunchAttributeClusterDimension;
    attributes[num_attributes++].val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  }
  if (params.overlap_launch) {
    attributes[num_attributes].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[num_attributes++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks, params.rows);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = static_cast<unsigned>(num_attributes);
  return cudaLaunchKernelEx(&config, kernel, params, table_bits, stages);
}

// The largest buffers have no registers to spare for bulk copies and take plain loads.
template <int kGroups>
cudaError_t launch_method(const ResolveParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  if constexpr (kGroups < 8)
    if (params.copy_method == kCopyBulk) return launch<kGroups, kCopyBulk>(params, limits, stream);
  if (params.copy_method == kCopyNone) return launch<kGroups, kCopyNone>(params, limits, stream);
  if (params.row_bytes <= 2 * 512) return launch<kGroups, kCopyLoads, 2>(params, limits, stream);
  if (params.row_bytes <= 3 * 512) return launch<kGroups, kCopyLoads, 3>(params, limits, stream);
  return launch<kGroups, kCopyLoads>(params, limits, stream);
}

}  // namespace

int launch_resolve(const ResolveParams& params, void* stream) {
  if (params.rows == 0) return cudaSuccess;
  DeviceLimits limits;
  if (cudaError_t error = device_limits(limits)) return error;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int groups = (params.buffer_size + 4 * kThreads - 1) / (4 * kThreads);
  if (groups <= 1) return launch_method<1>(params, limits, cuda_stream);
  if (groups <= 2) return launch_method<2>(params, limits, cuda_stream);
  return launch_method<8>(params, limits, cuda_stream);
}

}  // namespace hisparse
