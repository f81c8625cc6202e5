// Fused sparse attention on a CPU, forward and backward: every row of K and V is read where it lies, nothing is kept per
// edge. `cpu_backend.py` calls it. It is compiled once for each width of vectors; nothing here needs torch.
//
// Legend: N destinations, M sources, E edges, H heads, D head dim. Rows are [H, D] without gaps, D a multiple of a vector
// or a power of two below it. A block is as many edges of one row as a vector has lanes. Numbers per head of a block lie
// as [H][lanes], an edge a lane.
//
// Each row has one writer, and a row of more than `kSegment` edges is added up segment by segment in order, so the same
// bits come out of any number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

namespace {

constexpr int64_t kSegment = 2048;  // edges of a row that one thread adds up at a time

struct bf16 {
  uint16_t bits;
};

template <class T>
struct Work {
  using type = T;
};
template <>
struct Work<bf16> {
  using type = float;
};

template <class F>
struct VecOf {
  typedef F type __attribute__((vector_size(VECTOR_BYTES)));
};
template <class F>
using Vec = typename VecOf<F>::type;
template <class F>
constexpr int kLanes = VECTOR_BYTES / sizeof(F);

typedef uint32_t Bits32 __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Ints32 __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));

// Into the second cache: what the next block needs would push what this one uses out of the first.
inline void fetch_soon(const void* address) { __builtin_prefetch(address, 0, 2); }

// Vectors --------------------------------------------------------------------------------------------------------------

template <class F>
inline Vec<F> load(const F* from) {
  Vec<F> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline Vec<float> load(const bf16* from) {
  Halves raw;
  std::memcpy(&raw, from, sizeof raw);
  return (Vec<float>)(__builtin_convertvector(raw, Bits32) << 16);
}
template <class F>
inline void store(F* to, Vec<F> v) {
  std::memcpy(to, &v, sizeof v);
}
inline void store(bf16* to, Vec<float> v) {  // to the nearest, ties to even
  Bits32 bits = (Bits32)v;
  Bits32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  rounded = v != v ? (bits >> 16) | 0x40u : rounded;
  Halves raw = __builtin_convertvector(rounded, Halves);
  std::memcpy(to, &raw, sizeof raw);
}
template <class F>
inline Vec<F> all(F x) {
  return x - Vec<F>{};
}
template <class F, int BY, size_t... I>
inline Vec<F> turned(Vec<F> v, std::index_sequence<I...>) {
  return __builtin_shufflevector(v, v, ((int(I) + BY) % kLanes<F>)...);
}
template <class F, int BY = kLanes<F> / 2>
inline F largest(Vec<F> v) {
  if constexpr (BY == 0) return v[0];
  else {
    const Vec<F> other = turned<F, BY>(v, std::make_index_sequence<kLanes<F>>{});
    return largest<F, BY / 2>(other > v ? other : v);
  }
}
template <class F, int BY = kLanes<F> / 2>
inline F total(Vec<F> v) {
  if constexpr (BY == 0) return v[0];
  else return total<F, BY / 2>(v + turned<F, BY>(v, std::make_index_sequence<kLanes<F>>{}));
}
// Lanes below `count` of a, the others of b.
template <class F>
inline Vec<F> first_of(int count, Vec<F> a, Vec<F> b) {
  using Int = std::conditional_t<sizeof(F) == 4, int32_t, int64_t>;
  Vec<Int> lane;
  for (int i = 0; i < kLanes<F>; i++) lane[i] = i;
  return lane < Int(count) ? a : b;
}

// exp to about an ulp: 2^n times a polynomial in the rest (Cephes' expf); below the normal numbers it is 0.
inline Vec<float> exponential(Vec<float> x) {
  const Vec<float> low = all(-87.33654f), high = all(88.72283f);
  Vec<float> y = x > high ? high : x;
  y = y < low ? low : y;
  Vec<float> n = (y * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  n = n > 127.0f ? all(127.0f) : n;
  Vec<float> r = y - n * 0.693359375f + n * 2.12194440e-4f;
  Vec<float> p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Ints32 power = (__builtin_convertvector(n, Ints32) + 127) << 23;
  p = p * (Vec<float>)power;
  p = x < low ? all(0.0f) : p;
  p = x > high ? all(std::numeric_limits<float>::infinity()) : p;
  return x != x ? x : p;
}
inline Vec<double> exponential(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; i++) x[i] = std::exp(x[i]);
  return x;
}
template <class F>
inline F exponential_of(F x) {
  return exponential(all(x))[0];
}

// Sums of many vectors at once: a tree in which each step adds two half-reduced vectors into one ----------------------

template <class F, int HALF, int UPPER, size_t... I>
inline Vec<F> pick(Vec<F> a, Vec<F> b, std::index_sequence<I...>) {
  return __builtin_shufflevector(
      a, b, (int(I) / (2 * HALF) * 2 * HALF + UPPER * HALF + int(I) % HALF + (int(I) % (2 * HALF) < HALF ? 0 : kLanes<F>))...);
}
template <class F, int COUNT, int HALF>
inline Vec<F> add_up(Vec<F>* terms) {
  if constexpr (COUNT == 1) {
    return terms[0];
  } else {
    using Lanes = std::make_index_sequence<kLanes<F>>;
    for (int i = 0; i < COUNT / 2; i++) {
      Vec<F> a = terms[i], b = terms[i + COUNT / 2];
      terms[i] = pick<F, HALF, 0>(a, b, Lanes{}) + pick<F, HALF, 1>(a, b, Lanes{});
    }
    return add_up<F, COUNT / 2, HALF / 2>(terms);
  }
}

// Turns W vectors of W lanes: lane i of x[j] becomes lane j of x[i].
template <class F, int HALF, int UPPER, size_t... I>
inline Vec<F> interleave(Vec<F> a, Vec<F> b, std::index_sequence<I...>) {
  return __builtin_shufflevector(
      a, b, (UPPER ? (int(I) & HALF ? kLanes<F> + int(I) : int(I) + HALF) : (int(I) & HALF ? kLanes<F> + int(I) - HALF : int(I)))...);
}
template <class F, int HALF = kLanes<F> / 2>
inline void transpose(Vec<F>* x) {
  if constexpr (HALF > 0) {
    using Lanes = std::make_index_sequence<kLanes<F>>;
    for (int i = 0; i < kLanes<F>; i++) {
      if (i & HALF) continue;
      const Vec<F> a = x[i], b = x[i + HALF];
      x[i] = interleave<F, HALF, 0>(a, b, Lanes{});
      x[i + HALF] = interleave<F, HALF, 1>(a, b, Lanes{});
    }
    transpose<F, HALF / 2>(x);
  }
}

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

// Edges ----------------------------------------------------------------------------------------------------------------

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
