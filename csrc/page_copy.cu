// Page-wise copies between the host tier and the device, and the two address translations outside the resolver.
#include <algorithm>

#include "launch.h"
#include "rows.cuh"

namespace hisparse {
namespace {

constexpr int kCopyThreads = 512;
constexpr int kCopyVectors = 8;  // 16-byte loads in flight per thread

// Work items are (page, layer, chunk of kCopyThreads x kCopyVectors vectors); blocks stride over them.
__global__ void __launch_bounds__(kCopyThreads) copy_pages_kernel(const __grid_constant__ CopyPagesParams p) {
  const int64_t page_vectors = p.page_bytes / 16;
  constexpr int64_t kChunk = int64_t{kCopyThreads} * kCopyVectors;
  const int64_t chunks = (page_vectors + kChunk - 1) / kChunk;
  const int64_t items = chunks * p.layers * p.pages;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t chunk = item % chunks, copy = item / chunks;
    const int layer = static_cast<int>(copy % p.layers);
    const int64_t page = copy / p.layers;
    const int64_t host = p.host_bases[layer] + p.host_pages[page] * p.page_bytes;
    const int64_t device = p.device_bases[layer] + p.device_pages[page] * p.page_bytes;
    const int4* source = reinterpret_cast<const int4*>(p.direction == kToHost ? device : host);
    int4* target = reinterpret_cast<int4*>(p.direction == kToHost ? host : device);
    const int64_t first = chunk * kChunk + threadIdx.x;
    int4 held[kCopyVectors];
#pragma unroll
    for (int v = 0; v < kCopyVectors; v++)
      if (first + v * kCopyThreads < page_vectors) held[v] = load_host(source + first + v * kCopyThreads);
#pragma unroll
    for (int v = 0; v < kCopyVectors; v++)
      if (first + v * kCopyThreads < page_vectors) target[first + v * kCopyThreads] = held[v];
  }
}

struct ListedRows {
  const GatherRowsParams& p;

  __device__ __forceinline__ int total() const { return p.rows * p.layers; }
  __device__ __forceinline__ const int4* source(int row) const {
    const int index = p.layers == 1 ? row : row / p.layers;
    return reinterpret_cast<const int4*>(p.host_bases[row - index * p.layers] + p.host_rows[index] * p.host_row_bytes);
  }
  __device__ __forceinline__ int4* target(int row) const {
    const int index = p.layers == 1 ? row : row / p.layers;
    return reinterpret_cast<int4*>(p.device_bases[row - index * p.layers] + int64_t{p.device_rows[index]} * p.row_bytes);
  }
};

template <int kPasses>
__global__ void __launch_bounds__(kThreads, 1) gather_rows_kernel(const __grid_constant__ GatherRowsParams p) {
  const int warp = static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) * (static_cast<int>(threadIdx.x) / 32);
  WarpCopy<kPasses == 3 ? 1 : 2, kPasses> copy(p.row_bytes, warp, kWarps * static_cast<int>(gridDim.x));
  copy.load(ListedRows{p});
  copy.finish(ListedRows{p});
}

// One warp an entry; every entry of a host-only page is compared with its host row, in all layers.
__global__ void audit_kernel(const __grid_constant__ AuditParams p) {
  const int64_t entry = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int64_t row = entry / p.k, i = entry % p.k;
  if (row >= p.num_rows || row >= *p.num_real_rows) return;
  const int64_t position = p.top_k[row * p.top_k_stride + i], page = position >> p.page_shift;
  const int64_t seq_len =
      p.wide_seq_lens ? static_cast<const int64_t*>(p.seq_lens)[row] : static_cast<const int32_t*>(p.seq_lens)[row];
  if (position < 0 || position >= seq_len || page >= p.max_pages) return;
  const int64_t logical = p.page_rows[row * p.page_rows_stride + page];
  if (logical <= 0 || logical > p.num_logical_pages || p.page_table[logical] != 0) return;
  const int64_t home = (logical << p.page_shift) + (position & ((1 << p.page_shift) - 1));
  const int64_t answer = p.rows[row * p.rows_stride + i];
  bool differs = answer < 0;
  for (int layer = 0; layer < p.layers && answer >= 0; layer++) {
    const int4* expected = reinterpret_cast<const int4*>(p.host_bases[layer] + home * p.row_bytes);
    const int4* got = reinterpret_cast<const int4*>(p.device_bases[layer] + answer * p.row_bytes);
    for (int v = lane; v < p.row_bytes / 16; v += 32) {
      const int4 a = load_host(expected + v), b = got[v];
      differs |= a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w;
    }
  }
  differs = __any_sync(0xffffffffu, differs);
  if (lane != 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(&p.counts[0]), 1ull);
  if (differs) atomicAdd(reinterpret_cast<unsigned long long*>(&p.counts[1]), 1ull);
}

