// int8 weights with a scale per output on AMX's int8 tiles, in whole numbers. A row of x becomes fixed point numbers of 16
// bits, as in linear_integers.h, and these two rows of int8: 256 * upper + lower. So a product takes as many multiplications
// of tiles as one of bfloat16, but half of the memory, and codes go from memory to tiles as they are.
//
// Sums over all inputs, up to 2^16 of them, are exact, and rounded to float32 once: they are the same in any order, whatever the batch. Numbers
// above 32639 (of bfloat16, 255/128 of the power of two alone) count as 32639, for their upper half to have 8 bits. Where x is
// to be rounded to int8 (kInt8Both), a row is one row of int8.
//
// The layout is that of `in_quads` (linear_quantized.h).
#pragma once

#include "linear_quantized.h"

#if defined(__AMX_INT8__)

#include <immintrin.h>

#include <algorithm>
#include <vector>

#include "fixed_point.h"
#include "parallel.h"
#include "room.h"
#include "rows.h"

namespace rhizome {

// Rows of x, one or two of int8 for each. Until the next ones of the same thread.
class PlaneRows {
 public:
  PlaneRows(const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs, bool int8)
      : stride_(row_stride((blocks(inputs) + 1) / 2 * 32)), planes_(int8 ? 1 : 2) {
    static thread_local std::vector<bf16> memory;
    static thread_local std::vector<float> units;
    bf16* const data = room_in(memory, rows * planes_ * stride_);
    float* const to = room_in(units, rows);
    data_ = data, units_ = to;
    for_rows(rows, inputs, [&](int64_t row) {
      int8_t* const upper = reinterpret_cast<int8_t*>(data + row * planes_ * stride_);
      to[row] = split(x + row * x_stride, blocks(inputs), upper, int8 ? nullptr : upper + 2 * stride_);
    });
  }

  int planes() const { return planes_; }
  // [planes * rows], pairs of int8.
  const bf16* data() const { return data_; }
  int64_t stride() const { return stride_; }

  // Makes the sums [count, 32] of rows from `row` on of those of their planes, in their place.
  void join(int64_t row, int count, float* sums) const {
    for (int i = 0; i < count; ++i)
      for (int v = 0; v < kPanel; v += kTile) {
        if (planes_ == 1) {
          float* const at = sums + i * kPanel + v;
          _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(at)), _mm512_set1_ps(units_[row + i])));
          continue;
        }
        const __m512i upper = _mm512_loadu_si512(sums + 2 * i * kPanel + v), lower = _mm512_loadu_si512(sums + (2 * i + 1) * kPanel + v);
        const __m256 left = both(_mm512_castsi512_si256(upper), _mm512_castsi512_si256(lower));
        const __m256 right = both(_mm512_extracti64x4_epi64(upper, 1), _mm512_extracti64x4_epi64(lower, 1));
        const __m512 sum = _mm512_insertf32x8(_mm512_castps256_ps512(left), right, 1);
        _mm512_storeu_ps(sums + i * kPanel + v, _mm512_mul_ps(sum, _mm512_set1_ps(units_[row + i])));
      }
  }

 private:
  // In double precision, which holds them exactly.
  static __m256 both(__m256i upper, __m256i lower) {
    return _mm512_cvtpd_ps(_mm512_fmadd_pd(_mm512_cvtepi32_pd(upper), _mm512_set1_pd(256), _mm512_cvtepi32_pd(lower)));
  }

  // Without `lower`, to int8 alone. Zeros follow up to a whole number of 64. Returns the unit.
  static float split(const bf16* x, int64_t steps, int8_t* upper, int8_t* lower) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t step = 0; step < steps; ++step)
      most = _mm512_max_epi16(most, _mm512_and_si512(_mm512_loadu_si512(x + step * 32), _mm512_set1_epi16(0x7fff)));
    const __m512i even = _mm512_and_si512(most, _mm512_set1_epi32(0xffff)), odd = _mm512_srli_epi32(most, 16);
    const FixedPoint fixed(_mm512_reduce_max_epi32(_mm512_max_epi32(even, odd)), lower == nullptr);
    const auto whole = [&](__m256i words) {
      const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
      return _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(fixed.factor))));
    };
    for (int64_t step = 0; step < steps; ++step, x += 32, upper += 32) {
      const __m512i words = _mm512_loadu_si512(x);
      const __m256i left = whole(_mm512_castsi512_si256(words)), right = whole(_mm512_extracti64x4_epi64(words, 1));
      const __m512i numbers = _mm512_min_epi16(_mm512_inserti64x4(_mm512_castsi256_si512(left), right, 1), _mm512_set1_epi16(32639));
      if (lower == nullptr) {
        put(upper, numbers);
        continue;
      }
      put(upper, _mm512_srai_epi16(_mm512_add_epi16(numbers, _mm512_set1_epi16(128)), 8));
      put(lower, numbers);
      lower += 32;
    }
    if (steps % 2) {
      put(upper, _mm512_setzero_si512());
      if (lower != nullptr) put(lower, _mm512_setzero_si512());
    }
    return fixed.unit;
  }

  static void put(int8_t* to, __m512i words) { _mm256_store_si256((__m256i*)to, _mm512_cvtepi16_epi8(words)); }

  const bf16* data_;
  const float* units_;
  int64_t stride_;
  int planes_;
};

}  // namespace rhizome

#endif
