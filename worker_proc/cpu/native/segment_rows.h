// Rows of x in int8 for weights in groups (`in_segments`), with a scale for each segment of inputs: those that a group of weights
// shares, 256 at most. Numbers of x that are much larger than the rest so cost the others of their segment precision alone, as
// in llama.cpp's Q8_0 and OpenVINO's dynamic quantization, and not those of the whole row.
#pragma once

#include "linear_quantized.h"

#if defined(RHIZOME_SEGMENTS)

#include <immintrin.h>

#include <algorithm>
#include <vector>

#include "fixed_point.h"
#include "room.h"
#include "rows.h"

namespace rhizome {

// Blocks of inputs in a segment.
inline int64_t segment_steps(const PackedMatrix& weights) { return std::min<int64_t>(weights.group / 32, kSteps); }

// Until the next ones of the same thread. Behind the numbers of a row are what those of each segment count, float32, and then
// the sums of its numbers, int32.
class SegmentRows {
 public:
  SegmentRows(const bf16* x, int64_t x_stride, int64_t rows, const PackedMatrix& weights)
      : inputs_(32 * blocks(weights.inputs)), segment_(32 * segment_steps(weights)),
        segments_((inputs_ + segment_ - 1) / segment_), stride_(2 * row_stride((inputs_ + 8 * segments_ + 1) / 2)) {
    static thread_local std::vector<int8_t> memory;
    data_ = room_in(memory, rows * stride_);
    for_rows(rows, inputs_, [&](int64_t row) { round(x + row * x_stride, data_ + row * stride_); });
  }

  const int8_t* data() const { return data_; }
  int64_t stride() const { return stride_; }

 private:
  void round(const bf16* from, int8_t* to) const {
    float* const units = reinterpret_cast<float*>(to + inputs_);
    int32_t* const sums = reinterpret_cast<int32_t*>(units + segments_);
    for (int64_t segment = 0; segment < segments_; ++segment) {
      const int64_t begin = segment * segment_, count = std::min(segment_, inputs_ - begin);
      const FixedPoint point(largest_bits(from + begin, count), true);
      units[segment] = point.unit;
      const bool finite = point.unit == point.unit;  // else what the codes are does not matter
      sums[segment] = finite ? round_some(from + begin, count, point.factor, to + begin) : 0;
    }
  }

#if defined(__AVX512BW__)
  static int32_t round_some(const bf16* from, int64_t count, float factor, int8_t* to) {
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += 16) {
      const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
      const __m512i numbers = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)), _mm512_set1_ps(factor)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtsepi32_epi8(numbers));
      sum = _mm512_add_epi32(sum, numbers);
    }
    return _mm512_reduce_add_epi32(sum);
  }
#else
  static int32_t round_some(const bf16* from, int64_t count, float factor, int8_t* to) {
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t number = static_cast<int32_t>(__builtin_nearbyintf(to_float(from[i]) * factor));
      to[i] = static_cast<int8_t>(number);
      sum += number;
    }
    return sum;
  }
#endif

  const int64_t inputs_, segment_, segments_, stride_;
  int8_t* data_;
};

}  // namespace rhizome

#endif
