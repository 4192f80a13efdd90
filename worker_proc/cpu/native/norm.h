// RMSNorm and rotary embeddings, on one row at a time.
#pragma once

#include <cmath>
#include <cstdint>

#include "bf16.h"

namespace rhizome {

// Calls body(i, count) for each group of up to kLanes numbers of `size`.
template <class Body>
inline void for_lanes(int64_t size, Body&& body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, kLanes);
  if (i < size) body(i, static_cast<int>(size - i));
}

template <class Element>
inline floats load_lanes(const Element* from, int count) {
  return count == kLanes ? load(from) : load_some(from, count);
}

template <class Element>
inline void store_lanes(Element* to, floats value, int count) {
  if (count == kLanes)
    store(to, value);
  else
    store_some(to, value, count);
}

// 1 / sqrt(mean(x**2) + eps)
template <class Element>
inline float inverse_rms(const Element* x, int64_t size, float eps) {
  floats total = {};
  for_lanes(size, [&](int64_t i, int count) {
    const floats value = load_lanes(x + i, count);
    total += value * value;
  });
  return 1.0f / sqrtf(sum(total) / static_cast<float>(size) + eps);
}

template <class From, class To>
inline void rms_norm(const From* x, const float* weight, int64_t size, float eps, To* out) {
  const float scale = inverse_rms(x, size, eps);
  for_lanes(size, [&](int64_t i, int count) {
    store_lanes(out + i, load_lanes(x + i, count) * scale * load_lanes(weight + i, count), count);
  });
}

// One head of `dim` numbers: RMSNorm when there is a weight, then each dimension i of the first half of the `rotated` first
// ones is turned with i + rotated / 2 by the angle whose cosine and sine are cos[i] and sin[i].
inline void norm_and_rotate(const bf16* x, const float* weight, float eps, const float* cos, const float* sin,
                            int64_t dim, int64_t rotated, bf16* out) {
  const int64_t half = rotated / 2;
  const float scale = weight != nullptr ? inverse_rms(x, dim, eps) : 1.0f;
  for_lanes(half, [&](int64_t i, int count) {
    floats first = load_lanes(x + i, count), second = load_lanes(x + half + i, count);
    if (weight != nullptr) {
      first = first * scale * load_lanes(weight + i, count);
      second = second * scale * load_lanes(weight + half + i, count);
    }
    const floats c = load_lanes(cos + i, count), s = load_lanes(sin + i, count);
    store_lanes(out + i, first * c - second * s, count);
    store_lanes(out + half + i, second * c + first * s, count);
  });
  for_lanes(dim - rotated, [&](int64_t i, int count) {
    floats value = load_lanes(x + rotated + i, count);
    if (weight != nullptr) value = value * scale * load_lanes(weight + rotated + i, count);
    store_lanes(out + rotated + i, value, count);
  });
}

// The same for heads of kDim numbers, a multiple of 64, by whole cache lines; see `store_pair` for kPast.
template <int64_t kDim, bool kPast>
inline void norm_and_rotate_lines(const bf16* x, const float* weight, float eps, const float* cos, const float* sin,
                                  bf16* out) {
  constexpr int64_t kHalf = kDim / 2, kPair = 2 * kLanes;
  static_assert(kHalf % kPair == 0);
  const float scale = weight != nullptr ? inverse_rms(x, kDim, eps) : 1.0f;
  for (int64_t i = 0; i < kHalf; i += kPair) {
    floats low[2], high[2];
    for (int64_t j = 0; j < 2; ++j) {
      const int64_t at = i + j * kLanes;
      floats first = load(x + at), second = load(x + kHalf + at);
      if (weight != nullptr) {
        first = first * scale * load(weight + at);
        second = second * scale * load(weight + kHalf + at);
      }
      const floats c = load(cos + at), s = load(sin + at);
      low[j] = first * c - second * s, high[j] = second * c + first * s;
    }
    store_pair<kPast>(out + i, low[0], low[1]);
    store_pair<kPast>(out + kHalf + i, high[0], high[1]);
  }
}

}  // namespace rhizome
