// Convolutions along a sequence, of each channel by itself, that keep their last inputs from one call to the next.
#pragma once

#include "bf16.h"

namespace rhizome {

inline constexpr int kMostKernel = 8;

// kLanes channels, `count` tokens further. `kept` [kLanes, kernel] has their last inputs, before and after; tap i of them
// is at weights + i * stride. `input(t)` gives what token t brings, numbers of bfloat16, `output(t, sum)` takes the sums.
template <typename Input, typename Output>
inline void convolve(bf16* kept, const float* weights, int64_t stride, int64_t kernel, int64_t count,
                     const Input& input, const Output& output) {
  floats seen[kMostKernel], weight[kMostKernel];
  const int64_t before = kernel - 1;
  for (int64_t i = 0; i < before; ++i)
    for (int lane = 0; lane < kLanes; ++lane) seen[i][lane] = to_float(kept[lane * kernel + 1 + i]);
  for (int64_t i = 0; i < kernel; ++i) weight[i] = load(weights + i * stride);
  floats oldest = {};  // what is kept beyond what the next sum needs
  for (int64_t t = 0; t < count; ++t) {
    seen[before] = input(t);
    floats sum = seen[0] * weight[0];
    for (int64_t i = 1; i < kernel; ++i) sum = sum + seen[i] * weight[i];
    output(t, sum);
    oldest = seen[0];
    for (int64_t i = 0; i < before; ++i) seen[i] = seen[i + 1];
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    bf16* to = kept + lane * kernel;
    to[0] = to_bf16(oldest[lane]);
    for (int64_t i = 0; i < before; ++i) to[1 + i] = to_bf16(seen[i][lane]);
  }
}

}  // namespace rhizome
