// Small parts of the attention kernels for bfloat16 with AVX512: vectors of bfloat16 and float32.
#pragma once

#if defined(__AVX512BF16__)

#include <algorithm>
#include <cstdint>

#include "transpose.h"

namespace rhizome {

// 32 numbers from `d` on of a head of `dim`, with zeros behind it.
inline __m512i load_numbers(const char* head, int d, int dim) {
  const char* from = head + 2 * d;
  if (d + 32 <= dim) return _mm512_loadu_si512(from);
  const int left = std::max(0, dim - d);
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << left) - 1), from);
}

// 32 numbers from `d` on of a head of `dim` in int8, times `scale`, with zeros behind it.
inline __m512i widen_numbers(const char* codes, int d, int dim, float scale) {
  const uint32_t mask = d + 32 <= dim ? ~0u : static_cast<uint32_t>((uint64_t{1} << std::max(0, dim - d)) - 1);
  const __m256i bytes = _mm256_maskz_loadu_epi8(mask, codes + d);
  const __m512 factor = _mm512_set1_ps(scale);
  const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
  const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(high, factor), _mm512_mul_ps(low, factor));
}

// Takes the first 16 numbers of two vectors in turn.
inline __m512i first_of_both() {
  alignas(64) static constexpr uint16_t kIndices[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  return _mm512_load_si512(kIndices);
}

// Takes the first 8 pairs of numbers of two vectors in turn.
inline __m512i first_pairs_of_both() {
  return _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}

// 2^x, relative error 3e-6.
inline __m512 exp2_accurate(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  __m512 p = _mm512_set1_ps(0x1.bb7cd2p-7f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.aa13f2p-5f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ee798ap-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62d166p-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.00002cp+0f));
  return _mm512_scalef_ps(p, x);
}

// 2^x, relative error 8e-5: what is left of it in bfloat16 is its rounding.
inline __m512 exp2_short(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  __m512 p = _mm512_set1_ps(0x1.3f96a2p-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.cefc4ep-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.64444cp-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.fff632p-1f));
  return _mm512_scalef_ps(p, x);
}

// What 32 scores become: weights 2^(scale * score - shift), of which only those in `seen` are not 0.
struct Weights {
  __m512 low, high;

  Weights(const float* scores, float factor, float minus) {
    const __m512 scale = _mm512_set1_ps(factor), shift = _mm512_set1_ps(minus);
    low = exp2_short(_mm512_fmsub_ps(_mm512_load_ps(scores), scale, shift));
    high = exp2_short(_mm512_fmsub_ps(_mm512_load_ps(scores + 16), scale, shift));
  }

  Weights(const float* scores, float factor, float minus, __mmask32 seen) : Weights(scores, factor, minus) {
    low = _mm512_maskz_mov_ps(static_cast<__mmask16>(seen), low);
    high = _mm512_maskz_mov_ps(static_cast<__mmask16>(seen >> 16), high);
  }

  // Stores them in bfloat16 and returns `sums`, to which they are added.
  __m512 put(uint16_t* to, __m512 sums) const {
    _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    return _mm512_add_ps(sums, _mm512_add_ps(low, high));
  }
};

// Numbers [16][kColumns], 2 or 4 columns, become rows of 16 that are `stride` apart.
template <int kColumns>
inline void turn(const float* from, float* to, int stride) {
  const __m512i step = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(step, _mm512_set1_epi32(1));
  const __m512 a = _mm512_load_ps(from), b = _mm512_load_ps(from + 16);
  const __m512 even0 = _mm512_permutex2var_ps(a, step, b), odd0 = _mm512_permutex2var_ps(a, odd, b);
  if constexpr (kColumns == 2) {
    _mm512_store_ps(to, even0);
    _mm512_store_ps(to + stride, odd0);
  } else {
    const __m512 c = _mm512_load_ps(from + 32), d = _mm512_load_ps(from + 48);
    const __m512 even1 = _mm512_permutex2var_ps(c, step, d), odd1 = _mm512_permutex2var_ps(c, odd, d);
    _mm512_store_ps(to, _mm512_permutex2var_ps(even0, step, even1));
    _mm512_store_ps(to + stride, _mm512_permutex2var_ps(odd0, step, odd1));
    _mm512_store_ps(to + 2 * stride, _mm512_permutex2var_ps(even0, odd, even1));
    _mm512_store_ps(to + 3 * stride, _mm512_permutex2var_ps(odd0, odd, odd1));
  }
}

// count (a multiple of 16) numbers x become cap * tanh(scale * x), by tanh(x) = 1 - 2 / (2^(2 x log2 e) + 1).
inline void squash(float* numbers, int count, float scale, float cap) {
  const __m512 factor = _mm512_set1_ps(2.88539008178f * scale), one = _mm512_set1_ps(1.0f);
  const __m512 whole = _mm512_set1_ps(cap), minus = _mm512_set1_ps(-2 * cap);
  for (int i = 0; i < count; i += 16) {
    const __m512 x = _mm512_mul_ps(_mm512_load_ps(numbers + i), factor);
    // of two numbers, these instructions take the second one where one is NaN
    const __m512 bounded = _mm512_min_ps(_mm512_set1_ps(40.0f), _mm512_max_ps(_mm512_set1_ps(-40.0f), x));
    const __m512 e = _mm512_add_ps(exp2_accurate(bounded), one);
    _mm512_store_ps(numbers + i, _mm512_add_ps(_mm512_div_ps(minus, e), whole));
  }
}

// The sum of 16 numbers, and 16 such sums of rows of 16: halves are added until one number is left.
inline float add_lanes(__m512 x) {
  x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
  x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  x = _mm512_add_ps(x, _mm512_permute_ps(x, 0x4e));
  x = _mm512_add_ps(x, _mm512_permute_ps(x, 0xb1));
  return _mm512_cvtss_f32(x);
}

inline __m512 add_rows(const float* from) {
  __m512i rows[16];
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_load_si512(from + 16 * i);
  transpose(rows);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) rows[i] = (__m512i)_mm512_add_ps((__m512)rows[i], (__m512)rows[i + half]);
  return (__m512)rows[0];
}

// The lanes of tokens t .. t + 31 that are in [first, stop).
inline __mmask32 lanes(int t, int first, int stop) {
  const uint64_t below = (uint64_t{1} << std::clamp(stop - t, 0, 32)) - 1;
  const uint64_t above = (uint64_t{1} << std::clamp(first - t, 0, 32)) - 1;
  return static_cast<__mmask32>(below & ~above);
}

}  // namespace rhizome

#endif
