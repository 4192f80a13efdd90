// MXFP4. Codes of FP4 (E2M1: a sign, two bits of exponent, one of mantissa; no infinities, no NaN) as whole numbers: twice what
// they stand for, which scales make up for. Those are powers of two, and held as exponents.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "bf16.h"

namespace rhizome {

inline constexpr int kMostFloat4 = 12;
inline constexpr int8_t kFloat4Numbers[16] = {0, 1, 2, 3, 4, 6, 8, kMostFloat4, 0, -1, -2, -3, -4, -6, -8, -kMostFloat4};

// kLanes codes, a word each.
inline floats float4_numbers(words codes) {
#if defined(__ARM_NEON)
  // the other bytes of a word look up code 0, which is 0
  const uint8x16_t table = vld1q_u8(reinterpret_cast<const uint8_t*>(kFloat4Numbers));
  const ints found = (ints)((words)vqtbl1q_u8(table, (uint8x16_t)codes) << 24) >> 24;
  return (floats)vcvtq_f32_s32((int32x4_t)found);
#else
  floats numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = kFloat4Numbers[codes[i]];
  return numbers;
#endif
}

#if defined(__AVX512F__)
// All of the numbers.
inline __m512 float4_table() {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kFloat4Numbers))));
}
#endif

// kLanes scales from exponents as float32 has them; the least one is 0.
inline floats load_scales(const uint8_t* from) {
#if defined(__AVX512F__)
  return (floats)_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 23);
#elif defined(__AVX2__)
  return (floats)_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))), 23);
#else
  words bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = uint32_t{from[i]} << 23;
  return (floats)bits;
#endif
}

// Those of other formats.
inline floats load_scales(const float* from) { return load(from); }

inline float scale_of(uint8_t exponent) {
  const uint32_t bits = uint32_t{exponent} << 23;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return scale;
}

inline float scale_of(float scale) { return scale; }

}  // namespace rhizome
