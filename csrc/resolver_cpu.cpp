// The contract of the CUDA library on a CPU, row by row, for replay and tests: needs a C++ compiler only.
// It follows the same rules for ranks, ages and victims, so both libraries give the same numbers for the same inputs;
// it shares no code with the kernels beyond params.h and the argument checks.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checks.h"

namespace hisparse {
namespace {

int64_t index_at(const void* values, int64_t i, bool wide) {
  return wide ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
}

enum class Kind { kHole, kError, kResident, kHostOnly };

class RowResolver {
 public:
  RowResolver(const ResolveParams& p, int64_t row) : p_(p), row_(row), out_(p.out + row * p.out_stride) {}

  void run() {
    std::fill(out_, out_ + p_.k, -1);
    if (row_ >= *p_.num_real_rows) return;
    const int64_t slot = index_at(p_.req_slots, row_, p_.wide_req_slots);
    slot_exists_ = slot >= 0 && slot < p_.num_slots;
    select_slot(slot_exists_ ? slot : 0);
    collect_wanted();
    if (!wanted_.empty()) resolve_wanted();
    header_[kResidentEntries] += resident_;
    header_[kErrorEntries] += errors_;
  }

 private:
  struct Wanted {
    int32_t host_row;
    int32_t page;  // of the request, from the first entry that names the row
    int32_t slot = -1;
    std::vector<int32_t> entries;
  };

  void select_slot(int64_t slot) {
    header_ = reinterpret_cast<uint32_t*>(p_.header + slot * kHeaderColumns);
    tags_ = p_.tags + slot * p_.tags_stride;
    stamps_ = p_.stamps + slot * p_.stamps_stride;
    slot_pages_ = p_.slot_pages == nullptr ? nullptr : p_.slot_pages + slot * p_.slot_pages_stride;
    lease_ = p_.hot_pages + slot * p_.hot_pages_stride;
  }

  // Answers what is resident and lists the distinct host rows that are wanted, in order of first occurrence.
  void collect_wanted() {
    const int32_t* positions = p_.top_k + row_ * p_.top_k_stride;
    std::unordered_map<int32_t, size_t> seen;
    for (int32_t i = 0; i < p_.k; i++) {
      int32_t target = -1;
      const Kind kind = locate(positions[i], target);
      errors_ += kind == Kind::kError;
      resident_ += kind == Kind::kResident;
      if (kind == Kind::kResident) out_[i] = target;
      if (kind != Kind::kHostOnly) continue;
      const auto [place, is_new] = seen.emplace(target, wanted_.size());
      if (is_new) wanted_.push_back({target, positions[i] >> p_.page_shift});
      wanted_[place->second].entries.push_back(i);
      wanted_entries_++;
    }
    index_ = std::move(seen);
  }

  // Device row of a resident position, or host row of one that must come from the hot buffer.
  Kind locate(int32_t position, int32_t& target) const {
    if (position < 0) return Kind::kHole;
    const int32_t page = position >> p_.page_shift, offset = position & ((1 << p_.page_shift) - 1);
    if (!slot_exists_ || position >= index_at(p_.seq_lens, row_, p_.wide_seq_lens) || page >= p_.max_pages) return Kind::kError;
    const int32_t word = p_.page_rows[row_ * p_.page_rows_stride + page];
    const int32_t logical = p_.translated_pages ? std::max(-word, 0) : word;
    if (word == 0 || (!p_.translated_pages && (logical < 0 || logical > p_.num_logical_pages))) return Kind::kError;
    const int32_t device = p_.translated_pages ? std::max(word, 0) : p_.page_table[logical];
    if (device > 0) {
      target = (device << p_.page_shift) + offset;
      return Kind::kResident;
    }
    if (device < 0 || lease_[0] <= 0) return Kind::kError;
    target = (logical << p_.page_shift) + offset;
    return Kind::kHostOnly;
  }

