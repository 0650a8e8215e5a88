// Instantiations and launcher of the resolver.
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

// As many blocks per row as find a multiprocessor each; two would fit on one, so that no cluster waits for its place. With 32 rows that
// is four. Two would take 1 us less where nothing is missed, but then a request that misses everything beside others that miss nothing
// takes 1.6 times what the same misses take when spread evenly, and with four 1.1 times.
int choose_cluster(int rows, int multiprocessors) {
  int blocks = 8;
  while (blocks > 1 && rows * blocks > multiprocessors) blocks /= 2;
  return blocks;
}

template <int kBlocks, int kPasses, bool kScores>
cudaError_t launch(const ResolveParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  const auto kernel = resolve_kernel<kBlocks, kPasses, kScores>;
  const int table_bits = table_bits_for(params.k);
  const int64_t shared_bytes = resolver_shared_bytes(params.buffer_size, params.num_hot_pages) +
                               (params.scores == nullptr ? 0 : score_shared_bytes(params.buffer_size));
  if (shared_bytes > limits.shared_bytes) return cudaErrorLaunchOutOfResources;
  // Idempotent and cheap; must be repeated per device, so it is simply repeated.
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)))
    return error;
  cudaLaunchAttribute attributes[2]{};
  int num_attributes = 0;
  if (kBlocks > 1) {
    attributes[num_attributes].id = cudaLaunchAttributeClusterDimension;
    attributes[num_attributes++].val.clusterDim = {kBlocks, 1, 1};
  }
  if (params.overlap_launch) {
    attributes[num_attributes].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[num_attributes++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kBlocks, params.rows);
  config.blockDim = dim3(kResolveThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = static_cast<unsigned>(num_attributes);
  return cudaLaunchKernelEx(&config, kernel, params, table_bits);
}

template <int kBlocks>
cudaError_t launch_row_size(const ResolveParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  if (params.scores != nullptr) return launch<kBlocks == 1 ? 2 : kBlocks, 3, true>(params, limits, stream);  // one has too few registers
  if (params.row_bytes <= 2 * 512) return launch<kBlocks, 2, false>(params, limits, stream);
  return launch<kBlocks, 3, false>(params, limits, stream);
}

}  // namespace

int launch_resolve(const ResolveParams& params, void* stream) {
  if (params.rows == 0) return cudaSuccess;
  DeviceLimits limits;
  if (cudaError_t error = device_limits(limits)) return error;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (params.cluster_blocks > 0 ? params.cluster_blocks : choose_cluster(params.rows, limits.multiprocessors)) {
    case 1:
      return launch_row_size<1>(params, limits, cuda_stream);
    case 2:
      return launch_row_size<2>(params, limits, cuda_stream);
    case 4:
      return launch_row_size<4>(params, limits, cuda_stream);
    default:
      return launch_row_size<8>(params, limits, cuda_stream);
  }
}

}  // namespace hisparse