__global__ void translate_kernel(const __grid_constant__ TranslateParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= p.count) return;
  const int64_t id = p.wide_ids ? static_cast<const int64_t*>(p.ids)[i] : static_cast<const int32_t*>(p.ids)[i];
  const int64_t page = id >> p.page_shift;
  const int32_t device = id >= 0 && page <= p.num_logical_pages ? p.page_table[page] : 0;
  const int64_t offset = id < 0 ? 0 : id & ((int64_t{1} << p.page_shift) - 1);
  int64_t row = (static_cast<int64_t>(device) << p.page_shift) + offset;
  if (p.missing < 0 && device <= 0) row = -1;
  if (p.wide_out)
    static_cast<int64_t*>(p.out)[i] = row;
  else
    static_cast<int32_t*>(p.out)[i] = static_cast<int32_t>(row);
}

__global__ void translate_pages_kernel(const __grid_constant__ TranslatePagesParams p) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int64_t row = blockIdx.y;
  if (i >= p.max_pages) return;
  const int32_t logical = p.page_rows[row * p.page_rows_stride + i];
  const int32_t device = logical > 0 && logical <= p.num_logical_pages ? p.page_table[logical] : -1;
  p.out[row * p.out_stride + i] = device > 0 ? device : device == 0 ? -logical : 0;
}

}  // namespace

int launch_copy_pages(const CopyPagesParams& params, void* stream) {
  if (params.pages == 0 || params.layers == 0) return cudaSuccess;
  const int64_t chunk_bytes = int64_t{kCopyThreads} * kCopyVectors * 16;
  const int64_t items = (params.page_bytes + chunk_bytes - 1) / chunk_bytes * params.layers * params.pages;
  const int blocks = static_cast<int>(std::min<int64_t>(items, params.max_blocks));
  copy_pages_kernel<<<blocks, kCopyThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return cudaGetLastError();
}

int launch_gather_rows(const GatherRowsParams& params, void* stream) {
  const int rows = params.rows * params.layers;
  if (rows == 0) return cudaSuccess;
  const int blocks = std::min(rows, params.max_blocks);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (params.row_bytes <= 2 * 512)
    gather_rows_kernel<2><<<blocks, kThreads, 0, cuda_stream>>>(params);
  else if (params.row_bytes <= 3 * 512)
    gather_rows_kernel<3><<<blocks, kThreads, 0, cuda_stream>>>(params);
  else
    gather_rows_kernel<0><<<blocks, kThreads, 0, cuda_stream>>>(params);
  return cudaGetLastError();
}

int launch_audit(const AuditParams& params, void* stream) {
  const int64_t threads = int64_t{params.num_rows} * params.k * 32;
  if (threads == 0) return cudaSuccess;
  audit_kernel<<<static_cast<unsigned>((threads + 255) / 256), 256, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return cudaGetLastError();
}

int launch_translate_pages(const TranslatePagesParams& params, void* stream) {
  if (params.rows == 0 || params.max_pages == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((params.max_pages + 255) / 256), static_cast<unsigned>(params.rows));
  translate_pages_kernel<<<grid, 256, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return cudaGetLastError();
}

int launch_translate(const TranslateParams& params, void* stream) {
  if (params.count == 0) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>((params.count + 255) / 256);
  translate_kernel<<<blocks, 256, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return cudaGetLastError();
}

}  // namespace hisparse
