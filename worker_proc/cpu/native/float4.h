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
  const uint8x16_t table = vld1q_u8(reinterpret_cast<const uint8_t*>(kFloat4Numbers));
  const ints found = (ints)((words)vqtbl1q_u8(table, (uint8x16_t)codes) << 24) >> 24;
  return (floats)vcvtq_f32_s32((int32x4_t)found);
#else
  floats numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = kFloat4Numbers[codes[i]];
  return numbers;
#endif
}

}  // namespace rhizome
