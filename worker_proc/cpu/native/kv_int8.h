// K and V in int8: codes and one scale per token and head, written when a token is stored, read by the attention
// kernels. The definition is worker_proc/quantization/kv.py, and results are the same to the last bit.
#pragma once

#include <cstdint>
#include <cstring>

namespace rhizome {

inline float kv_number(float x) { return x; }
inline float kv_number(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

// `dim` numbers (float32 or bfloat16) to codes; returns the scale. The largest magnitude becomes 127.
template <class Element>
inline float quantize_head(const Element* x, int64_t dim, int8_t* codes) {
  uint32_t largest = 0;  // magnitudes are ordered as their bits are
  for (int64_t d = 0; d < dim; ++d) {
    const float number = kv_number(x[d]);
    uint32_t bits;
    memcpy(&bits, &number, 4);
    bits &= 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  float magnitude;
  memcpy(&magnitude, &largest, 4);
  float scale = magnitude / 127.0f;
  if (scale < 1e-30f) scale = 0;
  const float inverse = scale == 0 ? 0.0f : 1.0f / scale;
  for (int64_t d = 0; d < dim; ++d)
    codes[d] = static_cast<int8_t>(static_cast<int32_t>(__builtin_nearbyintf(kv_number(x[d]) * inverse)));
  return scale;
}

// The other way round, rounded to bfloat16 where Element is.
template <class Element>
inline float dequantized(int8_t code, float scale) {
  const float number = static_cast<float>(code) * scale;
  if constexpr (sizeof(Element) == 4) return number;
  uint32_t bits;
  memcpy(&bits, &number, 4);
  return kv_number(static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}

}  // namespace rhizome
