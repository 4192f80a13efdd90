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

// Each lane as wide again, and as float32.
typedef int8_t int8x8_t __attribute__((vector_size(8)));
typedef uint8_t uint8x8_t __attribute__((vector_size(8)));
typedef int16_t int16x4_t __attribute__((vector_size(8)));
typedef uint16_t uint16x4_t __attribute__((vector_size(8)));
typedef int16_t int16x8_t __attribute__((vector_size(16)));
typedef uint16_t uint16x8_t __attribute__((vector_size(16)));
typedef int32_t int32x4_t __attribute__((vector_size(16)));
typedef uint32_t uint32x4_t __attribute__((vector_size(16)));

inline int16x8_t vmovl_s8(int8x8_t value) { return __builtin_convertvector(value, int16x8_t); }
inline uint16x8_t vmovl_u8(uint8x8_t value) { return __builtin_convertvector(value, uint16x8_t); }
inline int32x4_t vmovl_s16(int16x4_t value) { return __builtin_convertvector(value, int32x4_t); }
inline uint32x4_t vmovl_u16(uint16x4_t value) { return __builtin_convertvector(value, uint32x4_t); }
inline int16x4_t vget_low_s16(int16x8_t value) { return __builtin_shufflevector(value, value, 0, 1, 2, 3); }
inline uint16x4_t vget_low_u16(uint16x8_t value) { return __builtin_shufflevector(value, value, 0, 1, 2, 3); }
inline float32x4_t vcvtq_f32_s32(int32x4_t value) { return __builtin_convertvector(value, float32x4_t); }
inline float32x4_t vcvtq_f32_u32(uint32x4_t value) { return __builtin_convertvector(value, float32x4_t); }

typedef uint16_t float16x4_t __attribute__((vector_size(8)));
inline float16x4_t vreinterpret_f16_s16(int16x4_t value) { return (float16x4_t)value; }
inline int16x4_t vand_s16(int16x4_t a, int16x4_t b) { return a & b; }
inline int16x4_t vshl_n_s16(int16x4_t value, int by) { return value << by; }
inline int16x4_t vdup_n_s16(int16_t value) { return int16x4_t{value, value, value, value}; }

// float16 as float32; not for infinities and NaN.
inline float32x4_t vcvt_f32_f16(float16x4_t value) {
  float32x4_t wide;
  for (int i = 0; i < 4; ++i) {
    const int exponent = value[i] >> 10 & 31, mantissa = value[i] & 1023;
    float one = static_cast<float>(exponent == 0 ? mantissa : 1024 + mantissa) * 0x1p-24f;
    for (int step = 1; step < exponent; ++step) one *= 2;
    wide[i] = (value[i] & 0x8000) != 0 ? -one : one;
  }
  return wide;
}

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
