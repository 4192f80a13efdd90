// Products of integer codes without dot products of bfloat16, in integers: rows of x become fixed point numbers of 16 bits, of
// which an instruction multiplies twice as many as of float32.
//
// A row of x is rounded to multiples of 2^-14 of the power of two at its largest number: numbers of bfloat16 down to 1/128 of
// that are kept as they are, smaller ones are off by 2^-16 of the largest at most. A sum of up to 256 inputs is a whole
// number below 2^31, so it is exact, in any order; then it is scaled and added in float32. Weights are not rounded to
// bfloat16 as elsewhere.
//
// Numbers of FP4 are looked up, 12 more than they are, for which the sums of x make up. Codes are stored with the least number
// as the first one, so that PSHUFB finds 0 for the other byte of a pair.
//
// The integer products of rows with a power of two as scale are those of block floating point (Wilkinson, Rounding Errors in
// Algebraic Processes, 1963); pairs of 16 bits into sums of 32 are PMADDWD's.
#pragma once

#include "linear_quantized.h"

#if defined(RHIZOME_INTEGERS)

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>
#include <vector>

#include "fixed_point.h"
#include "parallel.h"
#include "registers.h"
#include "room.h"

namespace rhizome {

inline constexpr int kIntegerRows = 6;        // that are multiplied together
inline constexpr int kIntegerTurns = 2;       // calls of `ahead` per block of inputs
inline constexpr int64_t kMostExact = 256;    // inputs whose products, below 2^15 * 2^8 each, have an exact sum

// Rows of x in fixed point. Behind a row are the sums of all its numbers before each block of 32, and of all of them.
class FixedRows {
 public:
  FixedRows(const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs, bool int8)
      : stride_(inputs + inputs / 16 + kGap) {
    static thread_local std::vector<int16_t> memory;
    static thread_local std::vector<float> units;
    data_ = room_in(memory, rows * stride_);
    units_ = room_in(units, rows);
    const int64_t tasks = (rows + kAlone - 1) / kAlone;
    const auto fix_some = [&](int64_t task, int) {
      for (int64_t row = task * kAlone; row < std::min(rows, (task + 1) * kAlone); ++row)
        units_[row] = fix(x + row * x_stride, inputs, int8, data_ + row * stride_);
    };
    parallel_for(tasks, fix_some);
  }

  const int16_t* data() const { return data_; }
  int64_t stride() const { return stride_; }
  // What each row's numbers are to be multiplied with; NaN where one of them is not finite.
  const float* units() const { return units_; }

 private:
  static constexpr int64_t kGap = 32, kAlone = 8;  // see WideRows

  static float fix(const bf16* x, int64_t inputs, bool int8, int16_t* out) {
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    __m256i most = _mm256_setzero_si256();
    for (int64_t i = 0; i < inputs; i += 16)
      most = _mm256_max_epi16(most, _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)), magnitude));
    alignas(32) uint16_t lanes[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), most);
    const int largest = *std::max_element(lanes, lanes + 16);
    const FixedPoint point(largest, int8);
    const __m256 factor = _mm256_set1_ps(point.factor);
    const auto fixed = [&](const bf16* from) {
      const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
      return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)), factor));
    };
    int32_t* const sums = reinterpret_cast<int32_t*>(out + inputs);
    sums[0] = 0;
    for (int64_t block = 0; block < inputs / 32; ++block) {
      __m256i sum = _mm256_setzero_si256();
      for (int half = 0; half < 2; ++half, x += 16, out += 16) {
        const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(fixed(x), fixed(x + 8)), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), both);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(both, _mm256_set1_epi16(1)));
      }
      alignas(32) int32_t of_block[8];
      _mm256_store_si256(reinterpret_cast<__m256i*>(of_block), sum);
      sums[block + 1] = std::accumulate(of_block, of_block + 8, sums[block]);
    }
    return point.unit;
  }

  int16_t* data_;
  float* units_;
  int64_t stride_;
};

// What is multiplied: rows of x from a block of inputs on, and the sums of a panel, [rows][32].
struct IntegerRows {
  const int16_t* x;
  int64_t x_stride;
  float* sums;
  bool adding;
};

