// The micro-kernels for AVX512's dot products of bfloat16 pairs (VDPBF16PS): a panel of 32 outputs are two vectors of sums for
// each row, so that every pair of inputs of a row, broadcast, is multiplied twice.
#pragma once

#if defined(__AVX512BF16__)

#include <immintrin.h>

#include <utility>

#include "dot_sums.h"
#include "linear_compressed.h"
#include "linear_task.h"
#include "registers.h"

namespace rhizome {

inline constexpr int kDotRows = 8;       // that are multiplied together
inline constexpr int kMostDotRows = 11;  // the same where there are not many: with sums of 12, compressed weights lack registers

// What is multiplied: rows of x, and the sums of a panel, [rows][32], which are added to what is there if `adding`.
struct DotRows {
  const bf16* x;
  int64_t x_stride;
  float* sums;
  bool adding;
};

// Of rows that are too many for one pass, the least that a first one takes, if they are cut evenly into passes of at most `at_once`.
constexpr int least_of_first_pass(int at_once) {
  int least = at_once;
  for (int rows = kMostDotRows + 1; rows <= kBlockRows; ++rows) {
    const int passes = (rows + at_once - 1) / at_once, first = (rows + passes - 1) / passes;
    if (first < least) least = first;
  }
  return least;
}

constexpr int kDotTurns = 8;  // calls of `ahead` per block of inputs

// Up to so many rows take one tile after the other, so that lines are read in the order in which they lie: the processor finds such
// a stream by itself.
constexpr int kPlainInTurn = 5, kInflatedInTurn = 2;

// One block of inputs of a tile.
template <int kRows>
__attribute__((always_inline)) inline void dot_tile(__m512 (&sums)[kRows], const bf16* x, int64_t x_stride, const bf16* weights,
                                                    LinesAhead& ahead) {
  for (int pair = 0; pair < kTile; pair += 2 * kTile / kDotTurns) {
    ahead();
#pragma GCC unroll 4
    for (int i = pair; i < pair + 2 * kTile / kDotTurns; ++i)
      DotSums<kRows>::add_to(sums, x + 2 * i, x_stride, held_in_order(_mm512_loadu_si512(weights + i * 32)));
  }
}

// One block of inputs.
template <int kRows>
__attribute__((always_inline)) inline void dot_step(DotSums<kRows>& sums, const bf16* x, int64_t x_stride,
                                                    const bf16* weights, LinesAhead& ahead) {
  for (int pair = 0; pair < kTile; pair += kTile / kDotTurns) {
    ahead();
    for (int i = pair; i < pair + kTile / kDotTurns; ++i)
      sums.add(x + 2 * i, x_stride, _mm512_loadu_si512(weights + i * 32),
               _mm512_loadu_si512(weights + kTileElements + i * 32));
  }
}

// `steps` blocks of inputs of plain weights.
struct PlainDots {
  static constexpr int kLeastRows = 1, kMostRows = kMostDotRows;
  const bf16* weights;

  template <int kRows>
  static void run(const PlainDots& from, const DotRows& rows, int64_t steps, LinesAhead& outside) {
    LinesAhead ahead = outside;  // in registers
    DotSums<kRows> sums;
    if (rows.adding) sums.load(rows.sums, kPanel);
    const bf16 *x = rows.x, *weights = from.weights;
    for (; steps > 0; --steps, x += 32, weights += 2 * kTileElements) {
      if constexpr (kRows <= kPlainInTurn) {
        dot_tile(sums.low, x, rows.x_stride, weights, ahead);
        dot_tile(sums.high, x, rows.x_stride, weights + kTileElements, ahead);
      } else {
        dot_step(sums, x, rows.x_stride, weights, ahead);
      }
    }
    sums.store(rows.sums, kPanel);
    outside = ahead;
  }
};

// `steps` blocks of inputs from `block` on of compressed weights, which are inflated into registers; to `plain` as well, where
// a block has exceptions and, if kKeep, always.
template <bool kKeep>
struct InflatedDots {
  static constexpr int kLeastRows = kKeep ? least_of_first_pass(kDotRows) : 1;  // they are kept for further passes
  static constexpr int kMostRows = kKeep ? kDotRows : kMostDotRows;
  const PackedMatrix& weights;
  int64_t block;
  bf16* plain;

