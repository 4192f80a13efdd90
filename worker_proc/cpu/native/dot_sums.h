// Sums of AVX512's dot products of bfloat16 pairs (VDPBF16PS), as the kernels for products and for attention make them.
#pragma once

#if defined(__AVX512BF16__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace rhizome {

// A pair of numbers, in all lanes.
__attribute__((always_inline)) inline __m512bh pair_of(const uint16_t* x) {
  int32_t both;
  std::memcpy(&both, x, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}

// 32 sums for each of kRows rows, in registers. Loops over rows are unrolled by order: g++ 12 keeps sums in memory otherwise.
template <int kRows>
struct DotSums {
  __m512 low[kRows] = {}, high[kRows] = {};

  // The rows of `from` are `stride` apart.
  __attribute__((always_inline)) void load(const float* from, int64_t stride) {
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      low[row] = _mm512_loadu_ps(from + row * stride);
      high[row] = _mm512_loadu_ps(from + row * stride + 16);
    }
  }

  // Adds the products of one pair of numbers of each row, `x_stride` apart, with 32 others, 16 pairs in each vector.
  __attribute__((always_inline)) void add(const uint16_t* x, int64_t x_stride, __m512i left, __m512i right) {
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      const __m512bh pair = pair_of(x + row * x_stride);
      low[row] = _mm512_dpbf16_ps(low[row], pair, (__m512bh)left);
      high[row] = _mm512_dpbf16_ps(high[row], pair, (__m512bh)right);
    }
  }

  // The same with 16 others, for one of the vectors of sums.
  __attribute__((always_inline)) static void add_to(__m512 (&sums)[kRows], const uint16_t* x, int64_t x_stride, __m512i weights) {
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) sums[row] = _mm512_dpbf16_ps(sums[row], pair_of(x + row * x_stride), (__m512bh)weights);
  }

  __attribute__((always_inline)) void store(float* to, int64_t stride) const {
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      _mm512_storeu_ps(to + row * stride, low[row]);
      _mm512_storeu_ps(to + row * stride + 16, high[row]);
    }
  }
};

}  // namespace rhizome

#endif
