// What 32 inputs add to the sums of a segment (linear_task_segments.h): whole numbers of 32 bits, exact in any order.
//
// Without dot products of bytes, VPMADDUBSW multiplies 32 of them and adds up those of two inputs in 16 bits, which hold the
// sums of 32 inputs of codes of 4 bits, and of 16 of FP4's numbers: half of the instructions that products of 16 bits take.
#pragma once

#include <cstring>

#include "byte_vectors.h"
#include "linear_task.h"
#include "registers.h"

#if defined(RHIZOME_SEGMENTS)

namespace rhizome {

inline constexpr int kSegmentTurns = 4;  // calls of `ahead` per block, one for each eight inputs

inline int32_t four_of(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof four);
  return four;
}

#if defined(RHIZOME_INT8_DOTS)
template <int kRows>
__attribute__((always_inline)) inline void add_four(Bytes (&sums)[kRows][2], const int8_t* x, int64_t x_stride, const Bytes (&codes)[2]) {
#pragma GCC unroll 9
  for (int row = 0; row < kRows; ++row) {
    const int32_t four = four_of(x + row * x_stride);
    sums[row][0] = byte_dots(sums[row][0], codes[0], four);
    sums[row][1] = byte_dots(sums[row][1], codes[1], four);
  }
}

// Rows of x are `x_stride` bytes apart, codes are those of two vectors of outputs.
template <int kRows, class Codes>
__attribute__((always_inline)) inline void add_block(Bytes (&sums)[kRows][2], const int8_t* x, int64_t x_stride, Codes& codes,
                                                     LinesAhead& ahead) {
  for (int turn = 0; turn < kSegmentTurns; ++turn, x += 8, codes.next_eight()) {
    ahead();
    const Bytes first[2] = {codes.template four<false>(0), codes.template four<false>(1)};
    const Bytes second[2] = {codes.template four<true>(0), codes.template four<true>(1)};
    add_four(sums, x, x_stride, first);
    add_four(sums, x + 4, x_stride, second);
  }
}
#else
typedef int16_t twos __attribute__((vector_size(32)));  // sums of 16 bits, two for each output

template <int kRows>
__attribute__((always_inline)) inline void add_four(twos (&sums)[kRows][2], const int8_t* x, int64_t x_stride, Bytes left, Bytes right) {
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    const Bytes four = _mm256_set1_epi32(four_of(x + row * x_stride));
    twos of_left = sums[row][0] + (twos)_mm256_maddubs_epi16(left, four);
    twos of_right = sums[row][1] + (twos)_mm256_maddubs_epi16(right, four);
    hold_in_order(of_left), hold_in_order(of_right);  // compilers would add products to each other
    sums[row][0] = of_left, sums[row][1] = of_right;
  }
}

template <int kRows, class Codes>
__attribute__((always_inline)) inline void add_block(Bytes (&sums)[kRows][2], const int8_t* x, int64_t x_stride, Codes& codes,
                                                     LinesAhead& ahead) {
  constexpr int kExact = 32767 / (4 * 127 * Codes::kMost);  // turns of four products for each sum
  static_assert(kExact == 4 || kExact == 2);
  for (int begin = 0; begin < kSegmentTurns; begin += kExact) {
    twos exact[kRows][2];
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) exact[row][0] = exact[row][1] = twos{};
    asm volatile("" : : "r"(sums) : "memory");  // where these sums wait meanwhile
    for (int turn = 0; turn < kExact; ++turn, x += 8, codes.next_eight()) {
      ahead();
      add_four(exact, x, x_stride, codes.template four<false>(0), codes.template four<false>(1));
      add_four(exact, x + 4, x_stride, codes.template four<true>(0), codes.template four<true>(1));
    }
    asm volatile("" : : "r"(sums) : "memory");
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v)
        sums[row][v] = _mm256_add_epi32(sums[row][v], _mm256_madd_epi16((Bytes)exact[row][v], _mm256_set1_epi16(1)));
  }
}
#endif

}  // namespace rhizome

#endif