  template <int kRows>
  static void run(const InflatedDots& from, const DotRows& rows, int64_t steps, LinesAhead& outside) {
    LinesAhead ahead = outside;
    DotSums<kRows> sums;
    if (rows.adding) sums.load(rows.sums, kPanel);
    const Inflater inflater(from.weights);
    const bf16* x = rows.x;
    bf16* plain = from.plain;
    const uint8_t* packs = compressed_block(from.weights, from.block);
    const uint32_t* const starts = from.weights.exception_starts + from.block;
    for (int64_t step = 0; step < steps; ++step, x += 32, packs += kCompressedBlock, plain += 2 * kTileElements) {
      if (starts[step] != starts[step + 1]) {
        for (int pack = 0; pack < kBlockPacks; ++pack) inflater.inflate(packs + pack * kPackBytes, plain + pack * kPackWeights);
        put_exceptions(from.weights, from.block + step, from.block + step + 1, plain);
        dot_step(sums, x, rows.x_stride, plain, ahead);
        continue;
      }
      if constexpr (!kKeep && kRows <= kInflatedInTurn) {
        add_tile(sums.low, inflater, packs, x, rows.x_stride, ahead);
        add_tile(sums.high, inflater, packs + kCompressedBlock / 2, x, rows.x_stride, ahead);
        continue;
      }
      for (int pack = 0; pack < kBlockPacks / 2; ++pack) {  // of the left tile and of the right one
        const uint8_t *const left = packs + pack * kPackBytes, *const right = left + kCompressedBlock / 2;
        const __m512i left_codes = _mm512_loadu_si512(left), right_codes = _mm512_loadu_si512(right);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          ahead();
          __m512i a[2], b[2];
          inflater.rows(left_codes, Inflater::low_bytes(left, half), half, a);
          inflater.rows(right_codes, Inflater::low_bytes(right, half), half, b);
#pragma GCC unroll 2
          for (int i = 0; i < 2; ++i) {
            if constexpr (kKeep) {
              bf16* const to = plain + pack * kPackWeights + (2 * half + i) * 32;
              _mm512_store_si512(to, a[i]);
              _mm512_store_si512(to + kTileElements, b[i]);
            }
            sums.add(x + 8 * pack + 4 * half + 2 * i, rows.x_stride, a[i], b[i]);
          }
        }
      }
    }
    sums.store(rows.sums, kPanel);
    outside = ahead;
  }

 private:
  template <int kRows>
  __attribute__((always_inline)) static void add_tile(__m512 (&sums)[kRows], const Inflater& inflater, const uint8_t* packs,
                                                      const bf16* x, int64_t x_stride, LinesAhead& ahead) {
    for (int pack = 0; pack < kBlockPacks / 2; ++pack, packs += kPackBytes, x += 8) {
      __m512i lines[kPackBytes / 64];
      for (int line = 0; line < kPackBytes / 64; ++line) lines[line] = held_in_order(_mm512_loadu_si512(packs + 64 * line));
      ahead();
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        __m512i two[2];
        inflater.rows(lines[0], lines[1 + half], half, two);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) DotSums<kRows>::add_to(sums, x + 4 * half + 2 * i, x_stride, two[i]);
      }
    }
  }
};

template <class Weights, int... kCounts>
inline void dots_of(int count, const Weights& from, const DotRows& rows, int64_t steps, LinesAhead& ahead,
                    std::integer_sequence<int, kCounts...>) {
  using Run = void (*)(const Weights&, const DotRows&, int64_t, LinesAhead&);
  static constexpr Run kRuns[] = {Weights::template run<Weights::kLeastRows + kCounts>...};
  kRuns[count - Weights::kLeastRows](from, rows, steps, ahead);
}

// For `count` rows, Weights::kLeastRows to kMostRows.
template <class Weights>
inline void dots(int count, const Weights& from, const DotRows& rows, int64_t steps, LinesAhead& ahead) {
  dots_of(count, from, rows, steps, ahead, std::make_integer_sequence<int, Weights::kMostRows - Weights::kLeastRows + 1>());
}

// Whether so many rows go by weights together, which then are not kept as bfloat16.
inline bool in_one_pass(int64_t rows) { return rows <= kMostDotRows; }

}  // namespace rhizome

#endif
