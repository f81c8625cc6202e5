// Random walks with restart and the nodes they visit most: the same lists as `walks.py` finds with torch operations.
//
// A row's walks depend on its key alone, so nothing depends on threads or on order. `walks.py` calls it. Legend: n rows
// asked for, k the most nodes of a list.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "keyed.h"

extern "C" {

struct WalkRequest {
  const int64_t* indptr;
  const void* indices;
  const int64_t* rows;   // null for all
  const int64_t* order;  // of equally visited nodes the one with the lower number comes first
  const uint64_t* row_keys;
  int64_t num_rows, fanout, walks;
  double restart;
  int32_t wide, threads;
};

}  // extern "C"

namespace {

constexpr int64_t kLongestWalk = 32;  // steps; `walks.py` has the same

// How often each node was visited by the walks of one row: open addressing, emptied by raising the mark.
class Tally {
 public:
  struct Found {
    int64_t order, node, visits;
  };

  explicit Tally(int64_t most) {
    size_t size = 64;
    while (size < size_t(2 * most)) size *= 2;
    slots_.assign(size, {0, -1, 0});
  }
  void start() { mark_++, used_.clear(); }
  void add(int64_t node) {
    const size_t mask = slots_.size() - 1;
    for (size_t at = finalise(uint64_t(node)) & mask;; at = (at + 1) & mask) {
      Slot& slot = slots_[at];
      if (slot.mark != mark_) slot = {mark_, node, 0}, used_.push_back(at);
      if (slot.node != node) continue;
      slot.visits++;
      return;
    }
  }
  // The k most visited, in that order.
  int64_t most_visited(int64_t k, const int64_t* order, std::vector<Found>& found) const {
    found.clear();
    for (const size_t at : used_) found.push_back({order[slots_[at].node], slots_[at].node, slots_[at].visits});
    const int64_t count = std::min<int64_t>(k, int64_t(found.size()));
    std::partial_sort(found.begin(), found.begin() + count, found.end(), [](const Found& a, const Found& b) {
      return a.visits != b.visits ? a.visits > b.visits : a.order < b.order;
    });
    return count;
  }

 private:
  struct Slot {
    int64_t mark, node, visits;
  };
  std::vector<Slot> slots_;
  std::vector<size_t> used_;
  int64_t mark_ = 0;
};

// All walks of a row take a step together, so that their reads are under way together.
template <class Id>
void walk(const WalkRequest& in, Id* out, int32_t* visits, int64_t* counts) {
  const Id* indices = static_cast<const Id*>(in.indices);
#pragma omp parallel num_threads(in.threads) if (in.threads > 1)
  {
    Tally tally(in.walks * kLongestWalk);
    std::vector<Tally::Found> found;
    std::vector<int64_t> at(static_cast<size_t>(in.walks)), edge(at);
    std::vector<uint64_t> keys(at.size());
#pragma omp for schedule(dynamic, 64)
    for (int64_t i = 0; i < in.num_rows; i++) {
      const int64_t row = in.rows == nullptr ? i : in.rows[i];
      size_t walking = at.size();
      for (size_t w = 0; w < walking; w++) at[w] = row, keys[w] = subkey(in.row_keys[i], w);
      tally.start();
      for (uint64_t step = 0; step < uint64_t(kLongestWalk) && walking > 0; step++) {
        size_t left = 0;
        for (size_t w = 0; w < walking; w++) {
          const int64_t start = in.indptr[at[w]], degree = in.indptr[at[w] + 1] - start;
          if (degree == 0) continue;
          edge[left] = start + int64_t(uniform(subkey(keys[w], 2 * step)) * double(degree));
          keys[left] = keys[w];
          __builtin_prefetch(indices + edge[left++]);
        }
        walking = left, left = 0;
        for (size_t w = 0; w < walking; w++) {
          const int64_t node = indices[edge[w]];
          tally.add(node);
          if (uniform(subkey(keys[w], 2 * step + 1)) < in.restart) continue;
          keys[left] = keys[w];
          __builtin_prefetch(in.indptr + node);
          at[left++] = node;
        }
        walking = left;
      }
      counts[i] = tally.most_visited(in.fanout, in.order, found);
      for (int64_t j = 0; j < counts[i]; j++) {
        out[i * in.fanout + j] = Id(found[size_t(j)].node);
        visits[i * in.fanout + j] = int32_t(found[size_t(j)].visits);
      }
    }
  }
}

}  // namespace

extern "C" {

// Fills the first counts[i] of the k places of each row in out and visits, both [n, k].
void gtx_walk(const WalkRequest* in, void* out, int32_t* visits, int64_t* counts) {
  if (in->wide) return walk<int64_t>(*in, static_cast<int64_t*>(out), visits, counts);
  walk<int32_t>(*in, static_cast<int32_t*>(out), visits, counts);
}

}  // extern "C"