// Vectors of numbers, those of a pair of inputs side by side.
typedef int16_t shorts __attribute__((vector_size(4 * kLanes), aligned(2), may_alias));
typedef uint16_t codewords __attribute__((vector_size(4 * kLanes), aligned(2), may_alias));
typedef int32_t pairs __attribute__((vector_size(4 * kLanes)));  // sums of pairs
inline constexpr int kPairLanes = 2 * kLanes;
inline constexpr int kOfTile = kTile / kLanes;  // vectors of a pair

// Tiles that are multiplied together. One or two rows take both in any case, so that memory is read in its order.
inline constexpr int kWideTiles = 2 / kOfTile;
template <int kRows>
inline constexpr int kIntegerTiles = kRows <= 2 ? 2 : kWideTiles;

// Where a pass works: blocks [step, step + now) of a panel.
struct IntegerPlace {
  const PackedMatrix& weights;
  int64_t groups, panel, step, now;
};

enum class CodeKind { kSigned, kUnsigned, kNibbles, kFloat4 };  // of 8 bits without and with zeros, of 4 bits

// FP4's numbers and kMostFloat4 by code, as codes are stored. The high bytes of `codes` are 0, or anything with AVX512.
inline shorts found_float4(codewords codes) {
  alignas(64) static constexpr auto kFound = [] {
#if defined(__AVX512F__)
    std::array<int16_t, 32> found{};  // twice: an index has five bits, of which the highest is not its own
#else
    std::array<int8_t, 32> found{};  // twice: for either half of a register
#endif
    for (int i = 0; i < 32; ++i) found[i] = static_cast<int8_t>(kFloat4Numbers[i % 16 ^ 15] + kMostFloat4);
    return found;
  }();
#if defined(__AVX512F__)
  return (shorts)_mm512_permutexvar_epi16((__m512i)codes, _mm512_load_si512(kFound.data()));
#else
  return (shorts)_mm256_shuffle_epi8(_mm256_load_si256(reinterpret_cast<const __m256i*>(kFound.data())), (__m256i)codes);
#endif
}

// Codes from a tile of a block of a panel on, widened in registers. The numbers of pair kPair of four that begin here.
template <CodeKind kKind>
class CodesInPassing {
  static constexpr bool kInNibbles = kKind == CodeKind::kNibbles || kKind == CodeKind::kFloat4;
  static constexpr int64_t kTileCodes = kInNibbles ? kTileElements / 2 : kTileElements;

 public:
  static constexpr bool kLess = false;

  CodesInPassing(const IntegerPlace& place, int tile)
      : at_(codes_at(place.weights, place.panel, place.step) + tile * kTileCodes) {}

  template <int kPair>
  shorts numbers(int v) const {
    if constexpr (kInNibbles) {
      const codewords four = *reinterpret_cast<const codewords*>(place_of(v, 2 * kPairLanes));
      const codewords shifted = kPair == 0 ? four : four >> (4 * kPair);
      const codewords codes = kPair == 3 ? shifted : shifted & 15;
      if constexpr (kKind == CodeKind::kFloat4) return found_float4(codes);
      return (shorts)codes;
    } else {
      constexpr bool kWithSign = kKind == CodeKind::kSigned;
      const uint8_t* const from = place_of(v, kPairLanes) + 2 * kTile * kPair;
#if defined(__AVX512F__)
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      return (shorts)(kWithSign ? _mm512_cvtepi8_epi16(bytes) : _mm512_cvtepu8_epi16(bytes));
#else
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      return (shorts)(kWithSign ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes));
#endif
    }
  }
  void next_four() { at_ += kTileCodes / 4; }
  void next_block() { at_ += kTileCodes; }  // over the other tile

 private:
  const uint8_t* place_of(int v, int bytes) const { return at_ + v / kOfTile * kTileCodes + v % kOfTile * bytes; }

  const uint8_t* at_;
};

// Numbers that were widened before, of kWideTiles tiles in the order in which they are used; those of 4 bits without zeros are
// less the middle one.
class WideCodes {
 public:
  static constexpr bool kLess = true;

