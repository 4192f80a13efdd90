// Codes of FP4 (E2M1: a sign, two bits of exponent, one of mantissa; no infinities, no NaN) as whole numbers: twice what they
// stand for, which scales make up for.
#pragma once

#include <cstdint>

#if defined(__ARM_NEON)
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
  const int8x16_t found = vqtbl1q_s8(vld1q_s8(kFloat4Numbers), (uint8x16_t)codes);
  return (floats)vcvtq_n_f32_s32(vshlq_n_s32((int32x4_t)found, 24), 24);
#else
  floats numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = kFloat4Numbers[codes[i]];
  return numbers;
#endif
}

}  // namespace rhizome
