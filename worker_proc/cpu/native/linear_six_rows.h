// The heart of products with AVX2 alone: six rows by 16 outputs, whose twelve sums, two vectors of weights, a number of x and a mask
// fill the 16 registers. In C++, g++ 12 keeps some of them in memory.
#pragma once

#include "bf16.h"

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)

namespace rhizome {

inline constexpr int kSixRows = 6;

// total[row][v] += x[row][i] * the outputs from 8 v on, for the first and then for the second input of a pair. `pair` is 16
// outputs in the layout of linear.h: a weight of the second input has the upper half of a word. `stride` in bytes, `x3` is the
// fourth row.
inline void add_pair(floats (&total)[kSixRows][2], const float* x, const float* x3, int64_t stride, const void* pair,
                     __m256i upper) {
#define RHIZOME_ROW(number, first, second)            \
  "vbroadcastss " number ", %%ymm14\n\t"              \
  "vfmadd231ps %%ymm12, %%ymm14, %[" first "]\n\t"    \
  "vfmadd231ps %%ymm13, %%ymm14, %[" second "]\n\t"
#define RHIZOME_INPUT(at)                                       \
  RHIZOME_ROW(at "(%[x])", "a0", "b0")                          \
  RHIZOME_ROW(at "(%[x],%[stride])", "a1", "b1")                \
  RHIZOME_ROW(at "(%[x],%[stride],2)", "a2", "b2")              \
  RHIZOME_ROW(at "(%[x3])", "a3", "b3")                         \
  RHIZOME_ROW(at "(%[x],%[stride],4)", "a4", "b4")              \
  RHIZOME_ROW(at "(%[x3],%[stride],2)", "a5", "b5")
  asm("vmovdqu (%[pair]), %%ymm12\n\t"
      "vmovdqu 32(%[pair]), %%ymm13\n\t"
      "vpslld $16, %%ymm12, %%ymm12\n\t"
      "vpslld $16, %%ymm13, %%ymm13\n\t"
      RHIZOME_INPUT("0")
      "vpand (%[pair]), %[upper], %%ymm12\n\t"
      "vpand 32(%[pair]), %[upper], %%ymm13\n\t"
      RHIZOME_INPUT("4")
      : [a0] "+x"(total[0][0]), [b0] "+x"(total[0][1]), [a1] "+x"(total[1][0]), [b1] "+x"(total[1][1]),
        [a2] "+x"(total[2][0]), [b2] "+x"(total[2][1]), [a3] "+x"(total[3][0]), [b3] "+x"(total[3][1]),
        [a4] "+x"(total[4][0]), [b4] "+x"(total[4][1]), [a5] "+x"(total[5][0]), [b5] "+x"(total[5][1])
      : [x] "r"(x), [x3] "r"(x3), [stride] "r"(stride), [pair] "r"(pair), [upper] "x"(upper)
      : "xmm12", "xmm13", "xmm14", "memory");
#undef RHIZOME_INPUT
#undef RHIZOME_ROW
}

}  // namespace rhizome

#endif
