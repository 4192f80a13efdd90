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
  void split(const bf16* from, int64_t row) {
    int largest = 0;
    for (int64_t i = 0; i < inputs_; ++i) largest = std::max(largest, from[i] & 0x7fff);
    const FixedPoint point(largest, planes_ == 1);
    units_[row] = point.unit;
    int8_t* const upper = reinterpret_cast<int8_t*>(data_ + row * planes_ * stride_);
    int8_t* const lower = upper + 2 * stride_;
    std::memset(upper + inputs_, 0, size_ - inputs_);
    if (planes_ == 2) std::memset(lower + inputs_, 0, size_ - inputs_);
    sums_[row] = 0;
    if (largest >= 0x7f80) return;  // whatever is there: the unit is NaN
    int64_t sum = 0;
    constexpr int64_t kAtOnce = 64;  // of which a sum has 32 bits
    for (int64_t first = 0; first < inputs_; first += kAtOnce) {
      const int64_t end = std::min(inputs_, first + kAtOnce);
      int32_t some = 0;
      if (planes_ == 1)
        for (int64_t i = first; i < end; ++i) {
          const int32_t number = whole(from[i], point.factor);
          upper[i] = static_cast<int8_t>(number);
          some += number;
        }
      else
        for (int64_t i = first; i < end; ++i) {
          const int32_t number = std::min(whole(from[i], point.factor), 32639);
          upper[i] = static_cast<int8_t>((number + 128) >> 8);
          lower[i] = static_cast<int8_t>(number);
          some += number;
        }
      sum += some;
    }
    sums_[row] = sum;
  }

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

  static int32_t whole(bf16 number, float factor) { return static_cast<int32_t>(__builtin_nearbyintf(to_float(number) * factor)); }

  const int64_t inputs_, size_, stride_;
  const int planes_;
  bf16* data_;
  float* units_;
  int64_t* sums_;
};

}  // namespace rhizome

#endif
