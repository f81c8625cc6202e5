// Fused sparse attention on a CPU, forward and backward: every row of K and V is read where it lies, nothing is kept per
// edge. `cpu_backend.py` calls it. It is compiled once for each width of vectors; nothing here needs torch. How rows and
// blocks of edges lie, and how work is cut, is in `rows.h` and `edges.h`.
//
// Legend: N destinations, M sources, E edges, H heads, D head dim.

#include "edges.h"
#include "rows.h"

namespace {

// Forward: a running maximum and sum over blocks of edges (Milakov and Gimelshein 2018) --------------------------------

template <class T, class Layout>
struct Forward {
  using F = typename Layout::F;
  static constexpr int W = Layout::W;
  Layout at;
  Matrix<T> q, k, v;
  Ids ids;
  Bias<F> bias;
  F scale;
  T* out;      // [N, H, D]
  F* extremes;  // [N, 2, H]: the maximum of a row, and one over its sum

  int64_t padded() const { return (at.heads + W - 1) / W * W; }
  int64_t part() const { return at.width() + 2 * padded(); }
  int64_t scratch() const { return at.width() + 3 * at.heads * W; }

  void run(int64_t i, int64_t begin, int64_t end, F* partial, F* room) const {
    const int64_t heads = at.heads;
    F *sum = partial, *peak = sum + at.width(), *whole = peak + padded();
    F *query = room, *block = query + at.width(), *shrink = block + heads * W, *sums = shrink + heads * W;
    at.widen(q.row(i), query);
    std::fill(sum, sum + at.width(), F(0));
    std::fill(sums, sums + heads * W, F(0));
    std::fill(peak, peak + heads, -std::numeric_limits<F>::infinity());
    for (int64_t e = begin; e < end; e += W) {
      const int count = int(std::min<int64_t>(W, end - e));
      const Ends<W> ends(ids, e, count);
      const Block<T, W> keys(k, ends), values(v, ends);
      at.dots(query, keys.rows, keys.next, block);
      for (int x = 0; x < count; x++)
        for (int64_t j = 0; j < at.width(); j += 64 / sizeof(T)) fetch_soon(values.next[x] + j);
      for (int64_t h = 0; h < heads; h++) {
        const Vec<F> logits = bias.add(load(block + h * W) * scale, e, count, h);
        const F before = peak[h], high = std::max(before, largest<F>(logits));
        const F safe = high == -std::numeric_limits<F>::infinity() ? F(0) : high;
        const Vec<F> weights = exponential(logits - safe);
        const F factor = e == begin || before == high ? F(1) : exponential_of(before - safe);
        store(block + h * W, weights);
        store(sums + h * W, load(sums + h * W) * factor + weights);
        shrink[h * W] = factor;
        peak[h] = high;
      }
      at.add(sum, e == begin ? nullptr : shrink, block, values.rows, count);
    }
    for (int64_t h = 0; h < heads; h++) whole[h] = total<F>(load(sums + h * W));
  }

  void merge(F* into, const F* from) const {
    const int64_t heads = at.heads, columns = at.width() / heads;
    F *peak = into + at.width(), *whole = peak + padded();
    const F *other = from + at.width(), *more = other + padded();
    for (int64_t h = 0; h < heads; h++) {
      const F high = std::max(peak[h], other[h]);
      const F safe = high == -std::numeric_limits<F>::infinity() ? F(0) : high;
      const F mine = exponential_of(peak[h] - safe), theirs = exponential_of(other[h] - safe);
      for (int64_t c = h * columns; c < (h + 1) * columns; c++) into[c] = into[c] * mine + from[c] * theirs;
      whole[h] = whole[h] * mine + more[h] * theirs;
      peak[h] = high;
    }
  }

  void finish(int64_t i, F* sum, F* room) const {
    const int64_t heads = at.heads;
    F *peak = sum + at.width(), *whole = peak + padded(), *divisor = room;
    for (int64_t h = 0; h < heads; h++) {
      if (peak[h] == -std::numeric_limits<F>::infinity()) peak[h] = 0;  // nothing reaches the row
      if (whole[h] == 0) whole[h] = 1;
      extremes[(2 * i) * heads + h] = peak[h];
      extremes[(2 * i + 1) * heads + h] = 1 / whole[h];
      divisor[h * W] = whole[h];
    }
    for (int64_t j = 0; j < at.vectors(); j++)
      store(out + i * at.width() + j * W, load(sum + j * W) / at.spread(divisor, j, 0));
  }
};

// Backward by destination: the gradient of queries and of the bias -----------------------------------------------------

template <class T, class Layout>
struct ByDestination {
  using F = typename Layout::F;
  static constexpr int W = Layout::W;
  Layout at;
  Matrix<T> q, k, v, grad, out;
  Ids ids;
  Bias<F> bias;
  F scale;
  const F* extremes;
  F* lines;       // [N, `line`]: maximum, one over the sum, grad . out, [3, H] and nothing
  T* grad_q;      // or null
  F* grad_bias;   // or null; [E, H], or [E] if shared
  bool shared;

