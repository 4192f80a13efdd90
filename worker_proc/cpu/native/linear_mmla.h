// The micro-kernel for Arm's matrix products of bfloat16 (BFMMLA, FEAT_BF16): two rows of x by two outputs, over four inputs.
//
// Two pairs of inputs of four outputs, as linear.h lays them out, become the second operands of two instructions when their
// words are taken by turns ("turned over"). One pass of rows does that in registers, several do it once in memory.
#pragma once

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

#include <arm_neon.h>

#include <cstring>
#include <vector>

#include "lanes.h"
#include "linear_task.h"
#include "parallel.h"
#include "room.h"

namespace rhizome {

inline constexpr int kMmlaPairs = 3;   // of rows that are multiplied together: their 24 sums, three vectors of x and two of weights
inline constexpr int kMmlaTurns = 8;   // calls of `ahead` per block of inputs and tile
inline constexpr int kQuads = 8;       // of inputs in a block
inline constexpr int kQuadElements = 4 * kTile;

typedef float FourFloats __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t FourPairs __attribute__((vector_size(16), aligned(4), may_alias));  // pairs of bfloat16

// Both numbers of two rows for one input, to be found as x[row * stride + input] where `row` is even: four inputs of a row lie
// beside those of the next one.
class PairedRows {
 public:
  PairedRows(const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs) : stride_((inputs + kGap) / 2) {
    static thread_local std::vector<uint32_t> memory;
    uint32_t* const data = room_in(memory, (rows + 1) / 2 * 2 * stride_);
    data_ = data;
    parallel_for((rows + kAlone - 1) / kAlone, [&](int64_t task, int) {
      for (int64_t row = task * kAlone; row < std::min(rows, (task + 1) * kAlone); row += 2) {
        const bf16* const first = x + row * x_stride;
        uint32_t* to = data + row * stride_;
        for (int64_t i = 0; i < inputs; i += 4, to += 4) {
          std::memcpy(to, first + i, 8);
          if (row + 1 < rows)
            std::memcpy(to + 2, first + x_stride + i, 8);
          else
            std::memset(to + 2, 0, 8);
        }
      }
    });
  }

  const uint32_t* data() const { return data_; }
  int64_t stride() const { return stride_; }

 private:
  static constexpr int64_t kGap = 16;   // pairs of rows that lie powers of two apart would share few sets of the L1 cache
  static constexpr int64_t kAlone = 8;  // rows that one thread pairs

