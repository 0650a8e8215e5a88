// Launchers of the CUDA kernels; all run on the given stream and return a cudaError_t as int.
#pragma once
#include "params.h"

namespace hisparse {

int launch_resolve(const ResolveParams& params, void* stream);
int launch_copy_pages(const CopyPagesParams& params, void* stream);
int launch_gather_rows(const GatherRowsParams& params, void* stream);
int launch_union_fetch(const UnionFetchParams& params, void* stream);
int launch_audit(const AuditParams& params, void* stream);
int launch_sum_counters(const SumCountersParams& params, void* stream);
int launch_translate_pages(const TranslatePagesParams& params, void* stream);
int launch_translate(const TranslateParams& params, void* stream);

}  // namespace hisparse