  int64_t part() const { return at.width(); }
  int64_t scratch() const { return 2 * at.width() + 3 * at.heads * W; }
  static int64_t line(int64_t heads) { return (3 * heads + W - 1) / W * W; }

  void run(int64_t i, int64_t begin, int64_t end, F* sum, F* room) const {
    const int64_t heads = at.heads;
    F *query = room, *above = query + at.width(), *block = above + at.width(), *dots = block + heads * W;
    F* mine = dots + heads * W;
    at.widen(q.row(i), query);
    at.widen(grad.row(i), above);
    at.dot(above, out.row(i), block, mine);
    std::copy(extremes + 2 * i * heads, extremes + 2 * (i + 1) * heads, lines + i * line(heads));
    std::copy(mine, mine + heads, lines + i * line(heads) + 2 * heads);
    std::fill(sum, sum + at.width(), F(0));
    for (int64_t e = begin; e < end; e += W) {
      const int count = int(std::min<int64_t>(W, end - e));
      const Ends<W> ends(ids, e, count);
      const Block<T, W> keys(k, ends), values(v, ends);
      at.dots(query, keys.rows, keys.next, block);
      at.dots(above, values.rows, values.next, dots);
      Vec<F> over_heads{};
      for (int64_t h = 0; h < heads; h++) {
        const F high = extremes[2 * i * heads + h], inverse = extremes[(2 * i + 1) * heads + h];
        const Vec<F> weights = exponential(bias.add(load(block + h * W) * scale, e, count, h) - high) * inverse;
        const Vec<F> slopes = weights * (load(dots + h * W) - mine[h]);
        store(block + h * W, slopes * scale);
        if (grad_bias != nullptr) {
          if (shared) over_heads += slopes;
          else
            for (int x = 0; x < count; x++) grad_bias[(e + x) * heads + h] = slopes[x];
        }
      }
      if (grad_bias != nullptr && shared)
        for (int x = 0; x < count; x++) grad_bias[e + x] = over_heads[x];
      if (grad_q != nullptr) at.add(sum, nullptr, block, keys.rows, count);
    }
  }

  void merge(F* into, const F* from) const {
    for (int64_t c = 0; c < at.width(); c++) into[c] += from[c];
  }

  void finish(int64_t i, const F* sum, F*) const {
    if (grad_q == nullptr) return;
    for (int64_t j = 0; j < at.vectors(); j++) store(grad_q + i * at.width() + j * W, load(sum + j * W));
  }
};

// Backward by source: the gradients of keys and values -----------------------------------------------------------------

template <class T, class Layout>
struct BySource {
  using F = typename Layout::F;
  static constexpr int W = Layout::W;
  Layout at;
  Matrix<T> q, k, v, grad;
  Ids ids;  // destinations
  Bias<F> bias;
  F scale;
  const F* lines;  // as `ByDestination` left them
  T *grad_k, *grad_v;  // or null

  int64_t line() const { return ByDestination<T, Layout>::line(at.heads); }
  int64_t part() const { return 2 * at.width(); }
  int64_t scratch() const { return 2 * at.width() + (2 * at.heads + line()) * W; }

  void run(int64_t j, int64_t begin, int64_t end, F* sums, F* room) const {
    const int64_t heads = at.heads;
    F *key = room, *value = key + at.width(), *block = value + at.width(), *dots = block + heads * W;
    at.widen(k.row(j), key);
    at.widen(v.row(j), value);
    std::fill(sums, sums + 2 * at.width(), F(0));
    F* facts = dots + heads * W;  // lines of a block, turned: [line][W]
    for (int64_t e = begin; e < end; e += W) {
      const int count = int(std::min<int64_t>(W, end - e));
      const Ends<W> ends(ids, e, count);
      const Block<T, W> queries(q, ends), above(grad, ends);
      at.dots(key, queries.rows, queries.next, block);
      at.dots(value, above.rows, above.next, dots);
      for (int64_t first = 0; first < line(); first += W) {
        Vec<F> tile[W];
        for (int x = 0; x < W; x++) {
          tile[x] = load(lines + ends.now[x] * line() + first);
          fetch_soon(lines + ends.next[x] * line() + first);
        }
        transpose<F>(tile);
        for (int x = 0; x < W; x++) store(facts + (first + x) * W, tile[x]);
      }
      for (int64_t h = 0; h < heads; h++) {
        const Vec<F> high = load(facts + h * W), inverse = load(facts + (heads + h) * W);
        const Vec<F> mean = load(facts + (2 * heads + h) * W);
        const Vec<F> weights = exponential(bias.add(load(block + h * W) * scale, e, count, h) - high) * inverse;
        store(block + h * W, weights * (load(dots + h * W) - mean) * scale);
        store(dots + h * W, weights);
      }
      if (grad_k != nullptr) at.add(sums, nullptr, block, queries.rows, count);
      if (grad_v != nullptr) at.add(sums + at.width(), nullptr, dots, above.rows, count);
    }
  }

  void merge(F* into, const F* from) const {
    for (int64_t c = 0; c < 2 * at.width(); c++) into[c] += from[c];
  }

