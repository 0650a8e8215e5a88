// The lookup table of one step, in shared memory: which wanted host row is held by which hot slot, or fetched as which miss.
// Open addressing over the rows that the step wants, not over what the buffer holds: its size follows k alone, and repeated
// entries meet in one place. The layout may differ from run to run (threads race for places), the answers cannot.
#pragma once
#include "rows.cuh"

namespace hisparse {

constexpr uint32_t kFullMask = 0xffffffffu;
constexpr int kEntriesPerThread = kMaxTopK / kThreads;
constexpr uint32_t kVacant = 0xffffffffu;  // no host row has this number: they fit 31 bits
constexpr uint32_t kUnresolved = 0xffffu;  // answer: neither a slot nor a rank yet
constexpr uint32_t kRankBit = 0x8000u;     // answer: a miss rank rather than a slot
constexpr int kHistogramBins = 96;         // three per lane of a warp

struct Counts {
  int32_t distinct, found;  // wanted rows, and how many of them a hot slot holds
};

// Dynamic shared memory of one block, in this order; resolver_shared_bytes is its size.
struct Shared {
  uint32_t* keys;         // [1 << table_bits] host row; after matching, kFirstBit | code of the first entry of a miss
  int32_t* miss_row;      // [k] miss rank -> host row
  int32_t* hot_pages;     // [num_hot_pages]
  uint32_t* histogram;    // [kHistogramBins] slots per victim order
  uint32_t* warp_sums;    // [2 * kWarps]
  uint32_t* warp_counts;  // [kWarps] resident | errors << 16
  Counts* counts;
  uint16_t* answer;  // [1 << table_bits] kUnresolved, a slot, or kRankBit | miss rank; valid where a key is
  uint16_t* victim;  // [k] miss rank -> slot
  char* ring;        // bulk copies only
};

inline int table_bits_for(int k) {
  int bits = 7;
  while ((1 << bits) < 4 * k) bits++;  // load at most one quarter: a warp pays for its worst lane
  return bits;
}

__host__ __device__ __forceinline__ int64_t align_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

__host__ __device__ __forceinline__ int64_t resolver_shared_bytes(int k, int num_hot_pages, int table_bits) {
  const int64_t words = (int64_t{1} << table_bits) + k + num_hot_pages + kHistogramBins + 3 * kWarps;
  return align_up(4 * words + static_cast<int64_t>(sizeof(Counts)) + 2 * ((int64_t{1} << table_bits) + k), 128);
}

__device__ __forceinline__ Shared carve(char* memory, int k, int num_hot_pages, int table_bits) {
  Shared s;
  s.keys = reinterpret_cast<uint32_t*>(memory);
  s.miss_row = reinterpret_cast<int32_t*>(s.keys + (1 << table_bits));
  s.hot_pages = s.miss_row + k;
  s.histogram = reinterpret_cast<uint32_t*>(s.hot_pages + num_hot_pages);
  s.warp_sums = s.histogram + kHistogramBins;
  s.warp_counts = s.warp_sums + 2 * kWarps;
  s.counts = reinterpret_cast<Counts*>(s.warp_counts + kWarps);
  s.answer = reinterpret_cast<uint16_t*>(s.counts + 1);
  s.victim = s.answer + (1 << table_bits);
  s.ring = memory + resolver_shared_bytes(k, num_hot_pages, table_bits);
  return s;
}

__device__ __forceinline__ void clear_table(const Shared& s, int table_bits) {
  for (int i = static_cast<int>(threadIdx.x); i < (1 << table_bits) / 4; i += kThreads)
    reinterpret_cast<uint4*>(s.keys)[i] = make_uint4(kVacant, kVacant, kVacant, kVacant);
  if (threadIdx.x < kHistogramBins) s.histogram[threadIdx.x] = 0;
  if (threadIdx.x == 0) *s.counts = {0, 0};
}

__device__ __forceinline__ uint32_t table_home(uint32_t host_row, int table_bits) {
  return (host_row * 2654435769u) >> (32 - table_bits);
}

// What one thread knows of its entries: entry u is index u * kThreads + threadIdx.x.
struct Entries {
  int32_t position[kEntriesPerThread];
  int32_t page[kEntriesPerThread];      // logical page, or 0
  int32_t row[kEntriesPerThread];       // device row once known, else -1
  int32_t host_row[kEntriesPerThread];  // wanted from the hot buffer, or -1
  int32_t place[kEntriesPerThread];     // its place in the lookup table, where host_row >= 0
};

__device__ __forceinline__ int entry_index(int u) { return u * kThreads + static_cast<int>(threadIdx.x); }

__device__ __forceinline__ void load_positions(const ResolveParams& p, int32_t row, Entries& e) {
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++) {
    const int i = entry_index(u);
    e.position[u] = i < p.k ? p.top_k[row * p.top_k_stride + i] : -1;
  }
}

