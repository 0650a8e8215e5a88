// One plain struct per launch: the whole contract between the checks (checks.h), the CUDA kernels and the CPU library.
// Every pointer carries its shape; "rows" are batch rows of this step, "slot" is an entry of a hot buffer.
#pragma once
#include <cstdint>

namespace hisparse {

constexpr int kMaxTopK = 2048;         // entries of one row
constexpr int kMaxBufferSize = 32768;  // an entry of the slot table has 15 bits for a slot, the other 17 for what its place leaves open
constexpr int kLogicalIdBits = 29;
constexpr int kMaxLayers = 64;
constexpr int kMaxRequestPages = 65536;  // where slot_pages are kept, which are 16 bits wide

// Columns of the header, int32 [num_slots, 32] (one 128-byte line per request slot and index group).
enum HeaderColumn : int {
  kLeaseGeneration = 0,  // written by HotGroupState.reset: a change makes every tag empty
  kStateGeneration = 1,  // lease generation that the tags belong to; written by the resolver
  kClock = 2,            // fetched rows + kClockPerStep per step that looked at the hot buffer, modulo 2^32
  kFilledSlots = 3,      // slots below it hold a row, as long as the two generations agree; the others are empty
  kResidentEntries = 4,  // top-k entries answered from a resident page
  kHotEntries = 5,       // entries answered from the hot buffer, repeats of a fetched row included
  kFetchedRows = 6,      // distinct rows copied from the host
  kErrorEntries = 7,     // entries that no valid input produces; each was answered with -1
  kHeaderColumns = 32,
};

// Replacement ages: stamp = clock / max(1, buffer_size / kAgeUnits) modulo 256, age = now - stamp modulo 256.
// A row that is not used leaves within buffer_size fetches, which is kAgeUnits units, so 8 bits do not alias in practice.
constexpr int kAgeUnits = 64;
constexpr int kClockPerStep = 8;

struct ResolveParams {
  const int32_t* top_k;          // [rows, k] positions, -1 = hole
  const int32_t* page_rows;      // [rows, max_pages] logical page numbers of the row's request, or translated_pages
  const void* seq_lens;          // [rows] int32, or int64 if wide_seq_lens
  const void* req_slots;         // [rows] int32, or int64 if wide_req_slots
  const int32_t* num_real_rows;  // [1] rows at or beyond it are padding
  const int32_t* page_table;     // [num_logical_pages + 1] device page, 0 = host only
  const int32_t* hot_pages;      // [num_slots, num_hot_pages] device pages of the lease; first entry 0 = no lease
  int32_t* tags;                 // [num_slots, buffer_size] logical id held by a slot, -1 = empty; rows start 16-byte aligned
  uint8_t* stamps;               // [num_slots, buffer_size] stamp of last use; rows start 16-byte aligned
  int32_t* header;               // [num_slots, kHeaderColumns]
  uint32_t* table;               // [num_slots, 16 << home_bits, then 2 bytes a slot] logical id -> slot (slot_table.cuh); unused by the CPU library
  uint16_t* slot_pages;          // [num_slots, buffer_size] position / page_size of the row a slot holds; null: nobody asks
  const float* scores;           // [score_rows, score_columns] by position, the indexer's own of this step; null: LRU
  const int64_t* host_bases;     // [layers] address of host row 0 of each layer of the group
  const int64_t* device_bases;   // [layers] address of device row 0 of each layer of the group
  int32_t* out;                  // [rows, k] device row or -1; never aliases top_k
  int64_t top_k_stride;          // in elements, as are the strides below
  int64_t page_rows_stride;
  int64_t hot_pages_stride;
  int64_t tags_stride;
  int64_t stamps_stride;
  int64_t table_stride;
  int64_t slot_pages_stride;
  int64_t scores_stride;
  int64_t out_stride;
  int64_t host_row_bytes;  // distance between host rows (>= row_bytes, a multiple of 16)
  int32_t rows, k, max_pages;
  int32_t num_logical_pages, num_slots, num_hot_pages, buffer_size;
  int32_t layers, row_bytes;  // row_bytes is a multiple of 16
  int32_t page_shift;         // page_size == 1 << page_shift
  int32_t slot_bits, home_bits;  // of slot numbers, and of buckets in one half of the slot table
  int32_t score_rows, score_columns;
  int32_t wide_seq_lens, wide_req_slots;
  int32_t cluster_blocks;  // blocks that share one row: 1, 2, 4 or 8; 0 lets the launcher choose
  int32_t copy_method;     // CopyMethod
  int32_t translated_pages;  // page_rows come from translate_pages: device page, or minus a host-only logical page
  int32_t overlap_launch;    // start before the kernel ahead has ended (programmatic dependent launch) and wait for it inside
};

enum CopyMethod : int {
  kCopyLoads = 0,   // plain 16-byte loads, several in flight per thread
  kCopyNone = 2,    // no copy at all: a measurement of everything else, wrong bytes
  kCopyLookup = 3,  // neither copy nor replacement: a measurement of the lookup, misses stay unanswered
};

enum CopyDirection : int { kToHost = 0, kToDevice = 1 };

struct CopyPagesParams {
  const int64_t* host_bases;    // [layers] address of host page 0
  const int64_t* device_bases;  // [layers] address of device page 0
  const int32_t* host_pages;    // [pages]
  const int32_t* device_pages;  // [pages]
  int64_t page_bytes;           // multiple of 16, the same on both sides
  int32_t pages, layers, direction, max_blocks;
};

struct GatherRowsParams {
  const int64_t* host_bases;    // [layers] address of host row 0
  const int64_t* device_bases;  // [layers] address of device row 0
  const int32_t* host_rows;     // [rows]
  const int32_t* device_rows;   // [rows]
  int64_t host_row_bytes;
  int32_t rows, layers, row_bytes, max_blocks;
};

struct UnionFetchParams {
  const int32_t* ids;           // [count] logical ids, -1: none
  const int32_t* table;         // [num_logical_pages + 1] page of the scratch, 0: none
  const int64_t* host_base;     // [1] address of host row 0 of the layer
  const int64_t* scratch_base;  // [1] address of row 0 of its half
  uint32_t* marks;              // one bit a row of the scratch: it has been copied
  int64_t* fetched;             // [1] rows copied; added to
  int64_t count;
  int32_t num_logical_pages, host_places, row_bytes, page_shift;  // host_places: pages 1 to that of the scratch are host-only
};

struct AuditParams {
  const int32_t* rows;           // [num_rows, k] answers of the resolver
  const int32_t* top_k;          // the rest as in ResolveParams
  const int32_t* page_rows;
  const void* seq_lens;
  const int32_t* num_real_rows;
  const int32_t* page_table;
  const int64_t* host_bases;
  const int64_t* device_bases;
  int64_t* counts;  // [2] entries audited, entries that differ from their home; added to
  int64_t rows_stride, top_k_stride, page_rows_stride;
  int32_t num_rows, k, max_pages, num_logical_pages, layers, row_bytes, page_shift, wide_seq_lens;
};

constexpr int kSummedColumns = 5;  // the four counters of a header, and fetched rows times the layers of their group

struct SumCountersParams {
  const int32_t* header;        // [groups, num_slots, kHeaderColumns]
  const int32_t* group_layers;  // [groups]
  int32_t* out;                 // [num_slots, kSummedColumns] modulo 2^32, in pinned host memory
  int32_t groups, num_slots;
};

struct TranslatePagesParams {
  const int32_t* page_rows;   // [rows, max_pages] logical pages
  const int32_t* page_table;  // [num_logical_pages + 1]
  int32_t* out;               // [rows, max_pages] device page, minus the logical page if host-only, 0 if there is none
  int64_t page_rows_stride, out_stride;
  int32_t rows, max_pages, num_logical_pages;
};

struct TranslateParams {
  const void* ids;            // [count] logical ids, int32, or int64 if wide_ids
  const int32_t* page_table;  // [num_logical_pages + 1]
  void* out;                  // [count] int32, or int64 if wide_out
  int64_t count;
  int32_t num_logical_pages, page_shift, wide_ids, wide_out;
  int32_t missing;  // what an id without a device row becomes: -1 for readers, row 0 of the pad page for writers
};

}  // namespace hisparse