  void finish(int64_t i, const F* sums, F*) const {
    for (int64_t j = 0; j < at.vectors(); j++) {
      if (grad_k != nullptr) store(grad_k + i * at.width() + j * W, load(sums + j * W));
      if (grad_v != nullptr) store(grad_v + i * at.width() + j * W, load(sums + at.width() + j * W));
    }
  }
};

template <class T>
void forward(int64_t num_rows, int64_t heads, int64_t dim, Matrix<T> q, Matrix<T> k, Matrix<T> v, const int64_t* indptr,
             Ids ids, Bias<typename Work<T>::type> bias, double scale, void* out, void* extremes, int threads) {
  using F = typename Work<T>::type;
  with_layout<T>(heads, dim, [&](auto layout) {
    Forward<T, decltype(layout)> task{layout, q, k, v, ids, bias, F(scale), static_cast<T*>(out), static_cast<F*>(extremes)};
    over_rows(task, indptr, num_rows, threads);
  });
}

}  // namespace

extern "C" {

int gtx_vector_bytes() { return VECTOR_BYTES; }

// type: 0 float32, 1 bfloat16, 2 float64. strides: elements from row to row. wide: ids are int64, else int32.
struct AttentionInputs {
  int64_t num_rows, num_cols, num_edges, heads, dim;
  const void *q, *k, *v;
  int64_t stride_q, stride_k, stride_v;
  const int64_t* indptr;
  const void* indices;
  const void* bias;  // float32, or float64 beside float64
  int64_t bias_edge_stride, bias_head_stride;
  double scale;
  int32_t type, wide, threads;
};

struct AttentionGradients {
  const void *grad, *out;  // [N, H, D] without gaps
  const void* extremes;
  const int64_t* transposed_indptr;
  const void* transposed_indices;
  const int64_t* order;  // edge of each transposed one, where there is a bias
  void *lines, *grad_q, *grad_k, *grad_v, *grad_bias;
  int32_t bias_shared;
};

}  // extern "C"

namespace {

template <class T>
void forward_of(const AttentionInputs& in, void* out, void* extremes) {
  using F = typename Work<T>::type;
  forward<T>(in.num_rows, in.heads, in.dim, {static_cast<const T*>(in.q), in.stride_q},
             {static_cast<const T*>(in.k), in.stride_k}, {static_cast<const T*>(in.v), in.stride_v}, in.indptr,
             {in.indices, in.wide != 0, in.num_edges},
             {static_cast<const F*>(in.bias), in.bias_edge_stride, in.bias_head_stride, nullptr}, in.scale, out, extremes,
             in.threads);
}

template <class T>
void backward_of(const AttentionInputs& in, const AttentionGradients& to) {
  using F = typename Work<T>::type;
  const int64_t width = in.heads * in.dim;
  const Matrix<T> q{static_cast<const T*>(in.q), in.stride_q}, k{static_cast<const T*>(in.k), in.stride_k};
  const Matrix<T> v{static_cast<const T*>(in.v), in.stride_v}, grad{static_cast<const T*>(to.grad), width};
  const Matrix<T> out{static_cast<const T*>(to.out), width};
  const F *extremes = static_cast<const F*>(to.extremes), *bias = static_cast<const F*>(in.bias);
  F* lines = static_cast<F*>(to.lines);
  with_layout<T>(in.heads, in.dim, [&](auto layout) {
    ByDestination<T, decltype(layout)> rows{layout, q, k, v, grad, out, {in.indices, in.wide != 0, in.num_edges},
                                            {bias, in.bias_edge_stride, in.bias_head_stride, nullptr}, F(in.scale),
                                            extremes, lines, static_cast<T*>(to.grad_q), static_cast<F*>(to.grad_bias),
                                            to.bias_shared != 0};
    over_rows(rows, in.indptr, in.num_rows, in.threads);
    if (to.grad_k == nullptr && to.grad_v == nullptr) return;
    BySource<T, decltype(layout)> columns{layout, q, k, v, grad, {to.transposed_indices, in.wide != 0, in.num_edges},
                                          {bias, in.bias_edge_stride, in.bias_head_stride, to.order}, F(in.scale),
                                          lines, static_cast<T*>(to.grad_k), static_cast<T*>(to.grad_v)};
    over_rows(columns, to.transposed_indptr, in.num_cols, in.threads);
  });
}

}  // namespace

extern "C" {

void gtx_attention_forward(const AttentionInputs* in, void* out, void* extremes) {
  switch (in->type) {
    case 0: return forward_of<float>(*in, out, extremes);
    case 1: return forward_of<bf16>(*in, out, extremes);
    case 2: return forward_of<double>(*in, out, extremes);
  }
}

void gtx_attention_backward(const AttentionInputs* in, const AttentionGradients* to) {
  switch (in->type) {
    case 0: return backward_of<float>(*in, *to);
    case 1: return backward_of<bf16>(*in, *to);
    case 2: return backward_of<double>(*in, *to);
  }
}

}  // extern "C"
