// Convolutions along a sequence, of each channel by itself, that keep their last inputs from one call to the next.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "bf16.h"
#include "lanes.h"

namespace rhizome {

inline constexpr int kMostKernel = 8;

// The last inputs of kLanes channels, the oldest first: numbers of bfloat16. In memory they lie channel by channel. They are
// kKernel, but any number of them, `taps`, with kMostKernel.
template <int kKernel>
struct Kept {
  floats at[kKernel];

  void load(const bf16* from, int taps) {
    if constexpr (kKernel == 4) {
      turn(from, std::make_integer_sequence<int, kLanes>());
    } else {
      for (int i = 0; i < taps; ++i)
        for (int lane = 0; lane < kLanes; ++lane) at[i][lane] = to_float(from[lane * taps + i]);
    }
  }

  void store(bf16* to, int taps) const {
    if constexpr (kKernel == 4) {
      turn_back(to, std::make_integer_sequence<int, kLanes>());
    } else {
      for (int i = 0; i < taps; ++i)
        for (int lane = 0; lane < kLanes; ++lane) to[lane * taps + i] = to_bf16(at[i][lane]);
    }
  }

 private:
  typedef uint32_t Pairs __attribute__((vector_size(4 * kLanes)));

  // Two inputs are a word: the first one its low half.
  template <int... kLane>
  void turn(const bf16* from, std::integer_sequence<int, kLane...>) {
    Pairs low, high;
    std::memcpy(&low, from, sizeof low);
    std::memcpy(&high, from + 2 * kLanes, sizeof high);
    const Pairs first = lanes_of<2 * kLane...>(low, high), second = lanes_of<(2 * kLane + 1)...>(low, high);
    at[0] = reinterpret_cast<floats>(first << 16), at[1] = reinterpret_cast<floats>(first & 0xffff0000u);
    at[2] = reinterpret_cast<floats>(second << 16), at[3] = reinterpret_cast<floats>(second & 0xffff0000u);
  }

  template <int... kLane>
  void turn_back(bf16* to, std::integer_sequence<int, kLane...>) const {
    const Pairs first = reinterpret_cast<Pairs>(at[0]) >> 16 | (reinterpret_cast<Pairs>(at[1]) & 0xffff0000u);
    const Pairs second = reinterpret_cast<Pairs>(at[2]) >> 16 | (reinterpret_cast<Pairs>(at[3]) & 0xffff0000u);
    const Pairs low = lanes_of<(kLane / 2 + kLane % 2 * kLanes)...>(first, second);
    const Pairs high = lanes_of<(kLanes / 2 + kLane / 2 + kLane % 2 * kLanes)...>(first, second);
    std::memcpy(to, &low, sizeof low);
    std::memcpy(to + 2 * kLanes, &high, sizeof high);
  }
};

// kVectors * kLanes channels; see `convolve`.
template <int kKernel, int kVectors, class Input, class Output>
inline void convolve_some(int some_taps, bf16* memory, const float* weights, int64_t stride, int64_t count, const Input& input,
                          const Output& output) {
  const int taps = kKernel == kMostKernel ? some_taps : kKernel;  // else known when this is compiled
  Kept<kKernel> kept[kVectors];
  floats weight[kVectors][kKernel];
  for (int v = 0; v < kVectors; ++v) {
    kept[v].load(memory + v * kLanes * taps, taps);
    for (int i = 0; i < taps; ++i) weight[v][i] = load(weights + i * stride + v * kLanes);
  }
  for (int64_t t = 0; t < count; ++t)
    for (int v = 0; v < kVectors; ++v) {
      floats(&seen)[kKernel] = kept[v].at;
      for (int i = 1; i < taps; ++i) seen[i - 1] = seen[i];
      seen[taps - 1] = input(t, v);
      floats sum = seen[0] * weight[v][0];
      for (int i = 1; i < taps; ++i) sum = sum + seen[i] * weight[v][i];
      output(t, v, sum);
    }
  for (int v = 0; v < kVectors; ++v) kept[v].store(memory + v * kLanes * taps, taps);
}

template <int kKernel, class Input, class Output>
inline void convolve_all(int taps, bf16* kept, const float* weights, int64_t stride, int64_t channels, int64_t count,
                         const Input& input, const Output& output) {
  for (int64_t c = 0; c < channels;) {
    const auto from = [&](int64_t t, int v) { return input(t, c + v * kLanes); };
    const auto to = [&](int64_t t, int v, floats sum) { output(t, c + v * kLanes, sum); };
    if (channels - c >= 2 * kLanes)
      convolve_some<kKernel, 2>(taps, kept + c * taps, weights + c, stride, count, from, to), c += 2 * kLanes;
    else
      convolve_some<kKernel, 1>(taps, kept + c * taps, weights + c, stride, count, from, to), c += kLanes;
  }
}

// `channels`, a multiple of kLanes, `count` tokens further. `kept` [channels, kernel] has their last inputs, before and
// after; tap i of them is at weights + i * stride. `input(t, c)` gives what token t brings to channels c and following,
// numbers of bfloat16, `output(t, c, sum)` takes the sums. Two vectors go by the tokens together: a cache line of inputs.
template <class Input, class Output>
inline void convolve(int64_t kernel, bf16* kept, const float* weights, int64_t stride, int64_t channels, int64_t count,
                     const Input& input, const Output& output) {
  const int taps = static_cast<int>(kernel);
  const auto with = [&]<int kKernel>(std::integral_constant<int, kKernel>) {
    convolve_all<kKernel>(taps, kept, weights, stride, channels, count, input, output);
  };
  if (taps == 4) return with(std::integral_constant<int, 4>());  // nearly all models have
  if (taps == 3) return with(std::integral_constant<int, 3>());  // LFM2
  with(std::integral_constant<int, kMostKernel>());
}

}  // namespace rhizome