  const int64_t stride_;
  const uint32_t* data_;
};

// What is multiplied: rows of `PairedRows` from an even one on, and the sums of a panel, [rows][32], which are added to what is
// there if `adding`.
struct MmlaRows {
  const uint32_t* x;
  int64_t x_stride;
  float* sums;
  bool adding;
};

inline FourPairs load_pairs(const void* from) { return *static_cast<const FourPairs*>(from); }

struct Operands {
  FourPairs left, right;
};

// Two pairs of inputs of four outputs each, as the second operands for the first and the last two outputs.
inline Operands turned_over(FourPairs first, FourPairs second) {
  return {lanes_of<0, 4, 1, 5>(first, second), lanes_of<2, 6, 3, 7>(first, second)};
}

// `steps` blocks of both tiles, turned over; in place where `to` is `from`.
inline void turn_over(const bf16* from, int64_t steps, bf16* to) {
  for (int64_t quad = 0; quad < 2 * steps * kQuads; ++quad, from += kQuadElements, to += kQuadElements) {
    FourPairs all[8];
    for (int v = 0; v < 8; ++v) all[v] = load_pairs(from + 8 * v);
    for (int v = 0; v < 4; ++v) {
      const Operands outputs = turned_over(all[v], all[v + 4]);
      *reinterpret_cast<FourPairs*>(to + 16 * v) = outputs.left;
      *reinterpret_cast<FourPairs*>(to + 16 * v + 8) = outputs.right;
    }
  }
}

inline FourFloats add_products(FourFloats sums, FourPairs rows, FourPairs outputs) {
  return (FourFloats)vbfmmlaq_f32((float32x4_t)sums, (bfloat16x8_t)rows, (bfloat16x8_t)outputs);
}

// 16 outputs for `count` rows, 2 * kPairs or one less. kTurned: weights are turned over.
template <int kPairs, bool kTurned>
__attribute__((noinline)) void mmla_tile(const MmlaRows& rows, int count, const bf16* weights, int64_t steps,
                                         LinesAhead& outside) {
  LinesAhead ahead = outside;  // in registers
  const uint32_t* x = rows.x;
  const int64_t pair_stride = 2 * rows.x_stride;
  FourFloats total[kPairs][8] = {};  // two rows by two outputs each
  const auto sums_at = [&](int row, int v) { return reinterpret_cast<FourFloats*>(rows.sums + row * kPanel + 4 * v); };
  if (rows.adding) {
#pragma GCC unroll 4
    for (int pair = 0; pair < kPairs; ++pair)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const FourFloats first = *sums_at(2 * pair, v);
        const FourFloats second = 2 * pair + 1 < count ? *sums_at(2 * pair + 1, v) : FourFloats{};
        total[pair][2 * v] = lanes_of<0, 1, 4, 5>(first, second);
        total[pair][2 * v + 1] = lanes_of<2, 3, 6, 7>(first, second);
      }
  }
  for (; steps > 0; --steps, weights += kTileElements)
    for (int quad = 0; quad < kQuads; ++quad, x += 4, weights += kQuadElements) {
      ahead();
      FourPairs both[kPairs];
#pragma GCC unroll 4
      for (int pair = 0; pair < kPairs; ++pair) both[pair] = load_pairs(x + pair * pair_stride);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        Operands outputs;
        if constexpr (kTurned)
          outputs = {load_pairs(weights + 16 * v), load_pairs(weights + 16 * v + 8)};
        else
          outputs = turned_over(load_pairs(weights + 8 * v), load_pairs(weights + 2 * kTile + 8 * v));
#pragma GCC unroll 4
        for (int pair = 0; pair < kPairs; ++pair) {
          total[pair][2 * v] = add_products(total[pair][2 * v], both[pair], outputs.left);
          total[pair][2 * v + 1] = add_products(total[pair][2 * v + 1], both[pair], outputs.right);
        }
        asm volatile("" : : : "memory");  // g++ 12 loads all weights first otherwise, and lacks registers for sums
      }
    }
#pragma GCC unroll 4
  for (int pair = 0; pair < kPairs; ++pair)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const FourFloats left = total[pair][2 * v], right = total[pair][2 * v + 1];
      *sums_at(2 * pair, v) = lanes_of<0, 1, 4, 5>(left, right);
      if (2 * pair + 1 < count) *sums_at(2 * pair + 1, v) = lanes_of<2, 3, 6, 7>(left, right);
    }
  outside = ahead;
}

// sums[row * 32 + output] (+)= x @ weights.T for `count` rows, at most 2 * kMmlaPairs, of one panel and `steps` blocks.
template <bool kTurned>
inline void mmla_pass(int count, const MmlaRows& rows, const bf16* weights, int64_t steps, LinesAhead& ahead) {
  using Run = void (*)(const MmlaRows&, int, const bf16*, int64_t, LinesAhead&);
  static constexpr Run kRuns[kMmlaPairs] = {mmla_tile<1, kTurned>, mmla_tile<2, kTurned>, mmla_tile<3, kTurned>};
  for (int tile = 0; tile < 2; ++tile)
    kRuns[(count - 1) / 2]({rows.x, rows.x_stride, rows.sums + tile * kTile, rows.adding}, count,
                           weights + tile * kTileElements, steps, ahead);
}

// In how many passes so many rows go by weights.
inline int mmla_passes(int64_t rows) { return static_cast<int>((rows + 2 * kMmlaPairs - 1) / (2 * kMmlaPairs)); }

}  // namespace rhizome

#endif
