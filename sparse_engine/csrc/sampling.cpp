// Drawing in-neighbours: the same edges as `torch_sampler.py` draws with torch operations, row by row and with threads.
//
// Randomness is a function of a row's key and a counter (splitmix64), so nothing depends on threads or on order. Rows are
// taken in blocks: what the later stages of a block will read is fetched while the earlier ones still run.
//
// `cpu_sampler.py` calls it. Legend: n rows asked for, e edges drawn, k fan-out.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "keyed.h"

namespace {

constexpr int64_t kBlock = 64;      // rows whose reads are under way together
constexpr int64_t kScanned = 64;    // fan-outs up to this look through the earlier draws, larger ones mark them

// Positions already drawn by a row of large fan-out: open addressing, emptied by raising the mark.
class Marks {
 public:
  void start(int64_t count) {
    size_t size = 64;
    while (size < size_t(4 * count)) size *= 2;
    if (size > slots_.size()) slots_.assign(size, {0, -1}), mark_ = 0;
    mark_++;
  }
  bool insert(int64_t value) {  // false if it was there
    const size_t mask = slots_.size() - 1;
    for (size_t at = finalise(uint64_t(value)) & mask;; at = (at + 1) & mask) {
      if (slots_[at].mark != mark_) {
        slots_[at] = {mark_, value};
        return true;
      }
      if (slots_[at].value == value) return false;
    }
  }

 private:
  struct Slot {
    int64_t mark, value;
  };
  std::vector<Slot> slots_;
  int64_t mark_ = 0;
};

// k different positions below `degree`, ascending (Bentley and Floyd 1987). Needs degree > k.
inline void floyd(int64_t degree, uint64_t key, int64_t k, int64_t* chosen, Marks& marks) {
  if (k > kScanned) marks.start(k);
  for (int64_t i = 0; i < k; i++) {
    const int64_t last = degree - (k - i);
    int64_t draw = int64_t(uniform(subkey(key, uint64_t(i))) * double(last + 1));
    if (k > kScanned) {
      if (!marks.insert(draw)) marks.insert(draw = last);
    } else {
      bool taken = false;
      for (int64_t j = 0; j < i; j++) taken |= chosen[j] == draw;
      draw = taken ? last : draw;
    }
    chosen[i] = draw;
  }
  if (k > 32) return std::sort(chosen, chosen + k);
  for (int64_t i = 1; i < k; i++) {
    const int64_t value = chosen[i];
    int64_t j = i;
    for (; j > 0 && chosen[j - 1] > value; j--) chosen[j] = chosen[j - 1];
    chosen[j] = value;
  }
}

// One row's draw by weight ----------------------------------------------------------------------------------------------

constexpr int64_t kWeightOne = int64_t(1) << 24;  // what a row's largest weight counts as

struct Scratch {
  std::vector<int64_t> positions, whole;
  std::vector<char> sure;
  Marks marks;
};

// Weights as multiples of the row's largest over kWeightOne, at least 1.
inline void whole_weights(const float* weights, int64_t degree, std::vector<int64_t>& whole) {
  float largest = 0.0f;
  for (int64_t i = 0; i < degree; i++) largest = std::max(largest, weights[i]);
  const double one = largest == 0.0f ? 1.0 : double(largest);
  whole.resize(size_t(degree));
  for (int64_t i = 0; i < degree; i++)
    whole[size_t(i)] = std::max<int64_t>(1, int64_t(double(weights[i]) / one * double(kWeightOne)));
}

// k different edges, pi as large as the weight says (Madow 1949). What would exceed 1 is taken for sure; on the line of
// the other weights lie k' points at equal distances, moved together by one draw.
inline void systematic(const float* weights, int64_t degree, uint64_t key, int64_t k, int64_t* chosen, double* odds,
                       Scratch& scratch) {
  whole_weights(weights, degree, scratch.whole);
  scratch.sure.assign(size_t(degree), 0);
  int64_t* rest = scratch.whole.data();
  char* sure = scratch.sure.data();
  int64_t left = k, total = 0;
  for (int64_t i = 0; i < degree; i++) total += rest[i];
  for (bool again = true; again;) {
    again = false;
    const int64_t left_now = left, total_now = total;
    for (int64_t i = 0; i < degree; i++) {
      if (rest[i] == 0 || left_now * rest[i] < total_now) continue;
      left--, total -= rest[i], rest[i] = 0, sure[i] = 1, again = true;
    }
  }
  const int64_t span = std::max<int64_t>(total, 1);
  const int64_t shift = int64_t(uniform(subkey(key, 0)) * double(span));
  int64_t line = 0, hits = 0, count = 0;  // points before the end of the edge
  for (int64_t i = 0; i < degree; i++) {
    line += rest[i];
    const int64_t now = (left * line - shift + span - 1) / span;
    if (sure[i] || now > hits) {
      chosen[count] = i;
      odds[count++] = sure[i] ? 1.0 : double(left * rest[i]) / double(span);
    }
    hits = now;
  }
}

// k draws with replacement, ascending, and how often each is expected.
inline void multinomial(const float* weights, int64_t degree, uint64_t key, int64_t k, int64_t* chosen, double* odds,
                        Scratch& scratch) {
  whole_weights(weights, degree, scratch.whole);
  int64_t total = 0;
  for (int64_t i = 0; i < degree; i++) total += scratch.whole[size_t(i)];
  for (int64_t j = 0; j < k; j++) chosen[j] = int64_t(uniform(subkey(key, uint64_t(j))) * double(total));
  std::sort(chosen, chosen + k);
  int64_t at = 0, line = scratch.whole[0];
  for (int64_t j = 0; j < k; j++) {
    while (line <= chosen[j]) line += scratch.whole[size_t(++at)];
    chosen[j] = at;
    odds[j] = double(k * scratch.whole[size_t(at)]) / double(total);
  }
}

// The k largest, of equal ones those listed first.
inline void top(const float* weights, int64_t degree, int64_t k, int64_t* chosen, Scratch& scratch) {
  std::vector<int64_t>& order = scratch.whole;
  order.resize(size_t(degree));
  for (int64_t i = 0; i < degree; i++) order[size_t(i)] = i;
  std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), [&](int64_t a, int64_t b) {
    return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
  });
  std::copy(order.begin(), order.begin() + k, chosen);
  std::sort(chosen, chosen + k);
}

}  // namespace

