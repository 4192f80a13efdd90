// Codes for AVX512's dot products of bfloat16, which holds their numbers exactly (code_numbers.h): they are multiplied as they are,
// and scales multiply sums, so that no weight is rounded.
//
// In groups, a segment, up to 256 inputs of a group, is added up by itself; its sums, times their scales, are added to those before
// with one rounding. What zeros are worth is subtracted before, and the numbers below zero of scale_forms.h after: times the sum of
// the segment's x. With one scale per output, `scale_sums` (linear_quantized.h) multiplies the sums of all inputs.
#pragma once

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "code_numbers.h"
#include "linear_dots.h"
#include "linear_quantized.h"
#include "summed_rows.h"

namespace rhizome {

template <Format kFormat>
inline constexpr int64_t kTileCodes = code_bytes(kFormat, kTileElements);

constexpr int kNumberRows = 6;  // that are multiplied together where there are many: their totals stay in registers, too

// That many are multiplied together where there are many: zeros take registers, too.
constexpr int number_rows(Format format, bool zeros) { return by_channel(format) ? kDotRows : zeros ? kNumberRows - 1 : kNumberRows; }

// One block of inputs after the other; what codes are goes to `plain` as well if kKeep.
template <Format kFormat, bool kKeep>
class NumberBlocks {
 public:
  NumberBlocks(const uint8_t* codes, bf16* plain) : codes_(codes), plain_(plain) {}

  // Adds the products of one more.
  template <int kRows>
  __attribute__((always_inline)) void add_to(DotSums<kRows>& sums, const bf16* x, int64_t x_stride, LinesAhead& ahead) {
    if constexpr (kRows < kNumberRows) {  // whose few sums wait for each other
#pragma GCC unroll 4
      for (int eight = 0; eight < kTile / 4; ++eight, x += 8) add_eight(eight, sums, x, x_stride, ahead);
    } else {
      for (int eight = 0; eight < kTile / 4; ++eight, x += 8) add_eight(eight, sums, x, x_stride, ahead);
    }
    codes_ += 2 * kTileCodes<kFormat>;
    if constexpr (kKeep) plain_ += 2 * kTileElements;
  }

 private:
  // Of eight inputs.
  template <int kRows>
  __attribute__((always_inline)) void add_eight(int eight, DotSums<kRows>& sums, const bf16* x, int64_t x_stride, LinesAhead& ahead) {
    using Numbers = CodeNumbers<kFormat>;
    for (int turn = 0; turn < kDotTurns / 4; ++turn) ahead();
    __m512i left[4], right[4];
    Numbers::of_eight(codes_, eight, left);
    Numbers::of_eight(codes_ + kTileCodes<kFormat>, eight, right);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      if constexpr (kKeep) {
        _mm512_store_si512(plain_ + (4 * eight + i) * 32, left[i]);
        _mm512_store_si512(plain_ + (4 * eight + i) * 32 + kTileElements, right[i]);
      }
      sums.add(x + 2 * i, x_stride, left[i], right[i]);
    }
  }

  const uint8_t* codes_;
  bf16* plain_;
};

// The same of numbers that were kept.
class PlainBlocks {
 public:
  explicit PlainBlocks(const bf16* plain) : plain_(plain) {}

  template <int kRows>
  __attribute__((always_inline)) void add_to(DotSums<kRows>& sums, const bf16* x, int64_t x_stride, LinesAhead& ahead) {
    dot_step(sums, x, x_stride, plain_, ahead);
    plain_ += 2 * kTileElements;
  }

 private:
  const bf16* plain_;
};

// Where a pass works: blocks [step, step + now) of a panel.
struct NumberPlace {
  const PackedMatrix& weights;
  int64_t panel, step, now;
};

// What the codes 0 of a matrix stand for: what is as far from the middle code, what zeros say, or numbers below zero.
enum class CodeZeros { kMiddle, kZeros, kBelow };

// What the sums of a segment are multiplied with, and the sum of its x, as codes less the middle one are multiplied. Scales are
// floats, or FP4's bytes.
template <class Number, CodeZeros kZeros, ScaleForm kForm>
class SegmentScales {
 public:
  // From a group on.
  SegmentScales(const PackedMatrix& weights, int64_t panel, int64_t group) : middle_(middle_code(weights.format)) {
    const int64_t all = groups(weights);
    if constexpr (kForm == ScaleForm::kFactors) {
      group_ = group % kFactorGroups;
      scales_ = factors_at(weights, panel, all, group);
    } else {
      scales_ = reinterpret_cast<const uint8_t*>(weights.scales) + (panel * all + group) * kBytes;
      if constexpr (kZeros != CodeZeros::kMiddle) zeros_ = weights.zeros + (panel * all + group) * kPanel;
    }
  }

  GroupScales of(int output) const {
    GroupScales scales{};
    if constexpr (kForm == ScaleForm::kFactors) {
      scales = factors_of(scales_, group_, output);
      scales.zero = held(scales.zero);  // is rounded
    } else if constexpr (kForm == ScaleForm::kFloat16) {
      scales.scale = load_float16(scales_ + 2 * output);
    } else {
      scales.scale = load_scales(reinterpret_cast<const Number*>(scales_) + output);
      if constexpr (kZeros != CodeZeros::kMiddle) scales.zero = load(zeros_ + output);
    }
    if constexpr (kZeros == CodeZeros::kZeros) scales.zero -= middle_;
    if constexpr (kZeros == CodeZeros::kBelow) {
      floats of_middle = scales.scale * middle_;
      of_middle = held(of_middle);  // compilers would subtract it before it is rounded
      scales.zero -= of_middle;
    }
    return scales;
  }
  void next() {
    if constexpr (kForm == ScaleForm::kFactors) {
      if (++group_ == kFactorGroups) group_ = 0, scales_ += kFactorBytes;
      return;
    }
    scales_ += kBytes;
    if constexpr (kZeros != CodeZeros::kMiddle) zeros_ += kPanel;
  }

