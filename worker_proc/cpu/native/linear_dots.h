// The micro-kernel for AVX512's dot products of bfloat16 pairs (VDPBF16PS): a panel of 32 outputs are two vectors of sums for
// each row, so that every pair of inputs of a row, broadcast, is multiplied twice.
#pragma once

#if defined(__AVX512BF16__)

#include <immintrin.h>

#include "linear_task.h"

namespace rhizome {

inline constexpr int kDotRows = 8;       // that are multiplied together
inline constexpr int kMostDotRows = 12;  // the same where there are not many: sums are 24 of the 32 registers then
inline constexpr int kDotSlots = 8;      // per block of inputs, in each of which something else is done: `aside` is called

// sums[row * 32 + output] = (what is there if `adding`) + x @ weights.T, for kRows rows, one panel, `steps` blocks of inputs.
template <int kRows, class Aside>
__attribute__((noinline)) void dot_block(const bf16* x, int64_t x_stride, const bf16* weights, int64_t steps, float* sums,
                                         bool adding, Aside& aside) {
  __m512 low[kRows], high[kRows];
  for (int row = 0; row < kRows; ++row) {
    low[row] = adding ? _mm512_loadu_ps(sums + row * kPanel) : _mm512_setzero_ps();
    high[row] = adding ? _mm512_loadu_ps(sums + row * kPanel + kTile) : _mm512_setzero_ps();
  }
  for (; steps > 0; --steps, x += 32, weights += 2 * kTileElements) {
    for (int first = 0; first < kTile; first += kTile / kDotSlots) {
      aside();
      for (int pair = first; pair < first + kTile / kDotSlots; ++pair) {
        const auto left = (__m512bh)_mm512_loadu_si512(weights + pair * 32);
        const auto right = (__m512bh)_mm512_loadu_si512(weights + kTileElements + pair * 32);
        for (int row = 0; row < kRows; ++row) {
          int32_t both;
          memcpy(&both, x + row * x_stride + 2 * pair, 4);
          const auto inputs = (__m512bh)_mm512_set1_epi32(both);
          low[row] = _mm512_dpbf16_ps(low[row], inputs, left);
          high[row] = _mm512_dpbf16_ps(high[row], inputs, right);
        }
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    _mm512_storeu_ps(sums + row * kPanel, low[row]);
    _mm512_storeu_ps(sums + row * kPanel + kTile, high[row]);
  }
}

template <class Aside, int... kCounts>
inline void dot_block_of(int rows, const bf16* x, int64_t x_stride, const bf16* weights, int64_t steps, float* sums,
                         bool adding, Aside& aside, std::integer_sequence<int, kCounts...>) {
  using Block = void (*)(const bf16*, int64_t, const bf16*, int64_t, float*, bool, Aside&);
  static constexpr Block kBlocks[] = {dot_block<kCounts + 1, Aside>...};
  kBlocks[rows - 1](x, x_stride, weights, steps, sums, adding, aside);
}

// How often `dot_rows` goes by the weights for so many rows.
inline int dot_passes(int64_t rows) { return rows <= kMostDotRows ? 1 : static_cast<int>((rows + kDotRows - 1) / kDotRows); }

// As `dot_block`, for at most kBlockRows rows, which are shared out evenly. The bits of a row do not depend on it.
template <class Aside>
inline void dot_rows(const bf16* x, int64_t x_stride, int rows, const bf16* weights, int64_t steps, float* sums,
                     bool adding, Aside& aside) {
  for (int passes = dot_passes(rows); passes > 0; --passes) {
    const int now = (rows + passes - 1) / passes;
    dot_block_of(now, x, x_stride, weights, steps, sums, adding, aside, std::make_integer_sequence<int, kMostDotRows>());
    x += now * x_stride, sums += now * kPanel, rows -= now;
  }
}

}  // namespace rhizome

#endif