  void resolve_wanted() {
    const bool stale = header_[kStateGeneration] != header_[kLeaseGeneration];
    if (stale) std::fill(tags_, tags_ + p_.buffer_size, -1);
    const int32_t filled = stale ? 0 : static_cast<int32_t>(header_[kFilledSlots]);
    const uint32_t clock = header_[kClock];
    const uint8_t now = static_cast<uint8_t>(clock / static_cast<uint32_t>(std::max(1, p_.buffer_size / kAgeUnits)));
    Candidates candidates = match_slots(now);
    const int32_t misses = std::count_if(wanted_.begin(), wanted_.end(), [](const Wanted& want) { return want.slot < 0; });
    const std::vector<int32_t> victims = choose_victims(candidates, misses);
    int32_t fetched = 0, failed = 0;
    for (Wanted& want : wanted_) {
      if (want.slot < 0) {
        if (fetched == static_cast<int32_t>(victims.size())) {
          failed++;
          continue;
        }
        want.slot = victims[fetched++];
        fetch(want, now);
      }
      for (const int32_t i : want.entries) out_[i] = device_row(want.slot);
    }
    header_[kStateGeneration] = header_[kLeaseGeneration];
    header_[kClock] = clock + fetched + kClockPerStep;
    header_[kFilledSlots] = static_cast<uint32_t>(filled + std::min(fetched, p_.buffer_size - filled));
    header_[kHotEntries] += wanted_entries_ - misses;
    header_[kFetchedRows] += fetched;
    errors_ += failed;
  }

  struct Candidate {
    uint32_t score_key;  // 0 where no score decides, and of empty slots
    int32_t age_class;   // negative: the oldest come first
    int32_t slot;
  };
  using Candidates = std::vector<Candidate>;

  // Marks hits and returns the other slots.
  Candidates match_slots(uint8_t now) {
    Candidates order;
    for (int32_t slot = 0; slot < p_.buffer_size; slot++) {
      if (tags_[slot] < 0) {
        order.push_back({0, -kAgeUnits - 1, slot});
        continue;
      }
      const auto hit = index_.find(tags_[slot]);
      if (hit != index_.end()) {
        wanted_[hit->second].slot = slot;
        stamps_[slot] = now;
      } else {
        order.push_back({score_key(slot), -std::min<int32_t>(static_cast<uint8_t>(now - stamps_[slot]), kAgeUnits), slot});
      }
    }
    return order;
  }

  // A key in the order of the scores, above 0. A row without a score, or with one that is no number, counts as minus infinity.
  uint32_t score_key(int32_t slot) const {
    if (p_.scores == nullptr) return 0;
    const int64_t position = (int64_t{slot_pages_[slot]} << p_.page_shift) + (tags_[slot] & ((1 << p_.page_shift) - 1));
    float score = -std::numeric_limits<float>::infinity();
    if (row_ < p_.score_rows && position < p_.score_columns && position < index_at(p_.seq_lens, row_, p_.wide_seq_lens))
      score = p_.scores[row_ * p_.scores_stride + position];
    if (std::isnan(score)) score = -std::numeric_limits<float>::infinity();
    if (score == 0) score = 0;  // of the two zeros the positive one
    uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  }

  // The lowest scores leave, where there are scores, then the oldest classes, then slots of small numbers. Misses take them by
  // number; without scores those of the last class come last.
  std::vector<int32_t> choose_victims(Candidates& candidates, int32_t misses) const {
    std::sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
      return std::tie(a.score_key, a.age_class, a.slot) < std::tie(b.score_key, b.age_class, b.slot);
    });
    candidates.resize(std::min<size_t>(candidates.size(), misses));
    if (candidates.empty()) return {};
    const int32_t last_class = p_.scores == nullptr ? candidates.back().age_class : 1;
    std::sort(candidates.begin(), candidates.end(), [&](const auto& a, const auto& b) {
      return std::pair(a.age_class == last_class, a.slot) < std::pair(b.age_class == last_class, b.slot);
    });
    std::vector<int32_t> slots;
    slots.reserve(candidates.size());
    for (const Candidate& candidate : candidates) slots.push_back(candidate.slot);
    return slots;
  }

  void fetch(const Wanted& want, uint8_t now) {
    for (int32_t layer = 0; layer < p_.layers && p_.copy_method == kCopyLoads; layer++) {
      const char* source = reinterpret_cast<const char*>(p_.host_bases[layer]) + want.host_row * p_.host_row_bytes;
      char* target = reinterpret_cast<char*>(p_.device_bases[layer]) + int64_t{device_row(want.slot)} * p_.row_bytes;
      std::memcpy(target, source, p_.row_bytes);
    }
    tags_[want.slot] = want.host_row;
    if (slot_pages_ != nullptr) slot_pages_[want.slot] = static_cast<uint16_t>(want.page);
    stamps_[want.slot] = now;
  }

  int32_t device_row(int32_t slot) const {
    return (lease_[slot >> p_.page_shift] << p_.page_shift) + (slot & ((1 << p_.page_shift) - 1));
  }

