// The micro-kernel for vector registers that know no dot products of bfloat16: weights are widened to float32 in registers,
// and rows of x before.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "linear_six_rows.h"
#include "linear_task.h"
#include "parallel.h"
#include "registers.h"
#include "room.h"

namespace rhizome {

// Rows that are multiplied together: of one tile, more sums fit beside a vector of weights and a number of x.
#if defined(__aarch64__)
inline constexpr int kSimdRows = 5;
#else
inline constexpr int kSimdRows = std::min(8, kMostSums * kLanes / kTile);
#endif

// So many rows are multiplied with both tiles of a panel at once: with one tile, a sum would wait for itself.
inline constexpr int kBothTilesRows = kHeldSums * kLanes / (2 * kTile);
template <int kRows>
inline constexpr int kSimdTiles = kRows <= kBothTilesRows ? 2 : 1;

// The rows of x in float32, as a number that is multiplied with a whole vector then comes straight from memory. To make one
// of two bytes takes four instructions, for each multiplication or two.
class WideRows {
 public:
  WideRows(const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs) : stride_(inputs + kGap) {
    static thread_local std::vector<float> memory;
    data_ = room_in(memory, rows * stride_);
    const auto widen_rows = [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t i = 0; i < inputs; i += kLanes) store(data_ + row * stride_ + i, load(x + row * x_stride + i));
    };
    const int64_t tasks = (rows + kAlone - 1) / kAlone;
    const auto widen_some = [&](int64_t task, int) { widen_rows(task * kAlone, std::min(rows, (task + 1) * kAlone)); };
    if (tasks == 1)
      widen_some(0, 0);
    else
      parallel_for(tasks, widen_some);
  }

  const float* data() const { return data_; }
  int64_t stride() const { return stride_; }

 private:
  static constexpr int64_t kGap = 16;   // rows that lie powers of two apart would share few sets of the L1 cache
  static constexpr int64_t kAlone = 8;  // rows that one thread widens

  float* data_;
  int64_t stride_;
};

// What is multiplied: rows of x, and the sums of a panel, [rows][32], which are added to what is there if `adding`.
struct SimdRows {
  const float* x;
  int64_t x_stride;
  float* sums;
  bool adding;
};

// The first numbers of pairs in bfloat16. The second ones are what a mask leaves.
inline floats first_of(words both) { return (floats)(both << 16); }
inline words second_mask() {
  words upper = words{} + 0xffff0000u;
  upper = held(upper);  // in a register
  return upper;
}

constexpr int kSimdTurns = 8;  // calls of `ahead` per block of inputs

// Weights as `simd_tiles` takes them, here those of a piece in the layout of linear.h. `at` gives the numbers of kTiles tiles,
// from `tile` on, which go by kRun inputs after the other: numbers(input, v) are the outputs from v * kLanes on.
class PlainPiece {
 public:
  explicit PlainPiece(const bf16* weights) : weights_(weights) {}

  template <int kTiles>
  class Numbers {
   public:
    static constexpr int kRun = 4;

    explicit Numbers(const bf16* at) : at_(at) {}

    floats operator()(int input, int v) const {
      constexpr int kOfTile = kTile / kLanes;
      const bf16* const pair = at_ + input / 2 * 2 * kTile + v / kOfTile * kTileElements + v % kOfTile * 2 * kLanes;
      const words both = *reinterpret_cast<const words*>(pair);
      return input % 2 == 0 ? first_of(both) : (floats)(both & upper_);
    }

    const bf16* pair() const { return at_; }
    void next_run() { at_ += kRun * kTile; }
    void next_block() { at_ += kTileElements; }

   private:
    const bf16* at_;
    const words upper_ = second_mask();
  };

  template <int kTiles>
  Numbers<kTiles> at(int tile) const {
    return Numbers<kTiles>(weights_ + tile * kTileElements);
  }

 private:
  const bf16* weights_;
};

// Zero, or what is to be added to.
template <int kRows, int kVectors>
__attribute__((always_inline)) inline void begin_sums(const SimdRows& rows, floats (&total)[kRows][kVectors]) {
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v) total[row][v] = floats{};
  if (!rows.adding) return;
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v) total[row][v] = load(rows.sums + row * kPanel + v * kLanes);
}

template <int kRows, int kVectors>
__attribute__((always_inline)) inline void store_sums(const floats (&total)[kRows][kVectors], const SimdRows& rows) {
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v) store(rows.sums + row * kPanel + v * kLanes, total[row][v]);
}

