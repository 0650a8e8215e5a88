// What one row of a step wants and what a block keeps of it: entries in registers, the whole row in shared memory.
#pragma once
#include "rows.cuh"

namespace hisparse {

constexpr uint32_t kFullMask = 0xffffffffu;
constexpr int kResolveThreads = 512;  // two blocks to a multiprocessor, so that no cluster waits for a place
constexpr int kResolveWarps = kResolveThreads / 32;
constexpr int kScans = kMaxTopK / kResolveThreads;  // entries that a thread looks at when a block goes through the whole row
constexpr int kPieces = kMaxTopK / 32;
constexpr int kHistogramBins = 96;                  // three per lane of a warp

// Words that blocks tell each other, one an entry: a host row is a miss, below 2^31; the others have the top bit.
constexpr uint32_t kNothing = 0xffffffffu;  // not asked of the hot buffer
constexpr uint32_t kHit = 0x80000000u;      // | slot
// After ranking, of a miss: rank, and whether an earlier entry fetches the row.
constexpr uint32_t kRanked = 0xc0000000u;
constexpr uint32_t kRepeats = 0x20000000u;
constexpr uint32_t kRankMask = 0xffffu;

// Of 32 neighbouring entries, a bit each: which are misses, and which were asked of the hot buffer at all.
struct PieceSummary {
  uint32_t missing, wanted;
};

struct Counts {
  int32_t duplicates;  // whether some miss occurs twice
  int32_t next_row;    // ticket of the rows still to be copied
};

// What depends on k alone, at the size of the largest k: every address in it is a constant.
struct RowMemory {
  uint32_t words[kMaxTopK];               // what every entry of the row found; misses: kRanked | kRepeats | rank after ranking
  uint32_t keys[2 * kMaxTopK];            // host rows of misses, to find repeats; 1 << table_bits are in use
  int32_t miss_row[kMaxTopK];             // miss rank -> host row
  uint32_t histogram[kHistogramBins];     // slots per victim order
  PieceSummary pieces[kPieces];           // of every 32 entries
  uint32_t sums[kPieces];                 // misses | still to be copied << 16, per 32 entries, where misses repeat
  uint32_t warp_sums[32];
  int4 head;                                   // of the header, as the step found it
  Counts counts;
  uint64_t arrived[1];                         // barrier of the words
  int64_t first_host_base, first_device_base;  // of the group's leader
  uint16_t victim[kMaxTopK];                   // miss rank -> slot; before that entry -> place of a miss among the keys
  uint16_t miss_entry[kMaxTopK];               // miss rank -> entry
  uint16_t left[kMaxTopK];                     // misses whose first piece was not sent for at once
};

// Dynamic shared memory of one block; resolver_shared_bytes is its size.
struct Shared {
  RowMemory* row;
  uint32_t* used;      // [buffer_size / 32] bit per hot slot that this step reads, where scores decide
  uint32_t* orders;    // [skewed_words(buffer_size)] stamps, then victim orders, one byte a slot
  int32_t* hot_pages;  // [num_hot_pages]
};

inline int table_bits_for(int k) {
  int bits = 7;
  while ((1 << bits) < 2 * k) bits++;
  return bits;
}

__host__ __device__ constexpr int used_words(int buffer_size) { return (buffer_size + 127) / 128 * 4; }
__host__ __device__ constexpr int order_words(int buffer_size) { return (buffer_size + 15) / 16 * 4; }
__host__ __device__ constexpr int skewed_words(int buffer_size) { return order_words(buffer_size) + (order_words(buffer_size) / 32 + 4) / 4 * 4; }

constexpr int64_t resolver_shared_bytes(int buffer_size, int num_hot_pages) {
  const int64_t words = int64_t{used_words(buffer_size)} + skewed_words(buffer_size) + num_hot_pages;
  return static_cast<int64_t>(sizeof(RowMemory)) + 4 * words;
}

__device__ __forceinline__ Shared carve(char* memory, int buffer_size) {
  auto* used = reinterpret_cast<uint32_t*>(memory + sizeof(RowMemory));
  uint32_t* orders = used + used_words(buffer_size);
  return {reinterpret_cast<RowMemory*>(memory), used, orders, reinterpret_cast<int32_t*>(orders + skewed_words(buffer_size))};
}
static_assert(sizeof(RowMemory) % 16 == 0);

template <bool kScores>
__device__ __forceinline__ void clear_shared(const Shared& s, int buffer_size, int table_bits) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int i = thread; i < (1 << table_bits) / 4; i += kResolveThreads)
    reinterpret_cast<uint4*>(s.row->keys)[i] = make_uint4(kNothing, kNothing, kNothing, kNothing);
