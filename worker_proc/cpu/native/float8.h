// Codes of FP8 (E4M3: a sign, four bits of exponent, three of mantissa, no infinities), widened to float32.
//
// Seven bits further to the left, exponent and mantissa of a code are those of a float16 that is 2^-8 times its number,
// denormal ones included, and processors widen float16. So that is what these functions give, and scales make up for it.
// NaN (0x7f, 0xff) must not come.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "bf16.h"

namespace rhizome {

constexpr float float8_number(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-17f
                                        : static_cast<float>(8 + mantissa) * static_cast<float>(1 << exponent) * 0x1p-18f;
  return (code & 128) != 0 ? -magnitude : magnitude;
}

inline constexpr float kMostFloat8 = 448;

// The nearest code, ties to even, the largest one for larger numbers.
inline uint8_t float8_code(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const float magnitude = __builtin_fabsf(x) < kMostFloat8 ? __builtin_fabsf(x) : kMostFloat8;
  uint32_t word;
  std::memcpy(&word, &magnitude, sizeof word);
  const uint32_t normal = ((word + 0x7ffff + (word >> 20 & 1)) >> 20) - (120 << 3);
  const auto denormal = static_cast<uint32_t>(static_cast<int32_t>(__builtin_nearbyintf(magnitude * 512)));
  return static_cast<uint8_t>((magnitude < 0x1p-6f ? denormal : normal) | (bits >> 24 & 128));
}

// kLanes codes.
inline floats float8_numbers(const uint8_t* codes) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  return (floats)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(-0x4001)));
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  return (floats)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(-0x4001)));
#elif defined(__ARM_NEON)
  typedef uint32_t TwoWords __attribute__((vector_size(8)));
  TwoWords four = {};
  std::memcpy(&four, codes, 4);
  const int16x4_t wide = vget_low_s16(vmovl_s8((int8x8_t)four));
  return (floats)vcvt_f32_f16(vreinterpret_f16_s16(vand_s16(vshl_n_s16(wide, 7), vdup_n_s16(-0x4001))));
#else
  floats numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = float8_number(codes[i]);
  return numbers;
#endif
}

}  // namespace rhizome
