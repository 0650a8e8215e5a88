// The resolver's device code, run by the emulation, under the same export as in the real libraries.
#include "cuda_emulation.h"

#include "checks.h"
#include "resolver.cuh"

namespace hisparse {
namespace {

uint64_t launches = 0;  // seeds the order of threads: it differs from call to call, and repeats from run to run

template <int kGroups, int kCopy, int kPasses>
void launch(const ResolveParams& params) {
  const int blocks = params.cluster_blocks > 0 ? params.cluster_blocks : 1;
  const int table_bits = table_bits_for(params.k), stages = kCopy == kCopyBulk ? 24 : 0;
  const size_t shared = resolver_shared_bytes(params.k, params.num_hot_pages, table_bits) + stages * (params.row_bytes + 8);
  for (int row = 0; row < params.rows; row++)
    emulation::run_cluster(blocks, params.rows, row, kThreads, shared, ++launches,
                           [&] { resolve_kernel<kGroups, kCopy, kPasses>(params, table_bits, stages); });
}

template <int kGroups>
void launch_method(const ResolveParams& params) {
  if (params.copy_method == kCopyBulk) return launch<kGroups, kCopyBulk, 0>(params);
  if (params.copy_method == kCopyNone) return launch<kGroups, kCopyNone, 0>(params);
  if (params.row_bytes <= 2 * 512) return launch<kGroups, kCopyLoads, 2>(params);
  if (params.row_bytes <= 3 * 512) return launch<kGroups, kCopyLoads, 3>(params);
  return launch<kGroups, kCopyLoads, 0>(params);
}

void resolve(TensorView top_k, TensorView page_rows, TensorView seq_lens, TensorView req_slots, TensorView num_real_rows,
             TensorView page_table, TensorView hot_pages, TensorView tags, TensorView stamps, TensorView header, TensorView host_bases,
             TensorView device_bases, TensorView out, int64_t row_bytes, int64_t host_row_bytes, int64_t page_size,
             int64_t cluster_blocks, int64_t copy_method, bool translated_pages, bool overlap_launch, Optional<TensorView> slot_pages,
             Optional<TensorView> scores) {
  const ResolveTensors tensors{top_k, page_rows, seq_lens, req_slots, num_real_rows, page_table, hot_pages,
                               tags,  stamps,    header,   host_bases, device_bases, out,           slot_pages, scores};
  const ResolveParams params = make_resolve_params(tensors, row_bytes, host_row_bytes, page_size, cluster_blocks, copy_method,
                                                   translated_pages, overlap_launch);
  const int groups = (params.buffer_size + 4 * kThreads - 1) / (4 * kThreads);
  if (groups <= 1) return launch_method<1>(params);
  if (groups <= 2) return launch_method<2>(params);
  return launch_method<8>(params);
}

}  // namespace
}  // namespace hisparse

TVM_FFI_DLL_EXPORT_TYPED_FUNC(resolve, hisparse::resolve);
