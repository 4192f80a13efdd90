// bfloat16 as bits, and vectors of kLanes numbers, written so that every instruction set has them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

namespace rhizome {

using bf16 = uint16_t;

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif
typedef float floats __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

inline floats load(const float* from) { return *reinterpret_cast<const floats*>(from); }
inline void store(float* to, floats value) { *reinterpret_cast<floats*>(to) = value; }
inline floats splat(float value) { return floats{} + value; }

// a * b + c, rounded once where AVX2 comes with FMA, and with AVX512.
inline floats fused_sum(floats a, floats b, floats c) {
#if defined(__AVX512F__)
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline floats widen(halves value) {
#if defined(__AVX512F__)
  return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)value), 16);  // g++ 12 takes five instructions
#elif defined(__AVX2__)
  return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)value), 16);
#else
  return (floats)(__builtin_convertvector(value, words) << 16);
#endif
}
inline floats load(const bf16* from) { return widen(*reinterpret_cast<const halves*>(from)); }

// To nearest, ties to even. NaN stays NaN.
inline halves narrow(floats value) {
#if defined(__AVX512BF16__)
  return (halves)_mm512_cvtneps_pbh((__m512)value);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (halves)vcvt_bf16_f32((float32x4_t)value);
#else
  const words bits = (words)value;
  const words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const words quiet = (bits >> 16) | 0x40;
  const words is_nan = (words)(value != value);
  return __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), halves);
#endif
}
inline void store(bf16* to, floats value) { *reinterpret_cast<halves*>(to) = narrow(value); }

// Whether the CPU knows how to write bfloat16 past the caches, a whole cache line at once.
#if defined(__AVX512BF16__)
inline constexpr bool kWritesPast = true;
#else
inline constexpr bool kWritesPast = false;
#endif

// Two vectors one after another: where a vector is 16 numbers, a cache line written at once. kPast: past the caches, if the
// CPU can (then `to` is aligned to 64), and `finish_streams` makes them seen by other threads.
template <bool kPast = false>
inline void store_pair(bf16* to, floats low, floats high) {
#if defined(__AVX512BF16__)
  const __m512i line = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  if constexpr (kPast)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line);
  else
    _mm512_storeu_si512(to, line);
#else
  store(to, low);
  store(to + kLanes, high);
#endif
}

// Copies `count` numbers in the same way; with kPast, a multiple of 32.
template <bool kPast>
inline void copy_lines(const bf16* from, int64_t count, bf16* to) {
#if defined(__AVX512BF16__)
  if constexpr (kPast) {
    for (int64_t i = 0; i < count; i += 32)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
    return;
  }
#endif
  memcpy(to, from, count * sizeof(bf16));
}

inline void finish_streams() {
#if defined(__AVX512BF16__)
  _mm_sfence();
#endif
}

inline float to_float(bf16 value) {
  const uint32_t bits = uint32_t{value} << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

inline bf16 to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return static_cast<bf16>(bits >> 16 | 0x40);
  return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The first `count` lanes, the rest 0 (or left alone).
template <class Element>
inline floats load_some(const Element* from, int count) {
  Element part[kLanes] = {};
  memcpy(part, from, count * sizeof(Element));
  return load(part);
}

template <class Element>
inline void store_some(Element* to, floats value, int count) {
  Element part[kLanes];
  store(part, value);
  memcpy(to, part, count * sizeof(Element));
}

inline float sum(floats value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)value);  // in the very order of the loop
#endif
  for (int width = kLanes / 2; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) value[i] += value[i + width];
  return value[0];
}

inline floats select(ints mask, floats yes, floats no) {
  return (floats)(((ints)yes & mask) | ((ints)no & ~mask));
}

// The largest lane; none is NaN.
inline float highest(floats value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)value);
#endif
  for (int width = kLanes / 2; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) value[i] = value[i] > value[i + width] ? value[i] : value[i + width];
  return value[0];
}

// The largest of some numbers, in several chains for the sake of latency. NaN is none.
inline float highest_of(const float* numbers, int64_t count) {
  floats most[4];
  for (floats& one : most) one = splat(-__builtin_inff());
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) {
      const floats some = load(numbers + i + j * kLanes);
      most[j] = select(some > most[j], some, most[j]);
    }
  for (int j = 1; j < 4; ++j) most[0] = select(most[j] > most[0], most[j], most[0]);
  float best = highest(most[0]);
  for (; i < count; ++i) best = numbers[i] > best ? numbers[i] : best;
  return best;
}

// e**x within 2 units in the last place; x below -87 counts as -87, above 88 as 88. Cody and Waite's reduction, and the
// Taylor polynomial of degree 7 on [-ln(2)/2, ln(2)/2].
inline floats exp(floats x) {
  x = select(x > 88.0f, splat(88.0f), x);
  x = select(x < -87.0f, splat(-87.0f), x);
  const floats magic = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to a whole number
  const floats shifted = x * 1.44269504f + magic;
  const floats whole = shifted - magic;
  const floats rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  floats series = splat(1.0f / 5040);
  series = series * rest + 1.0f / 720;
  series = series * rest + 1.0f / 120;
  series = series * rest + 1.0f / 24;
  series = series * rest + 1.0f / 6;
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  series = series * rest + 1.0f;
  const ints exponent = ((ints)shifted - (ints)magic + 127) << 23;
  return series * (floats)exponent;
}

// x / (1 + e**-t), relative error 4e-6 (it becomes bfloat16).
inline floats times_sigmoid(floats x, floats t) {
#if defined(__AVX512F__)
  // 2**t by a polynomial on [-1/2, 1/2], and the quotient by an estimate of 14 bits and a step of Newton's
  const __m512 bounded = _mm512_min_ps(_mm512_max_ps((__m512)t, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(87.0f));
  const __m512 power = _mm512_mul_ps(bounded, _mm512_set1_ps(-1.44269504f));
  const __m512 whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(power, whole);
  __m512 p = _mm512_set1_ps(0x1.5bba14p-10f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.3cea88p-7f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.c6b754p-5f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ebf9bcp-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62e42ap-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  const __m512 below = _mm512_add_ps(_mm512_scalef_ps(p, whole), _mm512_set1_ps(1.0f));
  const __m512 guess = _mm512_rcp14_ps(below);
  const __m512 better = _mm512_mul_ps(guess, _mm512_fnmadd_ps(below, guess, _mm512_set1_ps(2.0f)));
  return (floats)_mm512_mul_ps((__m512)x, better);
#else
  return x / (1.0f + exp(-t));
#endif
}

inline floats silu(floats x) { return times_sigmoid(x, x); }

// The tanh form of GELU: x / 2 * (1 + tanh(t / 2)).
inline floats gelu(floats x) { return times_sigmoid(x, 1.59576912f * (x + 0.044715f * (x * x * x))); }

// gate * sigmoid(1.702 gate) * (up + 1), clamped (gpt-oss). NaN stays, as comparisons with it are false.
inline floats clamped_swiglu(floats gate, floats up) {
  const floats most = splat(7.0f);
  gate = select(gate > most, most, gate);
  up = select(up > most, most, select(up < -most, -most, up));
  return times_sigmoid(gate, 1.702f * gate) * (up + 1.0f);
}

}  // namespace rhizome
