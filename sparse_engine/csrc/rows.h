// How rows of [heads, dim] lie in vectors, and what is done with whole rows: products with a block of them, weighted sums.
//
// Legend: H heads, D head dim, a multiple of a vector or a power of two below it. A block is as many edges of one row as a
// vector has lanes. Numbers per head of a block lie as [H][lanes], an edge a lane.
#pragma once

#include "vectors.h"

namespace {

// How a row lies in vectors: PER heads share one (a power of two), or a head takes SPAN of them (0: as many as it says).
template <class T, int PER, int SPAN>
struct Rows {
  using F = typename Work<T>::type;
  static constexpr int W = kLanes<F>;
  int64_t heads, span;

  int64_t spans() const { return SPAN ? SPAN : span; }
  int64_t vectors() const { return PER > 1 ? heads / PER : heads * spans(); }
  int64_t width() const { return vectors() * W; }

  // out[h][e] = row[h] . rows[e][h] for a block; lines of `next` are fetched meanwhile.
  void dots(const F* row, const T* const* rows, const T* const* next, F* out) const {
    if constexpr (PER > 1) {
      constexpr int EDGES = W / PER;
      for (int64_t j = 0; j < vectors(); j++) {
        const Vec<F> mine = load(row + j * W);
        for (int first = 0; first < W; first += EDGES) {
          Vec<F> terms[EDGES];
          for (int e = 0; e < EDGES; e++) {
            terms[e] = mine * load(rows[first + e] + j * W);
            fetch_soon(next[first + e] + j * W);
          }
          const Vec<F> sums = add_up<F, EDGES, EDGES / 2>(terms);
          for (int h = 0; h < PER; h++)
            for (int e = 0; e < EDGES; e++) out[(j * PER + h) * W + first + e] = sums[h * EDGES + e];
        }
      }
    } else {
      for (int64_t h = 0; h < heads; h++) {
        const int64_t at = h * spans() * W;
        Vec<F> terms[W];
        const Vec<F> mine = load(row + at);
        for (int e = 0; e < W; e++) {
          terms[e] = mine * load(rows[e] + at);
          fetch_soon(next[e] + at);
        }
        for (int64_t s = 1; s < spans(); s++) {
          const Vec<F> more = load(row + at + s * W);
          for (int e = 0; e < W; e++) {
            terms[e] += more * load(rows[e] + at + s * W);
            fetch_soon(next[e] + at + s * W);
          }
        }
        store(out + h * W, add_up<F, W, W / 2>(terms));
      }
    }
  }

  // The weights of an edge's heads, spread over vector j.
  Vec<F> spread(const F* weights, int64_t j, int e) const {
    if constexpr (PER > 1) {
      const F* of_head = weights + j * PER * W + e;
      Vec<F> v = all(of_head[(PER - 1) * W]);
      for (int h = PER - 2; h >= 0; h--) v = first_of<F>((h + 1) * (W / PER), all(of_head[h * W]), v);
      return v;
    } else {
      return all(weights[j / spans() * W + e]);
    }
  }

  // sum[h] = scale[h] * sum[h] + over the edges of a block: weights[h][e] * rows[e][h]
  void add(F* sum, const F* scale, const F* weights, const T* const* rows, int count) const {
    for (int64_t j = 0; j < vectors(); j++) {
      Vec<F> acc = load(sum + j * W);
      if (scale != nullptr) acc *= spread(scale, j, 0);
      for (int e = 0; e < count; e++) acc += spread(weights, j, e) * load(rows[e] + j * W);
      store(sum + j * W, acc);
    }
  }

  void widen(const T* row, F* out) const {
    for (int64_t j = 0; j < vectors(); j++) store(out + j * W, load(row + j * W));
  }

  // [H]: the product of two rows, added up as `dots` does it.
  void dot(const F* row, const T* other, F* block, F* out) const {
    const T* rows[W];
    for (int e = 0; e < W; e++) rows[e] = other;
    dots(row, rows, rows, block);
    for (int64_t h = 0; h < heads; h++) out[h] = block[h * W];
  }
};

// Calls fn with the layout of rows of [heads, dim].
template <class T, class Fn>
void with_layout(int64_t heads, int64_t dim, Fn fn) {
  constexpr int W = kLanes<typename Work<T>::type>;
  if (dim >= W) {
    if (dim == W) fn(Rows<T, 1, 1>{heads, 1});
    else fn(Rows<T, 1, 0>{heads, dim / W});
    return;
  }
  if constexpr (W >= 8)
    if (dim == W / 2) return fn(Rows<T, 2, 1>{heads, 1});
  if constexpr (W >= 16) fn(Rows<T, 4, 1>{heads, 1});
}

}  // namespace
