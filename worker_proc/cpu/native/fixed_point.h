// Rows of bfloat16 as whole numbers: of 16 bits, multiples of 2^-14 of the power of two at a row's largest number, or of 8,
// multiples of 1/127 of that number (as W8A8 checkpoints mean it: LLM.int8(), Dettmers et al., 2022).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

#include "bf16.h"

namespace rhizome {

inline float power_of_two(int exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Of the largest magnitude among `count` numbers, which go on with zeros up to a multiple of 32.
inline int largest_bits(const bf16* numbers, int64_t count) {
#if defined(__AVX512BW__)
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 32)
    most = _mm512_max_epi16(most, _mm512_and_si512(_mm512_loadu_si512(numbers + i), _mm512_set1_epi16(0x7fff)));
  const __m512i even = _mm512_and_si512(most, _mm512_set1_epi32(0xffff)), odd = _mm512_srli_epi32(most, 16);
  return _mm512_reduce_max_epi32(_mm512_max_epi32(even, odd));
#else
  int largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, numbers[i] & 0x7fff);
  return largest;
#endif
}

// What numbers are multiplied with before they are rounded, and the whole numbers after: NaN where one is not finite.
// `largest` are the bits of the largest magnitude.
struct FixedPoint {
  FixedPoint(int largest, bool int8) {
    if (int8) {
      const uint32_t bits = static_cast<uint32_t>(largest) << 16;
      float magnitude;
      std::memcpy(&magnitude, &bits, sizeof magnitude);
      const bool counts = magnitude >= 1e-30f;  // less is nothing
      factor = counts ? 127.0f / magnitude : 0.0f;
      unit = largest >= 0x7f80 ? __builtin_nanf("") : counts ? magnitude / 127.0f : 0.0f;
      return;
    }
    const int exponent = std::max(largest >> 7, 15) - 127;
    factor = power_of_two(14 - exponent);
    unit = largest >= 0x7f80 ? __builtin_nanf("") : power_of_two(exponent - 14);
  }

  float factor, unit;
};

}  // namespace rhizome