extern "C" {

struct SampleRequest {
  const int64_t* indptr;
  const void* indices;
  const int64_t* rows;  // null for all
  const uint64_t* row_keys;
  const float* weights;
  const uint64_t* source_keys;
  int64_t num_rows, fanout, num_sources;  // a fan-out below 0: all edges; of source_keys
  int32_t method, wide, threads;
};

}  // extern "C"

namespace {

enum Method { kUniform, kWeighted, kMultinomial, kTop, kShared };

struct Rows {
  const SampleRequest& in;

  int64_t at(int64_t i) const { return in.rows == nullptr ? i : in.rows[i]; }
  int64_t start(int64_t i) const { return in.indptr[at(i)]; }
  int64_t degree(int64_t i) const { return in.indptr[at(i) + 1] - in.indptr[at(i)]; }
  bool sampled(int64_t i) const { return in.fanout >= 0 && degree(i) > in.fanout; }
  double share(int64_t i) const { return sampled(i) ? double(in.fanout) / double(degree(i)) : 1.0; }
  void fetch(int64_t i) const {
    if (in.rows != nullptr && i < in.num_rows) __builtin_prefetch(in.indptr + in.rows[i]);
  }
};

template <class Id>
bool count_shared(const SampleRequest& in, int64_t* counts) {
  const Rows rows{in};
  const Id* indices = static_cast<const Id*>(in.indices);
  bool known = true;
#pragma omp parallel for schedule(dynamic, 256) num_threads(in.threads) if (in.threads > 1) reduction(&& : known)
  for (int64_t i = 0; i < in.num_rows; i++) {
    const Id* sources = indices + rows.start(i);
    const double share = rows.share(i);
    int64_t count = 0;
    for (int64_t j = 0, degree = rows.degree(i); j < degree; j++) {
      if (sources[j] < 0 || sources[j] >= in.num_sources) known = false;
      else count += uniform(in.source_keys[sources[j]]) < share;
    }
    counts[i] = count;
  }
  return known;
}

template <class Id>
void fill(const SampleRequest& in, const int64_t* out_indptr, Id* out, double* odds) {
  const Rows rows{in};
  const Id* indices = static_cast<const Id*>(in.indices);
  const int64_t k = in.fanout, blocks = (in.num_rows + kBlock - 1) / kBlock;
#pragma omp parallel num_threads(in.threads) if (in.threads > 1)
  {
    Scratch scratch;
    scratch.positions.resize(size_t(kBlock * std::max<int64_t>(k, 1)));
#pragma omp for schedule(dynamic, 16)
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t begin = block * kBlock, end = std::min(in.num_rows, begin + kBlock);
      for (int64_t i = end; i < end + kBlock; i++) rows.fetch(i);
      for (int64_t i = begin; i < end; i++) {
        const int64_t start = rows.start(i);
        if (in.method != kUniform || !rows.sampled(i)) {
          __builtin_prefetch(indices + start);
          continue;
        }
        int64_t* chosen = scratch.positions.data() + (i - begin) * k;
        floyd(rows.degree(i), in.row_keys[i], k, chosen, scratch.marks);
        for (int64_t j = 0; j < k; j++) __builtin_prefetch(indices + start + chosen[j]);
      }
      for (int64_t i = begin; i < end; i++) {
        const int64_t degree = rows.degree(i);
        const Id* from = indices + rows.start(i);
        Id* to = out + out_indptr[i];
        if (!rows.sampled(i)) {
          std::memcpy(to, from, size_t(degree) * sizeof(Id));
          if (odds != nullptr) std::fill_n(odds + out_indptr[i], degree, 1.0);
          continue;
        }
        if (in.method == kShared) {
          const double share = rows.share(i);
          for (int64_t j = 0; j < degree; j++)
            if (uniform(in.source_keys[from[j]]) < share) *to++ = from[j];
          continue;
        }
        int64_t* chosen = scratch.positions.data() + (i - begin) * k;
        const float* weights = in.weights == nullptr ? nullptr : in.weights + rows.start(i);
        double* row_odds = odds == nullptr ? nullptr : odds + out_indptr[i];
        if (in.method == kWeighted) systematic(weights, degree, in.row_keys[i], k, chosen, row_odds, scratch);
        if (in.method == kMultinomial) multinomial(weights, degree, in.row_keys[i], k, chosen, row_odds, scratch);
        if (in.method == kTop) top(weights, degree, k, chosen, scratch);
        for (int64_t j = 0; j < k; j++) to[j] = from[chosen[j]];
      }
    }
  }
}

}  // namespace

extern "C" {

// Fills out_indptr [n + 1] and inclusion [n]. Returns 0 if an edge's source has no key, else 1.
int32_t gtx_sample_count(const SampleRequest* in, int64_t* out_indptr, double* inclusion) {
  const Rows rows{*in};
  bool known = true;
  if (in->method == kShared)
    known = in->wide ? count_shared<int64_t>(*in, out_indptr + 1) : count_shared<int32_t>(*in, out_indptr + 1);
  out_indptr[0] = 0;
  for (int64_t i = 0; i < in->num_rows; i++) {
    rows.fetch(i + 32);
    if (in->method != kShared) out_indptr[i + 1] = rows.sampled(i) ? in->fanout : rows.degree(i);
    out_indptr[i + 1] += out_indptr[i];
    inclusion[i] = in->method == kTop ? 1.0 : rows.share(i);
  }
  return known;
}

// Fills out [e] and, unless null, odds [e].
void gtx_sample_fill(const SampleRequest* in, const int64_t* out_indptr, void* out, double* odds) {
  if (in->wide) return fill<int64_t>(*in, out_indptr, static_cast<int64_t*>(out), odds);
  fill<int32_t>(*in, out_indptr, static_cast<int32_t*>(out), odds);
}

}  // extern "C"