  explicit WideCodes(const int16_t* numbers) : at_(numbers) {}

  template <int kPair>
  shorts numbers(int v) const {
    return *reinterpret_cast<const shorts*>(at_ + (2 * kPair + v) * kPairLanes);
  }
  void next_four() { at_ += 8 * kPairLanes; }
  void next_block() {}

 private:
  const int16_t* at_;
};

// sums[v] += the products of pairs with those of codes[v], one pair for each sum.
template <int kVectors>
inline void add_pairs(pairs (&sums)[kVectors], shorts both, const shorts (&codes)[kVectors]) {
#if defined(__AVX512VNNI__)
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) sums[v] = (pairs)_mm512_dpwssd_epi32((__m512i)sums[v], (__m512i)both, (__m512i)codes[v]);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v)
    sums[v] = (pairs)_mm256_dpwssd_avx_epi32((__m256i)sums[v], (__m256i)both, (__m256i)codes[v]);
#else
  pairs products[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
#if defined(__AVX512F__)
    products[v] = (pairs)_mm512_madd_epi16((__m512i)both, (__m512i)codes[v]);
#else
    products[v] = (pairs)_mm256_madd_epi16((__m256i)both, (__m256i)codes[v]);
#endif
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) sums[v] += products[v];
#endif
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) sums[v] = held_in_order(sums[v]);  // compilers would add products to each other
}

template <int kPair, int kRows, int kVectors, class Codes>
inline void add_products(pairs (&sums)[kRows][kVectors], const int16_t* x, int64_t x_stride, const Codes& from) {
  shorts codes[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) codes[v] = from.template numbers<kPair>(v);
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    int32_t pair;
    std::memcpy(&pair, x + row * x_stride + 2 * kPair, sizeof pair);
    add_pairs(sums[row], (shorts)(ints{} + pair), codes);
  }
}

// How sums of a group become float32: stored or added as they are, or times scales, less what zeros are worth before.
enum class SumKind { kFirst, kAsTheyAre, kScaled, kLessMiddle, kLessZeros, kLessWholeZeros };

// `less`: codes without zeros are already less the middle one.
inline SumKind sum_kind(const PackedMatrix& weights, bool less, bool adding) {
  if (by_channel(weights.format)) return adding ? SumKind::kAsTheyAre : SumKind::kFirst;
  if (weights.zeros == nullptr) return less || !in_nibbles(weights.format) ? SumKind::kScaled : SumKind::kLessMiddle;
  // In small groups, all sums are exact in float32, and zeros may be any numbers.
  return weights.format == Format::kInt4 && weights.group <= kExactGroup ? SumKind::kLessZeros : SumKind::kLessWholeZeros;
}

// Puts put(v, sum, sum of x, what was there) in the place of the float32 sums of a panel. of_x(row) are the sums of x.
template <int kRows, int kVectors, class OfX, class Put>
__attribute__((always_inline)) inline void put_sums(const pairs (&sums)[kRows][kVectors], OfX of_x, float* to, Put put) {
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    const int32_t x_sum = of_x(row);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* const at = to + row * kPanel + v * kLanes;
      store(at, put(v, sums[row][v], x_sum, load(at)));
    }
  }
}