// One block of inputs: total[row][v] += x @ the outputs from v * kLanes on. Loops over rows are unrolled by order, as in `DotSums`.
template <int kRows, int kVectors, class Numbers>
__attribute__((always_inline)) inline void simd_block(floats (&total)[kRows][kVectors], const float* x, int64_t x_stride,
                                                      Numbers& weights, LinesAhead& ahead) {
  for (int run = 0; run < 32; run += Numbers::kRun, weights.next_run()) {
#pragma GCC unroll 4
    for (int pair = 0; pair < Numbers::kRun / 2; ++pair, x += 2) {
      if (pair % (kTile / kSimdTurns) == 0) ahead();
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        floats numbers[kVectors];
        for (int v = 0; v < kVectors; ++v) numbers[v] = weights(2 * pair + i, v);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row)
          for (int v = 0; v < kVectors; ++v) total[row][v] += numbers[v] * x[row * x_stride + i];
#if defined(__aarch64__)
        asm volatile("" : : : "memory");  // g++ 12 loads what comes next too soon otherwise, and lacks registers for sums
#endif
      }
    }
  }
}

// kTiles times 16 outputs for kRows rows.
template <int kRows, int kTiles, class Numbers>
__attribute__((noinline)) void simd_tiles(const SimdRows& rows, Numbers weights, int64_t steps, LinesAhead& outside) {
  constexpr int kVectors = kTiles * kTile / kLanes;
  LinesAhead ahead = outside;  // in registers
  const float* x = rows.x;
  const int64_t x_stride = rows.x_stride;
  floats total[kRows][kVectors];
  begin_sums(rows, total);
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  if constexpr (kRows == kSixRows && std::is_same_v<Numbers, PlainPiece::Numbers<1>>) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    for (; steps > 0; --steps, weights.next_block())
      for (int run = 0; run < 32; run += Numbers::kRun, weights.next_run(), x += Numbers::kRun) {
        ahead();
        add_pair(total, x, x + 3 * x_stride, 4 * x_stride, weights.pair(), upper);
        add_pair(total, x + 2, x + 2 + 3 * x_stride, 4 * x_stride, weights.pair() + 2 * kTile, upper);
      }
  }
#endif
  for (; steps > 0; --steps, x += 32, weights.next_block()) simd_block(total, x, x_stride, weights, ahead);
  store_sums(total, rows);
  outside = ahead;
}

template <int kRows, class Weights>
inline void simd_run(const SimdRows& rows, const Weights& weights, int64_t steps, LinesAhead& ahead) {
  constexpr int kTiles = kSimdTiles<kRows>;
  for (int tile = 0; tile < 2; tile += kTiles)
    simd_tiles<kRows, kTiles>({rows.x, rows.x_stride, rows.sums + tile * kTile, rows.adding},
                              weights.template at<kTiles>(tile), steps, ahead);
}

template <class Weights, int... kCounts>
inline void simd_of(int count, const SimdRows& rows, const Weights& weights, int64_t steps, LinesAhead& ahead,
                    std::integer_sequence<int, kCounts...>) {
  using Run = void (*)(const SimdRows&, const Weights&, int64_t, LinesAhead&);
  static constexpr Run kRuns[] = {simd_run<kCounts + 1, Weights>...};
  kRuns[count - 1](rows, weights, steps, ahead);
}

// sums[row * 32 + output] (+)= x @ weights.T for `count` rows, at most kSimdRows, of one panel and `steps` blocks of inputs.
template <class Weights>
inline void simd_pass(int count, const SimdRows& rows, const Weights& weights, int64_t steps, LinesAhead& ahead) {
  simd_of(count, rows, weights, steps, ahead, std::make_integer_sequence<int, kSimdRows>());
}

// How many of so many rows go by next: no one row or three are left, whose sums would wait for themselves.
inline int simd_pass_rows(int rows) {
  const int rest = rows - kSimdRows;
  return rest <= 0 ? rows : rest == 1 || rest == 3 ? kSimdRows - 1 : kSimdRows;
}

// How often `simd_tiles` is called for so many rows.
inline int simd_runs(int rows) {
  int runs = 0;
  for (int now; rows > 0; rows -= now) now = simd_pass_rows(rows), runs += now <= kBothTilesRows ? 1 : 2;
  return runs;
}

}  // namespace rhizome
