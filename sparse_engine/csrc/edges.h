// Edges of rows: ids of either width, blocks of edges with what is fetched for the next, and the cut of the work between
// threads. Each row has one writer, and a row of more than `kSegment` edges is added up segment by segment in order, so
// the same bits come out of any number of threads.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t kSegment = 2048;  // edges of a row that one thread adds up at a time

struct Ids {
  const void* values;
  bool wide;
  int64_t count;
  int64_t operator[](int64_t e) const {
    return wide ? static_cast<const int64_t*>(values)[e] : static_cast<const int32_t*>(values)[e];
  }
};

template <class T>
struct Matrix {
  const T* values;
  int64_t stride;  // elements from row to row
  const T* row(int64_t i) const { return values + i * stride; }
};

// The ends of a block's edges, the last repeated, and those of the edges after them.
template <int W>
struct Ends {
  int64_t now[W], next[W];
  Ends(const Ids& ids, int64_t begin, int count) {
    for (int e = 0; e < W; e++) {
      now[e] = ids[begin + (e < count ? e : count - 1)];
      const int64_t after = begin + count + e;
      next[e] = ids[after < ids.count ? after : ids.count - 1];
    }
  }
};

template <class T, int W>
struct Block {
  const T* rows[W];
  const T* next[W];
  Block(const Matrix<T>& matrix, const Ends<W>& ends) {
    for (int e = 0; e < W; e++) {
      rows[e] = matrix.row(ends.now[e]);
      next[e] = matrix.row(ends.next[e]);
    }
  }
};

template <class F>
struct Bias {
  const F* values;  // null: none
  int64_t edge_stride, head_stride;
  const int64_t* order;  // null: edges as they come
  // Adds to the logits of a block, and gives lanes without an edge a logit of minus infinity.
  Vec<F> add(Vec<F> logits, int64_t begin, int count, int64_t head) const {
    constexpr int W = kLanes<F>;
    if (values != nullptr) {
      F found[W] = {};
      for (int e = 0; e < count; e++) {
        const int64_t edge = order == nullptr ? begin + e : order[begin + e];
        found[e] = values[edge * edge_stride + head * head_stride];
      }
      logits += load(found);
    }
    return count == W ? logits : first_of<F>(count, logits, all(-std::numeric_limits<F>::infinity()));
  }
};

// Runs `task` over all rows. A task computes a part of a row into `partial` (`part` numbers), `merge` adds a later part to
// an earlier one, `finish` writes the row.
template <class Task>
void over_rows(Task& task, const int64_t* indptr, int64_t num_rows, int threads) {
  using F = typename Task::F;
  const int64_t work = indptr[num_rows] + num_rows;
  threads = int(std::max<int64_t>(1, std::min<int64_t>(threads, work / 4096)));
  const int64_t chunks = threads == 1 ? 1 : 16 * threads;
  auto row_at = [&](int64_t wanted) {  // the first row before which `wanted` of the work lies
    int64_t low = 0, high = num_rows;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (indptr[middle] + middle < wanted) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  std::vector<int64_t> hubs;
#pragma omp parallel num_threads(threads)
  {
    std::vector<F> room(task.part() + task.scratch() + 16);
    F* partial = reinterpret_cast<F*>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
#pragma omp for schedule(dynamic, 1)
    for (int64_t c = 0; c < chunks; c++) {
      const int64_t last = c == chunks - 1 ? num_rows : row_at(work * (c + 1) / chunks);
      for (int64_t i = c == 0 ? 0 : row_at(work * c / chunks); i < last; i++) {
        if (indptr[i + 1] - indptr[i] > kSegment) {
#pragma omp critical
          hubs.push_back(i);
          continue;
        }
        task.run(i, indptr[i], indptr[i + 1], partial, partial + task.part());
        task.finish(i, partial, partial + task.part());
      }
    }
  }
  if (hubs.empty()) return;
  struct Segment {
    int64_t row, begin, end;
  };
  std::vector<Segment> segments;
  std::vector<size_t> first;
  for (int64_t row : hubs) {
    first.push_back(segments.size());
    for (int64_t e = indptr[row]; e < indptr[row + 1]; e += kSegment)
      segments.push_back({row, e, std::min(e + kSegment, indptr[row + 1])});
  }
  first.push_back(segments.size());
  const int64_t part = (task.part() + 15) / 16 * 16;
  std::vector<F> parts(part * segments.size() + 16);
  F* base = reinterpret_cast<F*>((reinterpret_cast<uintptr_t>(parts.data()) + 63) / 64 * 64);
#pragma omp parallel num_threads(threads)
  {
    std::vector<F> room(task.scratch() + 16);
    F* scratch = reinterpret_cast<F*>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
#pragma omp for schedule(dynamic, 1)
    for (size_t s = 0; s < segments.size(); s++)
      task.run(segments[s].row, segments[s].begin, segments[s].end, base + s * part, scratch);
#pragma omp for schedule(dynamic, 1)
    for (size_t h = 0; h < hubs.size(); h++) {
      F* into = base + first[h] * part;
      for (size_t s = first[h] + 1; s < first[h + 1]; s++) task.merge(into, base + s * part);
      task.finish(hubs[h], into, scratch);
    }
  }
}

}  // namespace