// The step's page word of each entry: a logical page or, from translate_pages, a device page or minus a logical page.
__device__ __forceinline__ void load_pages(const ResolveParams& p, int32_t row, int64_t seq_len, Entries& e) {
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++) {
    const int page = e.position[u] >> p.page_shift;
    const bool valid = e.position[u] >= 0 && e.position[u] < seq_len && page < p.max_pages;
    e.page[u] = valid ? p.page_rows[row * p.page_rows_stride + page] : 0;
  }
}

// Answers resident entries and finds the host rows of wanted ones. Returns resident | errors << 16.
__device__ __forceinline__ uint32_t classify(const ResolveParams& p, bool has_lease, Entries& e) {
  int32_t device[kEntriesPerThread];
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++) {
    if (p.translated_pages) {
      device[u] = e.page[u] == 0 ? -1 : max(e.page[u], 0);
      e.page[u] = max(-e.page[u], 0);
    } else {
      const bool valid = e.page[u] > 0 && e.page[u] <= p.num_logical_pages;
      device[u] = valid ? p.page_table[e.page[u]] : -1;
    }
  }
  uint32_t counted = 0;
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++) {
    const int32_t offset = e.position[u] & ((1 << p.page_shift) - 1);
    e.row[u] = device[u] > 0 ? (device[u] << p.page_shift) | offset : -1;
    e.host_row[u] = device[u] == 0 && has_lease ? (e.page[u] << p.page_shift) | offset : -1;
    if (e.row[u] >= 0)
      counted += 1;
    else if (e.host_row[u] < 0 && e.position[u] >= 0)
      counted += 1u << 16;
  }
  return counted;
}

// Enters the wanted rows; returns how many of them were new.
__device__ __forceinline__ int insert_wanted(int table_bits, const Shared& s, Entries& e) {
  const uint32_t mask = (1u << table_bits) - 1;
  uint32_t place[kEntriesPerThread], other[kEntriesPerThread];
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++) {
    const uint32_t host_row = static_cast<uint32_t>(e.host_row[u]);
    place[u] = table_home(host_row, table_bits);
    other[u] = e.host_row[u] >= 0 ? atomicCAS(&s.keys[place[u]], kVacant, host_row) : host_row;
  }
  int inserted = 0;
#pragma unroll
  for (int u = 0; u < kEntriesPerThread; u++) {
    const uint32_t host_row = static_cast<uint32_t>(e.host_row[u]);
    while (other[u] != kVacant && other[u] != host_row) {
      place[u] = (place[u] + 1) & mask;
      other[u] = atomicCAS(&s.keys[place[u]], kVacant, host_row);
    }
    if (e.host_row[u] < 0) continue;
    inserted += other[u] == kVacant;
    s.answer[place[u]] = static_cast<uint16_t>(kUnresolved);
    e.place[u] = static_cast<int32_t>(place[u]);
  }
  return inserted;
}

// Looks up the host rows of four neighbouring slots and publishes each hit. Returns one bit per hit.
__device__ __forceinline__ uint32_t match_four(const uint32_t (&tag)[4], int first_slot, int table_bits, const Shared& s) {
  const uint32_t mask = (1u << table_bits) - 1;
  uint32_t place[4], key[4], found = 0, pending = 0;
#pragma unroll
  for (int b = 0; b < 4; b++) {
    place[b] = table_home(tag[b], table_bits);
    key[b] = s.keys[place[b]];
  }
#pragma unroll
  for (int b = 0; b < 4; b++) {
    if (tag[b] == kVacant || key[b] == kVacant) continue;
    if (key[b] == tag[b]) {
      s.answer[place[b]] = static_cast<uint16_t>(first_slot + b);
      found |= 1u << b;
    } else {
      pending |= 1u << b;
    }
  }
  // Few rows need a second look: all of a thread's together, so that a warp pays for its worst thread once.
  const auto select = [&](int b) { return b == 0 ? tag[0] : b == 1 ? tag[1] : b == 2 ? tag[2] : tag[3]; };
  int b = __ffs(static_cast<int>(pending)) - 1;
  uint32_t want = select(b), at = table_home(want, table_bits);
  while (pending) {
    at = (at + 1) & mask;
    const uint32_t other = s.keys[at];
    if (other == want) {
      s.answer[at] = static_cast<uint16_t>(first_slot + b);
      found |= 1u << b;
    }
    if (other == want || other == kVacant) {
      pending &= pending - 1;
      b = __ffs(static_cast<int>(pending)) - 1;
      want = select(b);
      at = table_home(want, table_bits);
    }
  }
  return found;
}

// Of equal misses the smallest entry counts. Keys have served once slots are matched; this code exceeds every host row, and
// the smallest entry has the largest code.
__device__ __forceinline__ uint32_t first_code(int entry) { return 0x80000000u | static_cast<uint32_t>(kMaxTopK - entry); }

}  // namespace hisparse
