// Vectors as wide as the CPU's: loads and stores, bf16, exp, sums and turns of many at once. Included by the kernels; nothing
// here knows of rows or edges (`rows.h`, `edges.h`).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

namespace {

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

}  // namespace
