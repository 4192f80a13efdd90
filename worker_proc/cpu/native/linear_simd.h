// The micro-kernel for vector registers that know no dot products of bfloat16: it is widened to float32.
#pragma once

#include "linear.h"

namespace rhizome {

#if defined(__AVX512F__)
inline constexpr int kSimdRows = 8;
#else
inline constexpr int kSimdRows = 4;
#endif

// One tile of 16 outputs for kRows rows: sums[row * 32 + output].
template <int kRows>
inline void simd_tile(const bf16* x, int64_t x_stride, const bf16* tile, int64_t steps, float* sums, bool accumulate) {
  constexpr int kVectors = kTile / kLanes;
  floats total[kRows][kVectors];
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v)
      total[row][v] = accumulate ? load(sums + row * kPanel + v * kLanes) : floats{};
  for (int64_t step = 0; step < steps; ++step, tile += 2 * kTileElements) {
    for (int pair = 0; pair < kTile; ++pair) {
      const bf16* const weights = tile + pair * 2 * kTile;
      const int64_t at = step * 32 + 2 * pair;
      __builtin_prefetch(weights + 512);
      for (int v = 0; v < kVectors; ++v) {
        const words both = *reinterpret_cast<const words*>(weights + v * 2 * kLanes);
        const floats even = (floats)(both << 16), odd = (floats)(both & 0xffff0000u);
        for (int row = 0; row < kRows; ++row) {
          const bf16* const pair_of_row = x + row * x_stride + at;
          total[row][v] += even * to_float(pair_of_row[0]);
          total[row][v] += odd * to_float(pair_of_row[1]);
        }
      }
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v) store(sums + row * kPanel + v * kLanes, total[row][v]);
}

template <int kRows>
inline int simd_rows(const bf16* x, int64_t x_stride, int rows, const bf16* weights, int64_t steps, float* sums,
                     bool accumulate, int done) {
  for (; rows - done >= kRows; done += kRows)
    for (int tile = 0; tile < 2; ++tile)
      simd_tile<kRows>(x + done * x_stride, x_stride, weights + tile * kTileElements, steps,
                       sums + done * kPanel + tile * kTile, accumulate);
  if constexpr (kRows > 1)
    return simd_rows<kRows / 2>(x, x_stride, rows, weights, steps, sums, accumulate, done);
  else
    return done;
}

// sums[row * 32 + output] (+)= x @ weights.T for at most kBlockRows rows, one panel, `steps` blocks of inputs.
inline void simd_block(const bf16* x, int64_t x_stride, int rows, const bf16* weights, int64_t steps, float* sums,
                       bool accumulate) {
  simd_rows<kSimdRows>(x, x_stride, rows, weights, steps, sums, accumulate, 0);
}

}  // namespace rhizome
