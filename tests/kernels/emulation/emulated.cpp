// The resolver's device code, run by the emulation, under the same export as in the real libraries.
#include "cuda_emulation.h"

#include "checks.h"
#include "resolver.cuh"

namespace hisparse {
namespace {

uint64_t launches = 0;  // seeds the order of threads: it differs from call to call, and repeats from run to run

template <int kBlocks, int kPasses, bool kScores>
void launch(const ResolveParams& params) {
  const int table_bits = table_bits_for(params.k);
  const size_t shared = resolver_shared_bytes(params.buffer_size, params.num_hot_pages) +
                              (params.scores == nullptr ? 0 : score_shared_bytes(params.buffer_size));
  for (int row = 0; row < params.rows; row++)
    emulation::run_cluster(kBlocks, params.rows, row, kResolveThreads, shared, ++launches,
                           [&] { resolve_kernel<kBlocks, kPasses, kScores>(params, table_bits); });
}

template <int kBlocks>
void launch_row_size(const ResolveParams& params) {
  if (params.scores != nullptr) return launch<kBlocks == 1 ? 2 : kBlocks, 3, true>(params);
  if (params.row_bytes <= 2 * 512) return launch<kBlocks, 2, false>(params);
  return launch<kBlocks, 3, false>(params);
}

void resolve(TensorView top_k, TensorView page_rows, TensorView seq_lens, TensorView req_slots, TensorView num_real_rows,
             TensorView page_table, TensorView hot_pages, TensorView tags, TensorView stamps, TensorView header, TensorView host_bases,
             TensorView device_bases, TensorView out, int64_t row_bytes, int64_t host_row_bytes, int64_t page_size,
             int64_t cluster_blocks, int64_t copy_method, bool translated_pages, bool overlap_launch,
             TensorView table, Optional<TensorView> slot_pages, Optional<TensorView> scores) {
  const ResolveTensors tensors{top_k, page_rows, seq_lens, req_slots, num_real_rows, page_table, hot_pages,
                               tags,  stamps,    header,   host_bases, device_bases, out, table, slot_pages, scores};
  const ResolveParams params = make_resolve_params(tensors, row_bytes, host_row_bytes, page_size, cluster_blocks, copy_method,
                                                   translated_pages, overlap_launch);
  if (params.cluster_blocks <= 1) return launch_row_size<1>(params);
  if (params.cluster_blocks == 2) return launch_row_size<2>(params);
  if (params.cluster_blocks == 4) return launch_row_size<4>(params);
  return launch_row_size<8>(params);
}

}  // namespace
}  // namespace hisparse

TVM_FFI_DLL_EXPORT_TYPED_FUNC(resolve, hisparse::resolve);
