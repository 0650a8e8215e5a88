// Turns tensors into the structs of params.h, or raises a Python error that names the argument. Shared by both libraries.
#pragma once
#include <tvm/ffi/tvm_ffi.h>

#include <string>

#include "params.h"

namespace hisparse {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

inline bool is_int(const TensorView& t, int bits) {
  return t.dtype().code == kDLInt && t.dtype().bits == bits && t.dtype().lanes == 1;
}

struct Expected {
  const char* name;
  int ndim;
  DLDeviceType device;
  int device_id;
};

// Pinned host memory counts as CPU memory.
inline void check_place(const TensorView& t, const Expected& e) {
  const DLDeviceType device = t.device().device_type == kDLCUDAHost ? kDLCPU : t.device().device_type;
  TVM_FFI_CHECK(device == e.device && (device == kDLCPU || t.device().device_id == e.device_id), ValueError)
      << e.name << " must be on the same device as the other tensors";
  TVM_FFI_CHECK(t.ndim() == e.ndim, ValueError) << e.name << " must have " << e.ndim << " dimensions, not " << t.ndim();
  TVM_FFI_CHECK(e.ndim == 0 || t.size(e.ndim - 1) <= 1 || t.stride(e.ndim - 1) == 1, ValueError)
      << e.name << " must be contiguous in its last dimension";
}

inline const int32_t* int32_data(const TensorView& t, const Expected& e) {
  check_place(t, e);
  TVM_FFI_CHECK(is_int(t, 32), TypeError) << e.name << " must be int32";
  return static_cast<const int32_t*>(t.data_ptr());
}

inline const int64_t* int64_data(const TensorView& t, const Expected& e) {
  check_place(t, e);
  TVM_FFI_CHECK(is_int(t, 64), TypeError) << e.name << " must be int64";
  return static_cast<const int64_t*>(t.data_ptr());
}

// Returns whether the tensor is int64; it may be int32 as well.
inline bool index_width(const TensorView& t, const Expected& e) {
  check_place(t, e);
  TVM_FFI_CHECK(is_int(t, 32) || is_int(t, 64), TypeError) << e.name << " must be int32 or int64";
  return is_int(t, 64);
}

inline int32_t page_shift_of(int64_t page_size) {
  TVM_FFI_CHECK(page_size >= 1 && (page_size & (page_size - 1)) == 0 && page_size <= 65536, ValueError)
      << "page_size must be a power of two up to 65536, not " << page_size;
  int32_t shift = 0;
  while ((int64_t{1} << shift) < page_size) shift++;
  return shift;
}

inline void check_size(const char* name, int64_t got, int64_t want) {
  TVM_FFI_CHECK(got == want, ValueError) << name << " has size " << got << ", expected " << want;
}

inline int64_t row_stride(const TensorView& t) { return t.size(0) > 1 ? t.stride(0) : t.size(1); }

struct ResolveTensors {
  TensorView top_k, page_rows, seq_lens, req_slots, num_real_rows, page_table, hot_pages, tags, stamps, header, host_bases, device_bases, out, table;
  Optional<TensorView> slot_pages, scores;
};

// What eviction by score needs besides the rest; called when p is otherwise complete.
inline void add_scores(const ResolveTensors& t, const Expected& like, ResolveParams& p) {
  if (t.slot_pages.has_value()) {
    const TensorView& pages = t.slot_pages.value();
    check_place(pages, {"slot_pages", 2, like.device, like.device_id});
    TVM_FFI_CHECK(is_int(pages, 16), TypeError) << "slot_pages must be int16, whose bits are taken as unsigned";
    check_size("slot_pages rows", pages.size(0), p.num_slots);
    check_size("slot_pages columns", pages.size(1), p.buffer_size);
    TVM_FFI_CHECK(row_stride(pages) % 4 == 0, ValueError) << "the hot state must come from HotGroupState.allocate: its rows are read as vectors";
    TVM_FFI_CHECK(p.max_pages <= kMaxRequestPages, ValueError)
        << "page_rows has " << p.max_pages << " columns; with slot_pages at most " << kMaxRequestPages;
    p.slot_pages = static_cast<uint16_t*>(pages.data_ptr());
    p.slot_pages_stride = row_stride(pages);
  }
  if (!t.scores.has_value()) return;
  const TensorView& scores = t.scores.value();
  check_place(scores, {"scores", 2, like.device, like.device_id});
  TVM_FFI_CHECK(scores.dtype().code == kDLFloat && scores.dtype().bits == 32, TypeError) << "scores must be float32";
  TVM_FFI_CHECK(p.slot_pages != nullptr, ValueError) << "scores need a hot state with slot_pages";
  TVM_FFI_CHECK(scores.size(0) <= INT32_MAX && scores.size(1) <= INT32_MAX, ValueError) << "scores has too many elements a side";
  p.scores = static_cast<const float*>(scores.data_ptr());
  p.scores_stride = row_stride(scores);
  p.score_rows = static_cast<int32_t>(scores.size(0));
  p.score_columns = static_cast<int32_t>(scores.size(1));
}

// Buckets in one half of the slot table: their entries are twice the slots at least.
inline int32_t home_bits_of(int32_t slot_bits) { return slot_bits < 8 ? 5 : slot_bits - 3; }

inline void add_table(const TensorView& table, const Expected& like, ResolveParams& p) {
  p.table = reinterpret_cast<uint32_t*>(const_cast<int32_t*>(int32_data(table, like)));
  p.slot_bits = 1;
  while ((1 << p.slot_bits) < p.buffer_size) p.slot_bits++;
  p.home_bits = home_bits_of(p.slot_bits);
  check_size("table rows", table.size(0), p.num_slots);
  check_size("table columns", table.size(1), (int64_t{16} << p.home_bits) + (int64_t{p.buffer_size} + 15) / 16 * 8);
  p.table_stride = row_stride(table);
  TVM_FFI_CHECK(p.table_stride % 8 == 0, ValueError) << "the hot state must come from HotGroupState.allocate: buckets are read whole";
}

inline ResolveParams make_resolve_params(const ResolveTensors& t, int64_t row_bytes, int64_t host_row_bytes, int64_t page_size,
                                         int64_t cluster_blocks, int64_t copy_method, bool translated_pages, bool overlap_launch) {
  const DLDeviceType device = t.top_k.device().device_type == kDLCUDAHost ? kDLCPU : t.top_k.device().device_type;
  const auto expect = [&](const char* name, int ndim) { return Expected{name, ndim, device, t.top_k.device().device_id}; };
  ResolveParams p{};
  p.top_k = int32_data(t.top_k, expect("top_k", 2));
  p.page_rows = int32_data(t.page_rows, expect("page_rows", 2));
  p.wide_seq_lens = index_width(t.seq_lens, expect("seq_lens", 1));
  p.wide_req_slots = index_width(t.req_slots, expect("req_slots", 1));
  p.seq_lens = t.seq_lens.data_ptr();
  p.req_slots = t.req_slots.data_ptr();
  p.num_real_rows = int32_data(t.num_real_rows, expect("num_real_rows", 1));
  p.page_table = int32_data(t.page_table, expect("page_table", 1));
  p.hot_pages = int32_data(t.hot_pages, expect("hot_pages", 2));
  p.tags = const_cast<int32_t*>(int32_data(t.tags, expect("tags", 2)));
  check_place(t.stamps, expect("stamps", 2));
  TVM_FFI_CHECK(t.stamps.dtype().code == kDLUInt && t.stamps.dtype().bits == 8, TypeError) << "stamps must be uint8";
  p.stamps = static_cast<uint8_t*>(t.stamps.data_ptr());
  p.header = const_cast<int32_t*>(int32_data(t.header, expect("header", 2)));
  p.host_bases = int64_data(t.host_bases, expect("host_bases", 1));
  p.device_bases = int64_data(t.device_bases, expect("device_bases", 1));
  p.out = const_cast<int32_t*>(int32_data(t.out, expect("out", 2)));

  const int64_t rows = t.top_k.size(0), k = t.top_k.size(1), slots = t.tags.size(0), buffer = t.tags.size(1);
  p.page_shift = page_shift_of(page_size);
  TVM_FFI_CHECK(rows <= 65535, ValueError) << "at most 65535 rows, not " << rows;
  TVM_FFI_CHECK(k >= 1 && k <= kMaxTopK, ValueError) << "top_k must have 1 to " << kMaxTopK << " entries a row, not " << k;
  TVM_FFI_CHECK(buffer >= k && buffer <= kMaxBufferSize && buffer % page_size == 0, ValueError)
      << "the hot buffer must hold k (" << k << ") to " << kMaxBufferSize << " rows in whole pages of " << page_size << ", not " << buffer;
  TVM_FFI_CHECK(row_bytes > 0 && row_bytes % 16 == 0 && row_bytes <= 65536, ValueError)
      << "row_bytes must be a multiple of 16 up to 65536, not " << row_bytes;
  TVM_FFI_CHECK(host_row_bytes >= row_bytes && host_row_bytes % 16 == 0, ValueError)
      << "host_row_bytes must be a multiple of 16 and at least row_bytes, not " << host_row_bytes;
  const int64_t logical_pages = t.page_table.size(0) - 1;
  TVM_FFI_CHECK(logical_pages >= 0 && ((logical_pages + 1) << p.page_shift) <= int64_t{1} << kLogicalIdBits, ValueError)
      << "page_table covers " << logical_pages << " pages of " << page_size << ": logical ids must fit " << kLogicalIdBits << " bits";
  TVM_FFI_CHECK(t.page_rows.size(0) >= rows, ValueError) << "page_rows has " << t.page_rows.size(0) << " rows, top_k " << rows;
  TVM_FFI_CHECK(t.seq_lens.size(0) >= rows, ValueError) << "seq_lens has " << t.seq_lens.size(0) << " rows, top_k " << rows;
  TVM_FFI_CHECK(t.req_slots.size(0) >= rows, ValueError) << "req_slots has " << t.req_slots.size(0) << " rows, top_k " << rows;
  check_size("num_real_rows", t.num_real_rows.size(0), 1);
  check_size("out rows", t.out.size(0), rows);
  check_size("out columns", t.out.size(1), k);
  check_size("hot_pages rows", t.hot_pages.size(0), slots);
  check_size("hot_pages columns", t.hot_pages.size(1), buffer / page_size);
  check_size("stamps rows", t.stamps.size(0), slots);
  check_size("stamps columns", t.stamps.size(1), buffer);
  check_size("header rows", t.header.size(0), slots);
  check_size("header columns", t.header.size(1), kHeaderColumns);
  check_size("device_bases", t.device_bases.size(0), t.host_bases.size(0));
  const int64_t layers = t.host_bases.size(0);
  TVM_FFI_CHECK(layers >= 1 && layers <= kMaxLayers, ValueError) << "a group has 1 to " << kMaxLayers << " layers, not " << layers;
  TVM_FFI_CHECK(slots >= 1, ValueError) << "the hot state has no request slots";
  TVM_FFI_CHECK(t.out.data_ptr() != t.top_k.data_ptr(), ValueError) << "out must not alias top_k";
  TVM_FFI_CHECK(row_stride(t.header) == kHeaderColumns && row_stride(t.tags) % 4 == 0 && row_stride(t.stamps) % 4 == 0, ValueError)
      << "the hot state must come from HotGroupState.allocate: its rows are read as vectors";
  TVM_FFI_CHECK(cluster_blocks == 0 || cluster_blocks == 1 || cluster_blocks == 2 || cluster_blocks == 4 || cluster_blocks == 8, ValueError)
      << "cluster_blocks must be 0 (automatic), 1, 2, 4 or 8, not " << cluster_blocks;
  TVM_FFI_CHECK(copy_method == kCopyLoads || copy_method == kCopyNone || copy_method == kCopyLookup, ValueError) << "unknown copy method " << copy_method;

  p.top_k_stride = row_stride(t.top_k);
  p.page_rows_stride = row_stride(t.page_rows);
  p.hot_pages_stride = row_stride(t.hot_pages);
  p.tags_stride = row_stride(t.tags);
  p.stamps_stride = row_stride(t.stamps);
  p.out_stride = row_stride(t.out);
  p.host_row_bytes = host_row_bytes;
  p.rows = static_cast<int32_t>(rows);
  p.k = static_cast<int32_t>(k);
  p.max_pages = static_cast<int32_t>(t.page_rows.size(1));
  p.num_logical_pages = static_cast<int32_t>(logical_pages);
  p.num_slots = static_cast<int32_t>(slots);
  p.num_hot_pages = static_cast<int32_t>(t.hot_pages.size(1));
  p.buffer_size = static_cast<int32_t>(buffer);
  p.layers = static_cast<int32_t>(layers);
  p.row_bytes = static_cast<int32_t>(row_bytes);
  p.cluster_blocks = static_cast<int32_t>(cluster_blocks);
  p.copy_method = static_cast<int32_t>(copy_method);
  p.translated_pages = translated_pages;
  p.overlap_launch = overlap_launch;
  add_table(t.table, expect("table", 2), p);
  add_scores(t, expect("", 2), p);
  return p;
}

inline CopyPagesParams make_copy_pages_params(const TensorView& host_bases, const TensorView& device_bases, const TensorView& host_pages,
                                              const TensorView& device_pages, int64_t direction, int64_t page_bytes, int64_t max_blocks) {
  const DLDeviceType device = host_pages.device().device_type == kDLCUDAHost ? kDLCPU : host_pages.device().device_type;
  const auto expect = [&](const char* name) { return Expected{name, 1, device, host_pages.device().device_id}; };
  CopyPagesParams p{};
  p.host_bases = int64_data(host_bases, expect("host_bases"));
  p.device_bases = int64_data(device_bases, expect("device_bases"));
  p.host_pages = int32_data(host_pages, expect("host_pages"));
  p.device_pages = int32_data(device_pages, expect("device_pages"));
  check_size("device_bases", device_bases.size(0), host_bases.size(0));
  check_size("device_pages", device_pages.size(0), host_pages.size(0));
  TVM_FFI_CHECK(page_bytes > 0 && page_bytes % 16 == 0, ValueError) << "page_bytes must be a multiple of 16, not " << page_bytes;
  TVM_FFI_CHECK(max_blocks >= 1 && max_blocks <= 1024, ValueError) << "max_blocks must be 1 to 1024, not " << max_blocks;
  TVM_FFI_CHECK(direction == kToHost || direction == kToDevice, ValueError) << "unknown direction " << direction;
  p.page_bytes = page_bytes;
  p.pages = static_cast<int32_t>(host_pages.size(0));
  p.layers = static_cast<int32_t>(host_bases.size(0));
  p.direction = static_cast<int32_t>(direction);
  p.max_blocks = static_cast<int32_t>(max_blocks);
  return p;
}

inline GatherRowsParams make_gather_rows_params(const TensorView& host_bases, const TensorView& device_bases, const TensorView& host_rows,
                                                const TensorView& device_rows, int64_t row_bytes, int64_t host_row_bytes,
                                                int64_t max_blocks) {
  const DLDeviceType device = host_rows.device().device_type == kDLCUDAHost ? kDLCPU : host_rows.device().device_type;
  const auto expect = [&](const char* name) { return Expected{name, 1, device, host_rows.device().device_id}; };
  GatherRowsParams p{};
  p.host_bases = int64_data(host_bases, expect("host_bases"));
  p.device_bases = int64_data(device_bases, expect("device_bases"));
  p.host_rows = int32_data(host_rows, expect("host_rows"));
  p.device_rows = int32_data(device_rows, expect("device_rows"));
  check_size("device_bases", device_bases.size(0), host_bases.size(0));
  check_size("device_rows", device_rows.size(0), host_rows.size(0));
  TVM_FFI_CHECK(row_bytes > 0 && row_bytes % 16 == 0, ValueError) << "row_bytes must be a multiple of 16, not " << row_bytes;
  TVM_FFI_CHECK(host_row_bytes >= row_bytes && host_row_bytes % 16 == 0, ValueError)
      << "host_row_bytes must be a multiple of 16 and at least row_bytes, not " << host_row_bytes;
  TVM_FFI_CHECK(max_blocks >= 1 && max_blocks <= 1024, ValueError) << "max_blocks must be 1 to 1024, not " << max_blocks;
  TVM_FFI_CHECK(host_rows.size(0) * host_bases.size(0) <= INT32_MAX, ValueError) << "too many rows";
  p.host_row_bytes = host_row_bytes;
  p.rows = static_cast<int32_t>(host_rows.size(0));
  p.layers = static_cast<int32_t>(host_bases.size(0));
  p.row_bytes = static_cast<int32_t>(row_bytes);
  p.max_blocks = static_cast<int32_t>(max_blocks);
  return p;
}

struct UnionFetchTensors {
  TensorView ids, table, host_base, scratch_base, marks, fetched;
};

inline UnionFetchParams make_union_fetch_params(const UnionFetchTensors& t, int64_t host_places, int64_t row_bytes, int64_t page_size) {
  const DLDeviceType device = t.ids.device().device_type == kDLCUDAHost ? kDLCPU : t.ids.device().device_type;
  const auto expect = [&](const char* name) { return Expected{name, 1, device, t.ids.device().device_id}; };
  UnionFetchParams p{};
  p.ids = int32_data(t.ids, expect("ids"));
  p.table = int32_data(t.table, expect("table"));
  p.host_base = int64_data(t.host_base, expect("host_base"));
  p.scratch_base = int64_data(t.scratch_base, expect("scratch_base"));
  p.marks = reinterpret_cast<uint32_t*>(const_cast<int32_t*>(int32_data(t.marks, expect("marks"))));
  p.fetched = const_cast<int64_t*>(int64_data(t.fetched, expect("fetched")));
  p.page_shift = page_shift_of(page_size);
  check_size("host_base", t.host_base.size(0), 1);
  check_size("scratch_base", t.scratch_base.size(0), 1);
  check_size("fetched", t.fetched.size(0), 1);
  TVM_FFI_CHECK(t.table.size(0) >= 1, ValueError) << "table must hold at least the pad page";
  TVM_FFI_CHECK(host_places >= 0 && (host_places + 1) * page_size <= t.marks.size(0) * 32, ValueError)
      << "marks has bits for " << t.marks.size(0) * 32 << " rows, " << host_places << " host-only pages need more";
  TVM_FFI_CHECK(row_bytes > 0 && row_bytes % 16 == 0 && row_bytes <= 65536, ValueError)
      << "row_bytes must be a multiple of 16 up to 65536, not " << row_bytes;
  p.count = t.ids.size(0);
  p.num_logical_pages = static_cast<int32_t>(t.table.size(0) - 1);
  p.host_places = static_cast<int32_t>(host_places);
  p.row_bytes = static_cast<int32_t>(row_bytes);
  return p;
}

struct AuditTensors {
  TensorView rows, top_k, page_rows, seq_lens, num_real_rows, page_table, host_bases, device_bases, counts;
};

inline AuditParams make_audit_params(const AuditTensors& t, int64_t row_bytes, int64_t page_size) {
  const DLDeviceType device = t.top_k.device().device_type == kDLCUDAHost ? kDLCPU : t.top_k.device().device_type;
  const auto expect = [&](const char* name, int ndim) { return Expected{name, ndim, device, t.top_k.device().device_id}; };
  AuditParams p{};
  p.rows = int32_data(t.rows, expect("rows", 2));
  p.top_k = int32_data(t.top_k, expect("top_k", 2));
  p.page_rows = int32_data(t.page_rows, expect("page_rows", 2));
  p.wide_seq_lens = index_width(t.seq_lens, expect("seq_lens", 1));
  p.seq_lens = t.seq_lens.data_ptr();
  p.num_real_rows = int32_data(t.num_real_rows, expect("num_real_rows", 1));
  p.page_table = int32_data(t.page_table, expect("page_table", 1));
  p.host_bases = int64_data(t.host_bases, expect("host_bases", 1));
  p.device_bases = int64_data(t.device_bases, expect("device_bases", 1));
  p.counts = const_cast<int64_t*>(int64_data(t.counts, expect("counts", 1)));
  check_size("rows", t.rows.size(0), t.top_k.size(0));
  check_size("rows columns", t.rows.size(1), t.top_k.size(1));
  check_size("num_real_rows", t.num_real_rows.size(0), 1);
  check_size("device_bases", t.device_bases.size(0), t.host_bases.size(0));
  check_size("counts", t.counts.size(0), 2);
  TVM_FFI_CHECK(t.page_rows.size(0) >= t.top_k.size(0) && t.seq_lens.size(0) >= t.top_k.size(0), ValueError)
      << "page_rows and seq_lens need as many rows as top_k";
  TVM_FFI_CHECK(row_bytes > 0 && row_bytes % 16 == 0, ValueError) << "row_bytes must be a multiple of 16, not " << row_bytes;
  TVM_FFI_CHECK(t.page_table.size(0) >= 1, ValueError) << "page_table must hold at least the pad page";
  p.rows_stride = row_stride(t.rows);
  p.top_k_stride = row_stride(t.top_k);
  p.page_rows_stride = row_stride(t.page_rows);
  p.num_rows = static_cast<int32_t>(t.top_k.size(0));
  p.k = static_cast<int32_t>(t.top_k.size(1));
  p.max_pages = static_cast<int32_t>(t.page_rows.size(1));
  p.num_logical_pages = static_cast<int32_t>(t.page_table.size(0) - 1);
  p.layers = static_cast<int32_t>(t.host_bases.size(0));
  p.row_bytes = static_cast<int32_t>(row_bytes);
  p.page_shift = page_shift_of(page_size);
  return p;
}

// `out` is host memory that the device can write to.
inline SumCountersParams make_sum_counters_params(const TensorView& header, const TensorView& group_layers, const TensorView& out) {
  const DLDeviceType device = header.device().device_type == kDLCUDAHost ? kDLCPU : header.device().device_type;
  const auto expect = [&](const char* name, int ndim) { return Expected{name, ndim, device, header.device().device_id}; };
  SumCountersParams p{};
  p.header = int32_data(header, expect("header", 3));
  p.group_layers = int32_data(group_layers, expect("group_layers", 1));
  p.out = const_cast<int32_t*>(int32_data(out, Expected{"out", 2, kDLCPU, 0}));
  check_size("header columns", header.size(2), kHeaderColumns);
  TVM_FFI_CHECK(header.size(1) >= 1 && header.size(1) < INT32_MAX / 32 && header.IsContiguous(), ValueError)
      << "header must be contiguous and have at least one request slot";
  check_size("group_layers", group_layers.size(0), header.size(0));
  check_size("out rows", out.size(0), header.size(1));
  check_size("out columns", out.size(1), kSummedColumns);
  TVM_FFI_CHECK(out.IsContiguous(), ValueError) << "out must be contiguous";
  p.groups = static_cast<int32_t>(header.size(0));
  p.num_slots = static_cast<int32_t>(header.size(1));
  return p;
}

inline TranslatePagesParams make_translate_pages_params(const TensorView& page_rows, const TensorView& page_table, const TensorView& out) {
  const DLDeviceType device = page_rows.device().device_type == kDLCUDAHost ? kDLCPU : page_rows.device().device_type;
  const auto expect = [&](const char* name, int ndim) { return Expected{name, ndim, device, page_rows.device().device_id}; };
  TranslatePagesParams p{};
  p.page_rows = int32_data(page_rows, expect("page_rows", 2));
  p.page_table = int32_data(page_table, expect("page_table", 1));
  p.out = const_cast<int32_t*>(int32_data(out, expect("out", 2)));
  TVM_FFI_CHECK(page_table.size(0) >= 1, ValueError) << "page_table must hold at least the pad page";
  TVM_FFI_CHECK(out.size(0) >= page_rows.size(0) && out.size(1) >= page_rows.size(1), ValueError) << "out is smaller than page_rows";
  TVM_FFI_CHECK(page_rows.size(0) <= 65535, ValueError) << "at most 65535 rows, not " << page_rows.size(0);
  p.page_rows_stride = row_stride(page_rows);
  p.out_stride = row_stride(out);
  p.rows = static_cast<int32_t>(page_rows.size(0));
  p.max_pages = static_cast<int32_t>(page_rows.size(1));
  p.num_logical_pages = static_cast<int32_t>(page_table.size(0) - 1);
  return p;
}

// ids and out are flat.
inline TranslateParams make_translate_params(const TensorView& ids, const TensorView& page_table, const TensorView& out, int64_t page_size,
                                             int64_t missing) {
  const DLDeviceType device = ids.device().device_type == kDLCUDAHost ? kDLCPU : ids.device().device_type;
  const auto expect = [&](const char* name) { return Expected{name, 1, device, ids.device().device_id}; };
  TranslateParams p{};
  p.wide_ids = index_width(ids, expect("ids"));
  p.wide_out = index_width(out, expect("out"));
  p.ids = ids.data_ptr();
  p.page_table = int32_data(page_table, expect("page_table"));
  p.out = out.data_ptr();
  check_size("out", out.size(0), ids.size(0));
  TVM_FFI_CHECK(page_table.size(0) >= 1, ValueError) << "page_table must hold at least the pad page";
  p.count = ids.size(0);
  p.num_logical_pages = static_cast<int32_t>(page_table.size(0) - 1);
  p.page_shift = page_shift_of(page_size);
  p.missing = static_cast<int32_t>(missing);
  return p;
}

}  // namespace hisparse
