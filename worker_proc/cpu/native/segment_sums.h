// What 32 inputs add to the sums of a segment (linear_task_segments.h): whole numbers of 32 bits, exact in any order.
//
// Without dot products of bytes, VPMADDUBSW multiplies 32 of them and adds up those of two inputs in 16 bits, which hold the
// sums of 32 inputs of codes of 4 bits, and of 16 of FP4's numbers: half of the instructions that products of 16 bits take.
#pragma once

#include "byte_vectors.h"
#include "linear_task.h"
#include "registers.h"

#if defined(RHIZOME_SEGMENTS)

namespace rhizome {

#if defined(RHIZOME_INT8_DOTS)
inline constexpr int kSegmentTurns = 4;  // calls of `ahead` per block
#else
inline constexpr int kSegmentTurns = 1;
#endif

#if defined(RHIZOME_INT8_DOTS)
template <int kRows>
__attribute__((always_inline)) inline void add_four(Bytes (&sums)[kRows][2], const int8_t* x, int64_t x_stride,
                                                    const Bytes (&codes)[2]) {
#pragma GCC unroll 9
  for (int row = 0; row < kRows; ++row) {
    const int32_t four = four_of(x + row * x_stride);
    sums[row][0] = byte_dots(sums[row][0], codes[0], four);
    sums[row][1] = byte_dots(sums[row][1], codes[1], four);
  }
}

// Adds the products of a block with vector kVector of outputs.
template <int kVector, int kRows, class Codes>
__attribute__((always_inline)) inline void add_vector(Bytes (&sums)[kRows][2], const int8_t* x, int64_t x_stride, Codes& codes) {
#pragma GCC unroll 4
  for (int eight = 0; eight < 4; ++eight, x += 8, codes.next_eight()) {
    const Bytes first = held_in_order(codes.template four<false>(kVector));
    const Bytes second = held_in_order(codes.template four<true>(kVector));
#pragma GCC unroll 9
    for (int row = 0; row < kRows; ++row) {
      sums[row][kVector] = byte_dots(sums[row][kVector], first, four_of(x + row * x_stride));
      sums[row][kVector] = byte_dots(sums[row][kVector], second, four_of(x + row * x_stride + 4));
    }
  }
}

// The sums of `steps` blocks of a segment, from first_of(row) on. Rows of x are `x_stride` bytes apart, codes are those of two
// vectors of outputs. kShort: there is one block.
template <bool kShort, int kRows, class First, class Codes>
__attribute__((always_inline)) inline void sum_segment(Bytes (&sums)[kRows][2], First first_of, int64_t steps, const int8_t* x,
                                                       int64_t x_stride, Codes& codes, LinesAhead& ahead) {
#pragma GCC unroll 9
  for (int row = 0; row < kRows; ++row) sums[row][0] = sums[row][1] = first_of(row);
  if constexpr (kRows <= Codes::kInTurn) {
    for (; steps > 0; --steps, codes.next_block(), x += 32) {
      for (int turn = 0; turn < kSegmentTurns; ++turn) ahead();
      Codes again = codes;
      add_vector<0>(sums, x, x_stride, again);
      add_vector<1>(sums, x, x_stride, codes);
    }
    return;
  }
  for (; steps > 0; --steps, codes.next_block())
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

// Adds the products of four inputs, or begins with them.
template <bool kAdding, int kRows>
__attribute__((always_inline)) inline void add_four(twos (&sums)[kRows][2], const int8_t* x, int64_t x_stride, Bytes left,
                                                    Bytes right) {
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    const Bytes four = _mm256_set1_epi32(four_of(x + row * x_stride));
    twos of_left = (twos)_mm256_maddubs_epi16(left, four), of_right = (twos)_mm256_maddubs_epi16(right, four);
    if constexpr (kAdding) of_left += sums[row][0], of_right += sums[row][1];
    of_left = held_in_order(of_left), of_right = held_in_order(of_right);  // compilers would add products to each other
    sums[row][0] = of_left, sums[row][1] = of_right;
  }
}

// The first block of a segment is added to first_of(row).
template <bool kFirst, int kRows, class First, class Codes>
__attribute__((always_inline)) inline void add_block(Bytes (&sums)[kRows][2], First first_of, const int8_t* x, int64_t x_stride,
                                                     Codes& codes, LinesAhead& ahead) {
  constexpr int kExact = 32767 / (4 * 127 * Codes::kMost);  // turns of four products for each sum
  static_assert(kExact == 4 || kExact == 2);
  ahead();
#pragma GCC unroll 2
  for (int begin = 0; begin < 4; begin += kExact) {
    twos exact[kRows][2];
    const bool first = kFirst && begin == 0;
    if constexpr (!kFirst) asm volatile("" : : "r"(sums) : "memory");  // where these sums wait meanwhile
    add_four<false>(exact, x, x_stride, codes.template four<false>(0), codes.template four<false>(1));
    add_four<true>(exact, x + 4, x_stride, codes.template four<true>(0), codes.template four<true>(1));
    for (int turn = 1; turn < kExact; ++turn) {
      x += 8, codes.next_eight();
      add_four<true>(exact, x, x_stride, codes.template four<false>(0), codes.template four<false>(1));
      add_four<true>(exact, x + 4, x_stride, codes.template four<true>(0), codes.template four<true>(1));
    }
    x += 8, codes.next_eight();
    if constexpr (!kFirst) asm volatile("" : : "r"(sums) : "memory");
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const Bytes whole = _mm256_madd_epi16((Bytes)exact[row][v], _mm256_set1_epi16(1));
        sums[row][v] = _mm256_add_epi32(first ? first_of(row) : sums[row][v], whole);
      }
  }
}

// As above.
template <bool kShort, int kRows, class First, class Codes>
__attribute__((always_inline)) inline void sum_segment(Bytes (&sums)[kRows][2], First first_of, int64_t steps, const int8_t* x,
                                                       int64_t x_stride, Codes& codes, LinesAhead& ahead) {
  add_block<true>(sums, first_of, x, x_stride, codes, ahead);
  codes.next_block(), x += 32;
  if constexpr (!kShort)
    for (const int8_t* const end = x + 32 * (steps - 1); x < end; codes.next_block(), x += 32)
      add_block<false>(sums, first_of, x, x_stride, codes, ahead);
}
#endif

}  // namespace rhizome

#endif