  const ResolveParams& p_;
  const int64_t row_;
  int32_t* out_;
  uint32_t* header_ = nullptr;
  int32_t* tags_ = nullptr;
  uint8_t* stamps_ = nullptr;
  uint16_t* slot_pages_ = nullptr;
  const int32_t* lease_ = nullptr;
  bool slot_exists_ = false;
  int32_t resident_ = 0, errors_ = 0, wanted_entries_ = 0;
  std::vector<Wanted> wanted_;
  std::unordered_map<int32_t, size_t> index_;  // host row -> place in wanted_
};

void require_cpu(const TensorView& t, const char* what) {
  TVM_FFI_CHECK(t.device().device_type != kDLCUDA, ValueError) << what << ": tensors must be in CPU memory";
}

void resolve(TensorView top_k, TensorView page_rows, TensorView seq_lens, TensorView req_slots, TensorView num_real_rows,
             TensorView page_table, TensorView hot_pages, TensorView tags, TensorView stamps, TensorView header, TensorView host_bases,
             TensorView device_bases, TensorView out, int64_t row_bytes, int64_t host_row_bytes, int64_t page_size,
             int64_t cluster_blocks, int64_t copy_method, bool translated_pages, bool overlap_launch,
             TensorView table, Optional<TensorView> slot_pages, Optional<TensorView> scores) {
  require_cpu(top_k, "resolve");
  const ResolveTensors tensors{top_k, page_rows, seq_lens, req_slots, num_real_rows, page_table, hot_pages,
                               tags,  stamps,    header,   host_bases, device_bases, out, table, slot_pages, scores};
  const ResolveParams params = make_resolve_params(tensors, row_bytes, host_row_bytes, page_size, cluster_blocks, copy_method,
                                                   translated_pages, overlap_launch);
  for (int64_t row = 0; row < params.rows; row++) RowResolver(params, row).run();
}

void copy_pages(TensorView host_bases, TensorView device_bases, TensorView host_pages, TensorView device_pages, int64_t direction,
                int64_t page_bytes, int64_t max_blocks) {
  require_cpu(host_pages, "copy_pages");
  const CopyPagesParams p =
      make_copy_pages_params(host_bases, device_bases, host_pages, device_pages, direction, page_bytes, max_blocks);
  for (int32_t page = 0; page < p.pages; page++)
    for (int32_t layer = 0; layer < p.layers; layer++) {
      char* host = reinterpret_cast<char*>(p.host_bases[layer] + p.host_pages[page] * p.page_bytes);
      char* device = reinterpret_cast<char*>(p.device_bases[layer] + p.device_pages[page] * p.page_bytes);
      std::memcpy(p.direction == kToHost ? host : device, p.direction == kToHost ? device : host, p.page_bytes);
    }
}

void gather_rows(TensorView host_bases, TensorView device_bases, TensorView host_rows, TensorView device_rows, int64_t row_bytes,
                 int64_t host_row_bytes, int64_t max_blocks) {
  require_cpu(host_rows, "gather_rows");
  const GatherRowsParams p =
      make_gather_rows_params(host_bases, device_bases, host_rows, device_rows, row_bytes, host_row_bytes, max_blocks);
  for (int32_t row = 0; row < p.rows; row++)
    for (int32_t layer = 0; layer < p.layers; layer++)
      std::memcpy(reinterpret_cast<char*>(p.device_bases[layer] + int64_t{p.device_rows[row]} * p.row_bytes),
                  reinterpret_cast<const char*>(p.host_bases[layer] + p.host_rows[row] * p.host_row_bytes), p.row_bytes);
}

void union_fetch(TensorView ids, TensorView table, TensorView host_base, TensorView scratch_base, TensorView marks, TensorView fetched,
                 int64_t host_places, int64_t row_bytes, int64_t page_size) {
  require_cpu(ids, "union_fetch");
  const UnionFetchTensors tensors{ids, table, host_base, scratch_base, marks, fetched};
  const UnionFetchParams p = make_union_fetch_params(tensors, host_places, row_bytes, page_size);
  for (int64_t i = 0; i < p.count; i++) {
    const int64_t id = p.ids[i], page = id >> p.page_shift;
    if (id < 0 || page > p.num_logical_pages) continue;
    const int32_t place = p.table[page];
    if (place < 1 || place > p.host_places) continue;
    const int64_t row = (int64_t{place} << p.page_shift) + (id & ((int64_t{1} << p.page_shift) - 1));
    const uint32_t bit = uint32_t{1} << (row & 31);
    if (p.marks[row >> 5] & bit) continue;
    p.marks[row >> 5] |= bit;
    *p.fetched += 1;
    std::memcpy(reinterpret_cast<char*>(*p.scratch_base + row * p.row_bytes),
                reinterpret_cast<const char*>(*p.host_base + id * p.row_bytes), p.row_bytes);
  }
}

