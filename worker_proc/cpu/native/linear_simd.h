// The micro-kernel for vector registers that know no dot products of bfloat16: weights are widened to float32 in registers,
// and rows of x before.
#pragma once

#include <algorithm>
#include <vector>

#include "linear.h"
#include "parallel.h"
#include "registers.h"
#include "room.h"

namespace rhizome {

inline constexpr int kSimdRows = std::min(8, kHeldSums * kLanes / kTile);  // that are multiplied together

// Of how many tiles: with one row and one tile, a sum would wait for itself.
template <int kRows>
inline constexpr int kSimdTiles = 2 * kRows * kTile / kLanes <= kHeldSums ? 2 : 1;

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

// kTiles times 16 outputs for kRows rows: sums[row * 32 + output].
template <int kRows, int kTiles>
inline void simd_tiles(const float* x, int64_t x_stride, const bf16* weights, int64_t steps, float* sums, bool accumulate) {
  constexpr int kOfTile = kTile / kLanes, kVectors = kTiles * kOfTile;
  floats total[kRows][kVectors];
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v)
      total[row][v] = accumulate ? load(sums + row * kPanel + v * kLanes) : floats{};
  for (int64_t step = 0; step < steps; ++step, weights += 2 * kTileElements, x += 32) {
    for (int pair = 0; pair < kTile; ++pair) {
      floats even[kVectors], odd[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const bf16* const from = weights + v / kOfTile * kTileElements + pair * 2 * kTile + v % kOfTile * 2 * kLanes;
        const words both = *reinterpret_cast<const words*>(from);
        even[v] = (floats)(both << 16), odd[v] = (floats)(both & 0xffff0000u);
        // of one tile, what is fetched comes soon, and arithmetic is what takes the time
        if (v % kOfTile == 0) __builtin_prefetch(from + kTiles * kTileElements, 0, kTiles == 1 ? 3 : 2);
      }
      for (int row = 0; row < kRows; ++row) {
        const float* const two = x + row * x_stride + 2 * pair;
        for (int v = 0; v < kVectors; ++v) total[row][v] += even[v] * two[0];
        for (int v = 0; v < kVectors; ++v) total[row][v] += odd[v] * two[1];
      }
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v) store(sums + row * kPanel + v * kLanes, total[row][v]);
}

template <int kRows>
inline int simd_rows(const float* x, int64_t x_stride, int rows, const bf16* weights, int64_t steps, float* sums,
                     bool accumulate, int done) {
  for (; rows - done >= kRows; done += kRows)
    for (int tile = 0; tile < 2; tile += kSimdTiles<kRows>)
      simd_tiles<kRows, kSimdTiles<kRows>>(x + done * x_stride, x_stride, weights + tile * kTileElements, steps,
                                           sums + done * kPanel + tile * kTile, accumulate);
  if constexpr (kRows > 1)
    return simd_rows<kRows / 2>(x, x_stride, rows, weights, steps, sums, accumulate, done);
  else
    return done;
}

// sums[row * 32 + output] (+)= x @ weights.T for at most kBlockRows rows, one panel, `steps` blocks of inputs.
inline void simd_block(const float* x, int64_t x_stride, int rows, const bf16* weights, int64_t steps, float* sums,
                       bool accumulate) {
  simd_rows<kSimdRows>(x, x_stride, rows, weights, steps, sums, accumulate, 0);
}

}  // namespace rhizome