#pragma unroll 1
  for (int i = thread; kScores && i < used_words(buffer_size); i += kResolveThreads) s.used[i] = 0;
  if (thread < kHistogramBins) s.row->histogram[thread] = 0;
  if (thread == 0) s.row->counts = {0, 0};
}

// What one thread knows of its entries. The blocks of a row share its entries out in pieces of 32.
template <int kBlocks>
struct Entries {
  static constexpr int kCount = (kMaxTopK + kBlocks * kResolveThreads - 1) / (kBlocks * kResolveThreads);
  int32_t position[kCount];
  int32_t row[kCount];    // device row once known, else -1
  uint32_t word[kCount];  // what the other blocks are told: kNothing, the host row of a miss, or kHit | slot

  static __device__ __forceinline__ int piece(int u, int block) {
    return (u * kResolveWarps + static_cast<int>(threadIdx.x) / 32) * kBlocks + block;
  }
  static __device__ __forceinline__ int index(int u, int block) { return piece(u, block) * 32 + (static_cast<int>(threadIdx.x) & 31); }
};

template <int kBlocks>
__device__ __forceinline__ void load_positions(const ResolveParams& p, int32_t row, int block, Entries<kBlocks>& e) {
#pragma unroll
  for (int u = 0; u < e.kCount; u++) {
    const int i = e.index(u, block);
    e.position[u] = i < p.k ? p.top_k[row * p.top_k_stride + i] : -1;
  }
}

// The step's page word of each entry: a logical page or, from translate_pages, a device page or minus a logical page.
template <int kBlocks>
__device__ __forceinline__ void load_pages(const ResolveParams& p, int32_t row, int64_t seq_len, const Entries<kBlocks>& e,
                                           int32_t (&page)[Entries<kBlocks>::kCount]) {
#pragma unroll
  for (int u = 0; u < e.kCount; u++) {
    const int at = e.position[u] >> p.page_shift;
    const bool valid = e.position[u] >= 0 && e.position[u] < seq_len && at < p.max_pages;
    page[u] = valid ? p.page_rows[row * p.page_rows_stride + at] : 0;
  }
}

// Answers resident entries, takes wanted ones for misses first, and counts for the whole warp: resident | errors << 16.
template <int kBlocks>
__device__ __forceinline__ uint32_t classify(const ResolveParams& p, bool has_lease, int32_t (&page)[Entries<kBlocks>::kCount],
                                             Entries<kBlocks>& e) {
  int32_t device[e.kCount];
#pragma unroll
  for (int u = 0; u < e.kCount; u++) {
    if (p.translated_pages) {
      device[u] = page[u] == 0 ? -1 : max(page[u], 0);
      page[u] = max(-page[u], 0);
    } else {
      const bool valid = page[u] > 0 && page[u] <= p.num_logical_pages;
      device[u] = valid ? p.page_table[page[u]] : -1;
    }
  }
  uint32_t counted = 0;
#pragma unroll
  for (int u = 0; u < e.kCount; u++) {
    const int32_t offset = e.position[u] & ((1 << p.page_shift) - 1);
    e.row[u] = device[u] > 0 ? (device[u] << p.page_shift) | offset : -1;
    e.word[u] = device[u] == 0 && has_lease ? static_cast<uint32_t>((page[u] << p.page_shift) | offset) : kNothing;
    counted += __popc(__ballot_sync(kFullMask, e.row[u] >= 0));
    counted += __popc(__ballot_sync(kFullMask, e.row[u] < 0 && e.word[u] == kNothing && e.position[u] >= 0)) << 16;
  }
  return counted;
}

// Enters the host row of a miss at its first place; returns what was there, for settle_place.
__device__ __forceinline__ uint32_t enter_miss(uint32_t host_row, int table_bits, const Shared& s) {
  return atomicCAS(&s.row->keys[(host_row * 2654435769u) >> (32 - table_bits)], kNothing, host_row);
}

// Goes on to the next places if another row was there. Returns the place, and whether the row was entered before.
__device__ __forceinline__ int settle_place(uint32_t host_row, uint32_t other, int table_bits, const Shared& s, bool& repeated) {
  const uint32_t mask = (1u << table_bits) - 1;
  uint32_t place = (host_row * 2654435769u) >> (32 - table_bits);
  while (other != kNothing && other != host_row) {
    place = (place + 1) & mask;
    other = atomicCAS(&s.row->keys[place], kNothing, host_row);
  }
  repeated = other == host_row;
  return static_cast<int>(place);
}

// Of equal misses the smallest entry counts. It has the largest code, and every code exceeds every host row.
__device__ __forceinline__ uint32_t first_code(int entry) { return 0x80000000u | static_cast<uint32_t>(kMaxTopK - entry); }

}  // namespace hisparse
