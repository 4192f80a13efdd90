// Rows of bfloat16 as whole numbers of 16 bits: multiples of 2^-14 of the power of two at a row's largest number.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace rhizome {

inline float power_of_two(int exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// What numbers are multiplied with before they are rounded, and the whole numbers after: NaN where one is not finite.
// `largest` are the bits of the largest magnitude.
struct FixedPoint {
  explicit FixedPoint(int largest) {
    const int exponent = std::max(largest >> 7, 15) - 127;
    factor = power_of_two(14 - exponent);
    unit = largest >= 0x7f80 ? __builtin_nanf("") : power_of_two(exponent - 14);
  }

  float factor, unit;
};

}  // namespace rhizome
