// Weights in bytes for AVX512's dot products: codes become bfloat16 in registers, right before they are multiplied.
//
// A vector of 16 numbers is what eight outputs have of a pair of inputs. Two such vectors, rounded to bfloat16 by one
// instruction, are a row of a tile.
#pragma once

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

#include <immintrin.h>

#include "linear_dots.h"
#include "linear_quantized.h"

namespace rhizome {

// The scales of a block, and the zeros if kZeros: of the two halves of both tiles, each number twice.
template <Format kFormat, bool kZeros>
class CodeScales {
 public:
  explicit CodeScales(const PackedMatrix& weights, int64_t panel, int64_t step)
      : scales_(weights.scales + panel * groups(weights) * kPanel),
        zeros_(kZeros ? weights.zeros + panel * groups(weights) * kPanel : nullptr),
        of_group_(std::max(weights.group / 32, 1)), left_(of_group_ - step % of_group_) {
    const int64_t group = step / of_group_ * kPanel;
    if (!by_channel(kFormat)) scales_ += group, zeros_ += kZeros ? group : 0, enter();
  }

  // Goes on to the next block.
  void next() {
    if (by_channel(kFormat) || --left_ > 0) return;
    left_ = of_group_, scales_ += kPanel, zeros_ += kZeros ? kPanel : 0;
    enter();
  }

  // A row of a tile from the codes of its outputs, as float32.
  __m512i row(int tile, __m512 first, __m512 second) const {
    return (__m512i)_mm512_cvtne2ps_pbh(weight(2 * tile + 1, second), weight(2 * tile, first));
  }

 private:
  void enter() {
    const __m512i twice = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    for (int half = 0; half < 4; ++half) {
      scale_[half] = _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(scales_ + 8 * half)));
      if (kZeros) zero_[half] = _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(zeros_ + 8 * half)));
    }
  }

  __m512 weight(int half, __m512 codes) const {
    if constexpr (kZeros) codes = _mm512_sub_ps(codes, zero_[half]);
    if constexpr (!by_channel(kFormat)) codes = _mm512_mul_ps(codes, scale_[half]);
    return codes;
  }

  const float* scales_;
  const float* zeros_;
  int64_t of_group_, left_;
  __m512 scale_[4], zero_[4];
};

// The codes of half of a block, pair of inputs by pair, less the middle one unless kZeros; 8 bits: two bytes for each output.
template <Format kFormat, bool kZeros>
class CodePairs {
 public:
  explicit CodePairs(const uint8_t* codes) : codes_(codes) {}

  void next(__m512 (&left)[2], __m512 (&right)[2]) {
    for (int half = 0; half < 2; ++half)
      left[half] = numbers(codes_ + 16 * half), right[half] = numbers(codes_ + kTileElements + 16 * half);
    codes_ += 32;
  }

 private:
  static __m512 numbers(const uint8_t* from) {
    if constexpr (is_float8(kFormat)) return (__m512)float8_numbers(from);
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_cvtepi32_ps(kZeros ? _mm512_cvtepu8_epi32(codes) : _mm512_cvtepi8_epi32(codes));
  }

  const uint8_t* codes_;
};

// `steps` blocks of inputs from `block` on; widened weights go to `plain` as well if kKeep.
template <Format kFormat, bool kZeros, bool kKeep>
struct CodeDots {
  static constexpr int kMostRows = kKeep ? kDotRows : kMostDotRows;
  const PackedMatrix& weights;
  int64_t block;
  bf16* plain;

  template <int kRows>
  static void run(const CodeDots& from, const DotRows& rows, int64_t steps, LinesAhead& outside) {
    LinesAhead ahead = outside;
    DotSums<kRows> sums;
    if (rows.adding) sums.load(rows.sums, kPanel);
    const int64_t all = blocks(from.weights.inputs), panel = from.block / all, step = from.block % all;
    CodeScales<kFormat, kZeros> scales(from.weights, panel, step);
    const uint8_t* codes = codes_at(from.weights, panel, step);
    const bf16 *x = rows.x, *const end = x + 32 * steps;
    bf16* plain = from.plain;
    while (x < end) {
      for (int half = 0; half < 2; ++half) {
        CodePairs<kFormat, kZeros> pairs(codes + half * code_bytes(kFormat, kTileElements) / 2);
        for (int turn = 0; turn < kDotTurns / 2; ++turn) {
          ahead();
#pragma GCC unroll 2
          for (int i = 0; i < kTile / kDotTurns; ++i, x += 2) {
            __m512 left[2], right[2];
            pairs.next(left, right);
            const __m512i a = scales.row(0, left[0], left[1]), b = scales.row(1, right[0], right[1]);
            if constexpr (kKeep) {
              _mm512_store_si512(plain, a);
              _mm512_store_si512(plain + kTileElements, b);
              plain += 32;
            }
            sums.add(x, rows.x_stride, a, b);
          }
        }
      }
      codes += code_bytes(kFormat, kBlockWeights);
      if constexpr (kKeep) plain += kTileElements;
      if (x < end) scales.next();
    }
    sums.store(rows.sums, kPanel);
    outside = ahead;
  }
};

// For `count` rows of a format that is not `in_nibbles`: blocks [block, block + steps) of the panel they are in. `plain` becomes
// what the codes stand for if `keep`, which takes at most kDotRows rows.
void code_dots(const PackedMatrix& weights, int64_t block, int count, const DotRows& rows, int64_t steps, LinesAhead& ahead,
               bf16* plain, bool keep);

}  // namespace rhizome

#endif
