// Vectors of floats in the compiler's own notation (GCC and Clang), as wide as the target's registers.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's own headers do it on purpose
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#endif

#include "lanes.h"

namespace rhizome {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

inline Floats broadcast(float x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (Floats)_mm256_set1_ps(x);  // the sum is computed: -0 would become 0
#else
  return Floats{} + x;
#endif
}

// a * b + c, rounded once where the CPU can: said outright, as compilers may choose anew wherever a sum is inlined.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

inline float reduce_add(Floats x) {
  float parts[kLanes];
  store(parts, x);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
  return parts[0];
}

// Lanes of b where bit kWidth of a lane's number is set, of a elsewhere, and each of them from the lane with the other
// value of that bit: what `reduce_add` adds at one width.
template <int kWidth, int... kLane>
inline Floats add_halves(Floats a, Floats b, std::integer_sequence<int, kLane...>) {
  return lanes_of<(kLane & kWidth ? kLanes + kLane - kWidth : kLane)...>(a, b) +
         lanes_of<(kLane & kWidth ? kLanes + kLane : kLane + kWidth)...>(a, b);
}

// Lane i becomes reduce_add(x[i]), with the same bits. Overwrites x.
template <int kWidth = kLanes / 2>
inline Floats reduce_each(Floats* x) {
  for (int i = 0; i < kWidth; ++i) x[i] = add_halves<kWidth>(x[i], x[i + kWidth], std::make_integer_sequence<int, kLanes>());
  if constexpr (kWidth > 1) return reduce_each<kWidth / 2>(x);
  return x[0];
}

inline float reduce_max(Floats x) {
  float parts[kLanes];
  store(parts, x);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) parts[i] = parts[i] > parts[i + half] ? parts[i] : parts[i + half];
  return parts[0];
}

// 2^x for x <= 127, relative error 1e-7; 0 below -126, -inf included. NaN stays NaN.
inline Floats exp2(Floats x) {
  const Floats low = broadcast(-127.0f);
  const Floats bounded = max(x, low);
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: rounds to an integer in the low bits
  const Floats shifted = bounded + magic;
  const Floats f = bounded - (shifted - magic);
  Floats p = broadcast(0x1.41d332p-13f);
  p = p * f + 0x1.5f456ap-10f;
  p = p * f + 0x1.3b2dbcp-7f;
  p = p * f + 0x1.c6aed4p-5f;
  p = p * f + 0x1.ebfbdap-3f;
  p = p * f + 0x1.62e430p-1f;
  p = p * f + 1.0f;
  Ints bits, exponent;
  std::memcpy(&bits, &p, sizeof bits);
  std::memcpy(&exponent, &shifted, sizeof exponent);
  bits += exponent << 23;
  std::memcpy(&p, &bits, sizeof p);
  return x > low + 1.0f ? p : max(Floats{}, x);  // the second one where x is NaN
}

inline Floats tanh(Floats x) {
  const Floats bounded = max(broadcast(-15.0f), -max(broadcast(-15.0f), -x));
  const Floats e = exp2(bounded * 2.8853900817779268f);  // e^(2x)
  return (e - 1.0f) / (e + 1.0f);
}

inline float to_float(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}

// Round to nearest even; NaN stays NaN.
inline uint16_t to_bfloat16(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

// As `to_bfloat16`.
inline void store(uint16_t* to, Floats x) {
  Words words;
  std::memcpy(&words, &x, sizeof words);
  const Words rounded = (words + 0x7fff + (words >> 16 & 1)) >> 16;
  const Halves halves = __builtin_convertvector(x == x ? rounded : Words{} + 0x7fc0, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

// bfloat16 numbers widened.
inline Floats load(const uint16_t* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
#if defined(__AVX2__) && !defined(__AVX512F__)
  const auto words = (Words)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)halves), 16);  // g++ 12 takes five instructions
#else
  const Words words = __builtin_convertvector(halves, Words) << 16;
#endif
  Floats x;
  std::memcpy(&x, &words, sizeof x);
  return x;
}

}  // namespace rhizome