  // sum + the products of a segment.
  static __m512 added(__m512 sum, __m512 products, const GroupScales& scales, [[maybe_unused]] const bf16* of_x) {
    const auto less = [&](__m512 from) {
      float x;
      std::memcpy(&x, of_x, sizeof x);
      return _mm512_fnmadd_ps(_mm512_set1_ps(x), (__m512)scales.zero, from);
    };
    if constexpr (kZeros == CodeZeros::kZeros) products = less(products);
    sum = _mm512_fmadd_ps(products, (__m512)scales.scale, sum);
    if constexpr (kZeros == CodeZeros::kBelow) sum = less(sum);
    return sum;
  }

 private:
  static constexpr int64_t kBytes = kPanel * (kForm == ScaleForm::kFloat16 ? 2 : sizeof(Number));  // of a group

  const float middle_;
  const uint8_t* scales_;
  const float* zeros_ = nullptr;
  int64_t group_ = 0;
};

// In groups, kLeast to kMost rows.
template <class Scales, class Blocks, int kLeast, int kMost>
struct GroupDots {
  static constexpr int kLeastRows = kLeast, kMostRows = kMost;
  const NumberPlace& place;
  Blocks blocks;

  template <int kRows>
  static void run(const GroupDots& from, const DotRows& rows, int64_t steps, LinesAhead& outside) {
    LinesAhead ahead = outside;
    const NumberPlace& place = from.place;
    Blocks blocks = from.blocks;
    const Segments segments(place.weights);
    Scales scales(place.weights, place.panel, segments.group(place.step));
    const bf16* x = rows.x;
    const bf16* x_sums = summed_behind(x, place.weights, place.step) + 2 * segments.index(place.step);
    int64_t of_group = segments.left(place.step), of_segment = kSteps - place.step % kSteps;  // blocks that are left
    DotSums<kRows> totals;
    if (rows.adding) totals.load(rows.sums, kPanel);
    for (const bf16* const end = x + 32 * steps; x < end; x_sums += 2) {
      DotSums<kRows> sums;
      const int64_t now = std::min({of_group, of_segment, (end - x) / 32});
      for (const bf16* const stop = x + 32 * now; x < stop; x += 32) blocks.add_to(sums, x, rows.x_stride, ahead);
      const GroupScales low = scales.of(0), high = scales.of(kTile);
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const bf16* const of_x = x_sums + row * rows.x_stride;
        totals.low[row] = scales.added(totals.low[row], sums.low[row], low, of_x);
        totals.high[row] = scales.added(totals.high[row], sums.high[row], high, of_x);
      }
      of_group -= now, of_segment = of_segment > now ? of_segment - now : kSteps;
      if (of_group == 0) of_group = segments.of_group(), scales.next();
    }
    totals.store(rows.sums, kPanel);
    outside = ahead;
  }
};

// With one scale per output.
template <class Blocks, int kLeast, int kMost>
struct ChannelDots {
  static constexpr int kLeastRows = kLeast, kMostRows = kMost;
  Blocks blocks;

  template <int kRows>
  static void run(const ChannelDots& from, const DotRows& rows, int64_t steps, LinesAhead& outside) {
    LinesAhead ahead = outside;
    Blocks blocks = from.blocks;
    DotSums<kRows> sums;
    if (rows.adding) sums.load(rows.sums, kPanel);
    for (const bf16 *x = rows.x, *const end = x + 32 * steps; x < end; x += 32) blocks.add_to(sums, x, rows.x_stride, ahead);
    sums.store(rows.sums, kPanel);
    outside = ahead;
  }
};

// What follows takes `count` rows of a format `as_numbers`. What the codes are goes to `plain`, unless it is null, for the passes that
// follow a first one; they are of at most `number_rows`.
void nibble_number_dots(const NumberPlace& place, int count, const DotRows& rows, LinesAhead& ahead, bf16* plain);
void byte_number_dots(const NumberPlace& place, int count, const DotRows& rows, LinesAhead& ahead, bf16* plain);

// The same of what is in `plain`, in groups.
void kept_number_dots(const NumberPlace& place, int count, const DotRows& rows, LinesAhead& ahead, const bf16* plain);

template <Format kFormat, CodeZeros kZeros, ScaleForm kForm = ScaleForm::kFloat32>
inline void group_dots(const NumberPlace& place, int count, const DotRows& rows, LinesAhead& ahead, bf16* plain) {
  using Scales = SegmentScales<Scale<kFormat>, kZeros, kForm>;
  const uint8_t* const codes = codes_at(place.weights, place.panel, place.step);
  if constexpr (kForm == ScaleForm::kFloat32)  // which others have become where there are several passes
    if (plain != nullptr) {
      constexpr int kMost = number_rows(kFormat, kZeros != CodeZeros::kMiddle), kLeast = least_of_first_pass(kMost);
      using Blocks = NumberBlocks<kFormat, true>;
      return dots(count, GroupDots<Scales, Blocks, kLeast, kMost>{place, Blocks(codes, plain)}, rows, place.now, ahead);
    }
  using Blocks = NumberBlocks<kFormat, false>;
  dots(count, GroupDots<Scales, Blocks, 1, kMostDotRows>{place, Blocks(codes, nullptr)}, rows, place.now, ahead);
}

}  // namespace rhizome

#endif