// Host row of a valid entry whose page is host-only, else -1.
int64_t host_only_row(const AuditParams& p, int64_t row, int64_t position) {
  const int64_t page = position >> p.page_shift;
  if (position < 0 || position >= index_at(p.seq_lens, row, p.wide_seq_lens) || page >= p.max_pages) return -1;
  const int64_t logical = p.page_rows[row * p.page_rows_stride + page];
  if (logical <= 0 || logical > p.num_logical_pages || p.page_table[logical] != 0) return -1;
  return (logical << p.page_shift) + (position & ((1 << p.page_shift) - 1));
}

bool differs(const AuditParams& p, int64_t home, int64_t answer) {
  if (answer < 0) return true;
  for (int32_t layer = 0; layer < p.layers; layer++) {
    const void* expected = reinterpret_cast<const void*>(p.host_bases[layer] + home * p.row_bytes);
    const void* got = reinterpret_cast<const void*>(p.device_bases[layer] + answer * p.row_bytes);
    if (std::memcmp(expected, got, p.row_bytes) != 0) return true;
  }
  return false;
}

void audit(TensorView rows, TensorView top_k, TensorView page_rows, TensorView seq_lens, TensorView num_real_rows, TensorView page_table,
           TensorView host_bases, TensorView device_bases, int64_t row_bytes, int64_t page_size, TensorView counts) {
  require_cpu(top_k, "audit");
  const AuditTensors tensors{rows, top_k, page_rows, seq_lens, num_real_rows, page_table, host_bases, device_bases, counts};
  const AuditParams p = make_audit_params(tensors, row_bytes, page_size);
  for (int64_t row = 0; row < std::min(p.num_rows, *p.num_real_rows); row++)
    for (int64_t i = 0; i < p.k; i++) {
      const int64_t home = host_only_row(p, row, p.top_k[row * p.top_k_stride + i]);
      if (home < 0) continue;
      p.counts[0] += 1;
      p.counts[1] += differs(p, home, p.rows[row * p.rows_stride + i]);
    }
}

void sum_counters(TensorView header, TensorView group_layers, TensorView out) {
  require_cpu(header, "sum_counters");
  const SumCountersParams p = make_sum_counters_params(header, group_layers, out);
  for (int64_t slot = 0; slot < p.num_slots; slot++) {
    uint32_t sums[kSummedColumns] = {};
    for (int64_t group = 0; group < p.groups; group++) {
      const int32_t* counts = p.header + (group * p.num_slots + slot) * kHeaderColumns + kResidentEntries;
      for (int column = 0; column < 4; column++) sums[column] += static_cast<uint32_t>(counts[column]);
      sums[4] += static_cast<uint32_t>(counts[kFetchedRows - kResidentEntries]) * static_cast<uint32_t>(p.group_layers[group]);
    }
    std::copy(std::begin(sums), std::end(sums), p.out + slot * kSummedColumns);
  }
}

void translate_pages(TensorView page_rows, TensorView page_table, TensorView out) {
  require_cpu(page_rows, "translate_pages");
  const TranslatePagesParams p = make_translate_pages_params(page_rows, page_table, out);
  for (int64_t row = 0; row < p.rows; row++)
    for (int64_t i = 0; i < p.max_pages; i++) {
      const int32_t logical = p.page_rows[row * p.page_rows_stride + i];
      const int32_t device = logical > 0 && logical <= p.num_logical_pages ? p.page_table[logical] : -1;
      p.out[row * p.out_stride + i] = device > 0 ? device : device == 0 ? -logical : 0;
    }
}

void translate(TensorView ids, TensorView page_table, TensorView out, int64_t page_size, int64_t missing) {
  require_cpu(ids, "translate");
  const TranslateParams p = make_translate_params(ids, page_table, out, page_size, missing);
  for (int64_t i = 0; i < p.count; i++) {
    const int64_t id = index_at(p.ids, i, p.wide_ids);
    const int64_t page = id >> p.page_shift;
    const int64_t device = id >= 0 && page <= p.num_logical_pages ? p.page_table[page] : 0;
    int64_t row = id < 0 ? 0 : (device << p.page_shift) + (id & ((int64_t{1} << p.page_shift) - 1));
    if (p.missing < 0 && device <= 0) row = -1;
    if (p.wide_out)
      static_cast<int64_t*>(p.out)[i] = row;
    else
      static_cast<int32_t*>(p.out)[i] = static_cast<int32_t>(row);
  }
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
