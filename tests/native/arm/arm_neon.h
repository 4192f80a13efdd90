// What the kernels use of Arm's vectors, on any processor, so that their set for Arm can be tested there: found as
// <arm_neon.h>, with Arm's macros defined outside. Sums are rounded to nearest, which processors without
// FEAT_EBF16 do in another way, so bits differ from theirs.
//
// Source: the operations of the Arm Architecture Reference Manual.
#pragma once

#include <cstdint>
#include <cstring>

typedef uint8_t uint8x16_t __attribute__((vector_size(16)));
typedef float float32x4_t __attribute__((vector_size(16)));
typedef uint16_t bfloat16x4_t __attribute__((vector_size(8)));
typedef uint16_t bfloat16x8_t __attribute__((vector_size(16)));

inline uint8x16_t vld1q_u8(const uint8_t* from) {
  uint8x16_t value;
  std::memcpy(&value, from, 16);
  return value;
}

// The byte of `table` for each of `indices`, 0 where there is none.
inline uint8x16_t vqtbl1q_u8(uint8x16_t table, uint8x16_t indices) {
  uint8x16_t found;
  for (int i = 0; i < 16; ++i) found[i] = indices[i] < 16 ? table[indices[i]] : 0;
  return found;
}

inline float rhizome_emulated_float(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

// Two rows by four inputs times two outputs by four inputs: a pair of inputs after the other.
inline float32x4_t vbfmmlaq_f32(float32x4_t sums, bfloat16x8_t rows, bfloat16x8_t outputs) {
  for (int row = 0; row < 2; ++row)
    for (int output = 0; output < 2; ++output)
      for (int pair = 0; pair < 4; pair += 2) {
        const auto product = [&](int i) {
          return rhizome_emulated_float(rows[4 * row + i]) * rhizome_emulated_float(outputs[4 * output + i]);
        };
        sums[2 * row + output] += product(pair) + product(pair + 1);
      }
  return sums;
}

// To nearest, ties to even; NaN stays NaN.
inline bfloat16x4_t vcvt_bf16_f32(float32x4_t value) {
  bfloat16x4_t result;
  for (int i = 0; i < 4; ++i) {
    const float one = value[i];
    uint32_t bits;
    std::memcpy(&bits, &one, 4);
    result[i] = static_cast<uint16_t>(one != one ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  return result;
}
