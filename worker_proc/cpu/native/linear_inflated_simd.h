// Weights in 12 bits with AVX2, for so few rows that they are put together in registers.
#pragma once

#include "linear_plain.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#define RHIZOME_INFLATES_IN_PASSING

namespace rhizome {

inline constexpr int kInflatedRows = 2;  // with more, it takes longer than to put a piece together before

// `simd_pass` for `steps` blocks from `block` on, which are put together in registers, and at `plain` where there are exceptions.
template <int kRows>
__attribute__((noinline)) void inflated_rows(const SimdRows& rows, const PackedMatrix& weights, int64_t block, int64_t steps,
                                             bf16* plain, LinesAhead& outside) {
  static_assert(kSimdTiles<kRows> == 2);
  constexpr int kVectors = kPanel / kLanes, kTilePacks = kBlockPacks / 2;
  LinesAhead ahead = outside;  // in registers
  const float* x = rows.x;
  const int64_t x_stride = rows.x_stride;
  floats total[kRows][kVectors];
  begin_sums(rows, total);
  const words upper = second_mask();
  const Inflater inflater(weights);
  const uint8_t* from = compressed_block(weights, block);
  const uint32_t* exceptions = weights.exception_starts + block;
  for (int64_t step = 0; step < steps; ++step, ++exceptions, from += kCompressedBlock) {
    if (exceptions[0] != exceptions[1]) {
      make_plain(weights, block + step, 1, plain, [] {});
      PlainPiece::Numbers<2> numbers(plain);
      simd_block(total, x, x_stride, numbers, ahead);
      x += 32;
      continue;
    }
    for (int pack = 0; pack < kTilePacks; ++pack) {  // of the left tile and of the right one
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half, x += 4) {
        ahead();
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const uint8_t* const codes = from + (v / 2 * kTilePacks + pack) * kPackBytes + v % 2 * 32;
          __m256i two[2];
          inflater.rows(Inflater::at(codes), codes, half, two);
#pragma GCC unroll 2
          for (int pair = 0; pair < 2; ++pair) {
            const floats numbers[] = {first_of((words)two[pair]), (floats)((words)two[pair] & upper)};
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i)
#pragma GCC unroll 2
              for (int row = 0; row < kRows; ++row) total[row][v] += numbers[i] * x[row * x_stride + 2 * pair + i];
          }
        }
      }
    }
  }
  store_sums(total, rows);
  outside = ahead;
}

// At most kInflatedRows rows.
inline void inflated_pass(int count, const SimdRows& rows, const PackedMatrix& weights, int64_t block, int64_t steps, bf16* plain,
                          LinesAhead& ahead) {
  if (count == 1)
    inflated_rows<1>(rows, weights, block, steps, plain, ahead);
  else
    inflated_rows<2>(rows, weights, block, steps, plain, ahead);
}

}  // namespace rhizome

#else

namespace rhizome {
inline constexpr int kInflatedRows = 0;
}  // namespace rhizome

#endif