// Adds the sums of a group with these scales and zeros, or scale(v).
template <int kRows, int kVectors, class OfX, class Scale>
__attribute__((always_inline)) inline void take_sums(SumKind kind, int32_t middle, const pairs (&sums)[kRows][kVectors], OfX of_x, Scale scale,
                                                     const float* zeros, float* to) {
  const auto single = [](pairs whole) { return __builtin_convertvector(whole, floats); };
  switch (kind) {
    case SumKind::kFirst:
      return put_sums(sums, of_x, to, [&](int, pairs sum, int32_t, floats) { return single(sum); });
    case SumKind::kAsTheyAre:
      return put_sums(sums, of_x, to, [&](int, pairs sum, int32_t, floats old) { return old + single(sum); });
    case SumKind::kScaled:
      return put_sums(sums, of_x, to, [&](int v, pairs sum, int32_t, floats old) { return fused_sum(single(sum), scale(v), old); });
    case SumKind::kLessMiddle:
      return put_sums(sums, of_x, to, [&](int v, pairs sum, int32_t x_sum, floats old) {
        return fused_sum(single(sum - middle * x_sum), scale(v), old);
      });
    case SumKind::kLessZeros:
      return put_sums(sums, of_x, to, [&](int v, pairs sum, int32_t x_sum, floats old) {
        const floats whole = fused_sum(splat(-static_cast<float>(x_sum)), load(zeros + v * kLanes), single(sum));
        return fused_sum(whole, scale(v), old);
      });
    case SumKind::kLessWholeZeros:
      return put_sums(sums, of_x, to, [&](int v, pairs sum, int32_t x_sum, floats old) {
        const pairs whole = __builtin_convertvector(load(zeros + v * kLanes), pairs);
        return fused_sum(single(sum - x_sum * whole), scale(v), old);
      });
  }
}

// kTiles tiles of 16 outputs for kRows rows.
template <int kRows, int kTiles, class Codes>
__attribute__((noinline)) void integer_tiles(const IntegerPlace& place, int tile, const IntegerRows& rows, Codes codes,
                                             LinesAhead& outside) {
  constexpr int kVectors = kTiles * kOfTile;
  LinesAhead ahead = outside;  // in registers
  const PackedMatrix& weights = place.weights;
  const SumKind kind = sum_kind(weights, Codes::kLess, rows.adding);
  const int64_t all = blocks(weights.inputs), last = place.step + place.now;
  const int32_t middle = middle_number(weights.format);
  int64_t x_stride = rows.x_stride;
  const int64_t of_group = by_channel(weights.format) ? all : weights.group / 32;
  const int16_t* x = rows.x;
  const int32_t* const x_sums = reinterpret_cast<const int32_t*>(x + 32 * (all - place.step));
  float* const to = rows.sums + tile * kTile;
  if (!rows.adding && kind != SumKind::kFirst) clear_sums<kRows, kVectors>(to);
  int64_t step = place.step, group = step / of_group;
  int64_t at = (place.panel * place.groups + group) * kPanel + tile * kTile;  // of the group's scales
  for (; step < last; ++group, at += kPanel) {
    const int64_t first = step, end = std::min(last, (group + 1) * of_group);
    pairs sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[row][v] = pairs{};  // {} would be a loop over bytes
    for (; step < end; ++step, codes.next_block())
      for (int four = 0; four < 4; ++four, x += 8, codes.next_four()) {
        if (four % (4 / kIntegerTurns) == 0) ahead();
        x_stride = held_stride(x_stride);
        add_products<0>(sums, x, x_stride, codes);
        add_products<1>(sums, x, x_stride, codes);
        add_products<2>(sums, x, x_stride, codes);
        add_products<3>(sums, x, x_stride, codes);
      }
    const auto of_x = [&](int row) {
      const int32_t* const of_row = x_sums + row * (x_stride / 2);
      return of_row[end] - of_row[first];
    };
    const float* const zeros = weights.zeros != nullptr ? weights.zeros + at : nullptr;
    if (weights.format == Format::kFloat4) {
      const uint8_t* const exponents = scales_of<Format::kFloat4>(weights) + at;
      take_sums(kind, middle, sums, of_x, [&](int v) { return load_scales(exponents + v * kLanes); }, zeros, to);
    } else {
      take_sums(kind, middle, sums, of_x, [&](int v) { return load(weights.scales + at + v * kLanes); }, zeros, to);
    }
  }
  outside = ahead;
}

// How often `integer_tiles` is called for so many rows in a pass.
inline int integer_runs(int rows) { return rows <= 2 ? 1 : 2 / kWideTiles; }

// For `count` rows, at most kIntegerRows. `wide` are the numbers of the codes, if they were widened before.
void integer_pass(const IntegerPlace& place, int count, const IntegerRows& rows, const int16_t* wide, LinesAhead& ahead);

// The numbers of the codes, as WideCodes takes them.
void widen_integers(const IntegerPlace& place, int16_t* out);

}  // namespace rhizome

#endif
