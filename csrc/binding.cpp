// Exports of the CUDA library. Launches go to the caller's current stream, a capturing one included.
#include <cuda_runtime_api.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/tvm_ffi.h>

#include "checks.h"
#include "launch.h"

namespace hisparse {
namespace {

template <typename Params>
void launch_on(DLDevice device, int (*launcher)(const Params&, void*), const Params& params, const char* what) {
  TVM_FFI_CHECK(device.device_type == kDLCUDA, ValueError) << what << ": tensors must be on a CUDA device";
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const int error = launcher(params, TVMFFIEnvGetStream(kDLCUDA, device.device_id));
  TVM_FFI_CHECK(error == cudaSuccess, RuntimeError) << what << ": " << cudaGetErrorString(static_cast<cudaError_t>(error));
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
  launch_on(top_k.device(), launch_resolve, params, "resolve");
}

void copy_pages(TensorView host_bases, TensorView device_bases, TensorView host_pages, TensorView device_pages, int64_t direction,
                int64_t page_bytes, int64_t max_blocks) {
  const CopyPagesParams params =
      make_copy_pages_params(host_bases, device_bases, host_pages, device_pages, direction, page_bytes, max_blocks);
  launch_on(host_pages.device(), launch_copy_pages, params, "copy_pages");
}

void gather_rows(TensorView host_bases, TensorView device_bases, TensorView host_rows, TensorView device_rows, int64_t row_bytes,
                 int64_t host_row_bytes, int64_t max_blocks) {
  const GatherRowsParams params =
      make_gather_rows_params(host_bases, device_bases, host_rows, device_rows, row_bytes, host_row_bytes, max_blocks);
  launch_on(host_rows.device(), launch_gather_rows, params, "gather_rows");
}

void union_fetch(TensorView ids, TensorView table, TensorView host_base, TensorView scratch_base, TensorView marks, TensorView fetched,
                 int64_t host_places, int64_t row_bytes, int64_t page_size) {
  const UnionFetchTensors tensors{ids, table, host_base, scratch_base, marks, fetched};
  launch_on(ids.device(), launch_union_fetch, make_union_fetch_params(tensors, host_places, row_bytes, page_size), "union_fetch");
}

void audit(TensorView rows, TensorView top_k, TensorView page_rows, TensorView seq_lens, TensorView num_real_rows, TensorView page_table,
           TensorView host_bases, TensorView device_bases, int64_t row_bytes, int64_t page_size, TensorView counts) {
  const AuditTensors tensors{rows, top_k, page_rows, seq_lens, num_real_rows, page_table, host_bases, device_bases, counts};
  launch_on(top_k.device(), launch_audit, make_audit_params(tensors, row_bytes, page_size), "audit");
}

void sum_counters(TensorView header, TensorView group_layers, TensorView out) {
  launch_on(header.device(), launch_sum_counters, make_sum_counters_params(header, group_layers, out), "sum_counters");
}

void translate_pages(TensorView page_rows, TensorView page_table, TensorView out) {
  launch_on(page_rows.device(), launch_translate_pages, make_translate_pages_params(page_rows, page_table, out), "translate_pages");
}

void translate(TensorView ids, TensorView page_table, TensorView out, int64_t page_size, int64_t missing) {
  launch_on(ids.device(), launch_translate, make_translate_params(ids, page_table, out, page_size, missing), "translate");
}

}  // namespace
}  // namespace hisparse

TVM_FFI_DLL_EXPORT_TYPED_FUNC(resolve, hisparse::resolve);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_pages, hisparse::copy_pages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_rows, hisparse::gather_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(union_fetch, hisparse::union_fetch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(audit, hisparse::audit);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sum_counters, hisparse::sum_counters);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(translate_pages, hisparse::translate_pages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(translate, hisparse::translate);
