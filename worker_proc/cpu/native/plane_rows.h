// Rows of x in int8, for weights of bytes without a sign (`in_quads`): on AMX's tiles, and in dot products of bytes. A number of 16
// bits in fixed point, as in linear_integers.h, is 256 * upper + lower: a row becomes two of int8, and a product takes as many
// multiplications as one of bfloat16, but half of the memory; codes go from memory to tiles as they are. Where x is to be
// rounded to int8 (kInt8Both), a row is one.
//
// Sums over all inputs, up to 2^16 of them, are exact, and rounded to float32 once: they are the same in any order, whatever
// the batch. Numbers above 32639 (of bfloat16, 255/128 of the power of two alone) count as 32639, for their upper half to have 8
// bits. Codes are 128 more than they are, for which the sum of a row makes up.
#pragma once

#include "linear_quantized.h"

#if defined(__AMX_INT8__) || defined(RHIZOME_INT8_DOTS)

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "fixed_point.h"
#include "room.h"
#include "rows.h"

namespace rhizome {

// Until the next ones of the same thread.
class PlaneRows {
 public:
  PlaneRows(const bf16* x, int64_t x_stride, int64_t rows, const PackedMatrix& weights)
      : inputs_(weights.inputs), size_(2 * as_pairs(weights).inputs), stride_(row_stride(size_ / 2)),
        planes_(weights.format == Format::kInt8Both ? 1 : 2) {
    static thread_local std::vector<bf16> memory;
    static thread_local std::vector<float> units;
    static thread_local std::vector<int64_t> sums;
    data_ = room_in(memory, rows * planes_ * stride_);
    units_ = room_in(units, rows);
    sums_ = room_in(sums, rows);
    for_rows(rows, inputs_, [&](int64_t row) { split(x + row * x_stride, row); });
  }

  int planes() const { return planes_; }
  // [planes * rows], pairs of int8.
  const bf16* data() const { return data_; }
  int64_t stride() const { return stride_; }

  // Makes the sums [count, 32] of rows from `row` on of those of their planes, whole numbers of 32 bits, in their place.
  void join(int64_t row, int count, float* sums) const {
    for (int i = 0; i < count; ++i, sums += kPanel) {
      const float* const planes = sums + i * (planes_ - 1) * kPanel;
      const int64_t of_zeros = 128 * sums_[row + i];
      for (int v = 0; v < kPanel; v += kLanes) {
        const floats joined = planes_ == 1 ? one_plane(planes + v, of_zeros) : two_planes(planes + v, of_zeros);
        store(sums + v, joined * splat(units_[row + i]));
      }
    }
  }

 private:
#if defined(__AVX512BW__)
  void split(const bf16* from, int64_t row) {
    const int64_t steps = blocks(inputs_);  // zeros follow up to a whole one
    const FixedPoint point(largest_bits(from, inputs_), planes_ == 1);
    units_[row] = point.unit;
    const auto whole = [&](__m256i words) {
      const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
      return _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(point.factor))));
    };
    const auto put = [](int8_t* to, __m512i words) { _mm256_store_si256((__m256i*)to, _mm512_cvtepi16_epi8(words)); };
    int8_t *upper = reinterpret_cast<int8_t*>(data_ + row * planes_ * stride_), *lower = upper + 2 * stride_;
    __m512i sum = _mm512_setzero_si512();
    for (int64_t step = 0; step < steps; ++step, from += 32, upper += 32, lower += 32) {
      const __m512i words = _mm512_loadu_si512(from);
      const __m256i left = whole(_mm512_castsi512_si256(words)), right = whole(_mm512_extracti64x4_epi64(words, 1));
      const __m512i numbers = _mm512_min_epi16(_mm512_inserti64x4(_mm512_castsi256_si512(left), right, 1), _mm512_set1_epi16(32639));
      sum = _mm512_add_epi32(sum, _mm512_madd_epi16(numbers, _mm512_set1_epi16(1)));
      if (planes_ == 1) {
        put(upper, numbers);
      } else {
        put(upper, _mm512_srai_epi16(_mm512_add_epi16(numbers, _mm512_set1_epi16(128)), 8));
        put(lower, numbers);
      }
    }
    sums_[row] = _mm512_reduce_add_epi32(sum);  // of up to 2^16 numbers of 16 bits
    if (steps % 2 == 0) return;
    put(upper, _mm512_setzero_si512());
    if (planes_ == 2) put(lower, _mm512_setzero_si512());
  }
#else  // one plane, see `in_quads`
  void split(const bf16* from, int64_t row) {
    const int largest = largest_bits(from, inputs_);
    const FixedPoint point(largest, true);
    units_[row] = point.unit;
    int8_t* const to = reinterpret_cast<int8_t*>(data_ + row * stride_);
    std::memset(to + inputs_, 0, size_ - inputs_);
    sums_[row] = 0;
    if (largest >= 0x7f80) return;  // whatever is there: the unit is NaN
    int32_t sum = 0;
    for (int64_t i = 0; i < inputs_; ++i) {
      const int32_t number = static_cast<int32_t>(__builtin_nearbyintf(to_float(from[i]) * point.factor));
      to[i] = static_cast<int8_t>(number);
      sum += number;
    }
    sums_[row] = sum;
  }
#endif

  static floats one_plane(const float* sums, int64_t of_zeros) {
    ints whole;
    std::memcpy(&whole, sums, sizeof whole);
    return __builtin_convertvector(whole - static_cast<int32_t>(of_zeros), floats);
  }

  // Of an upper row and the lower one behind it, in double precision, which holds them exactly.
  static floats two_planes(const float* sums, int64_t of_zeros) {
#if defined(__AVX512F__)
    const __m512d zeros = _mm512_set1_pd(static_cast<double>(of_zeros));
    __m256 halves[2];
    for (int half = 0; half < 2; ++half) {
      const auto* const upper = reinterpret_cast<const __m256i*>(sums + 8 * half);
      const auto* const lower = reinterpret_cast<const __m256i*>(sums + kPanel + 8 * half);
      const __m512d low = _mm512_sub_pd(_mm512_cvtepi32_pd(_mm256_loadu_si256(lower)), zeros);
      halves[half] = _mm512_cvtpd_ps(_mm512_fmadd_pd(_mm512_cvtepi32_pd(_mm256_loadu_si256(upper)), _mm512_set1_pd(256), low));
    }
    return (floats)_mm512_insertf32x8(_mm512_castps256_ps512(halves[0]), halves[1], 1);
#else
    (void)sums, (void)of_zeros;
    return splat(0);  // never asked for, see `in_quads`
#endif
  }

  const int64_t inputs_, size_, stride_;
  const int planes_;
  bf16* data_;
  float* units_;
  int64_t* sums_;
};

}  // namespace rhizome

#endif
