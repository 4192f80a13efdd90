// Scales that take fewer bits than float32, as GGUF files have them, where they multiply sums: in products of bytes
// (linear_task_segments.h) and of numbers (linear_number_dots.h). They become
// float32 in registers where one pass takes all rows, else a few groups at a time, in the L1 cache.
//
//   kFloat16  [panels][groups][32], symmetric codes
//   kFactors  for each 256 inputs of a panel 640 bytes: [2][32] float16, then [8 groups][2][32] bytes, first those of scales and
//             then those of the numbers below zero that codes 0 stand for. A float16 times a byte is a scale, or such a number.
//   kLess     scales as in float32, and in the place of zeros the numbers below zero that codes 0 stand for
//
// A weight of kFactors is code * scale - below, or with a zero as others have it (code - below / scale) * scale.
#pragma once

#include <algorithm>

#include "linear.h"
#include "linear_task.h"

namespace rhizome {

inline constexpr int64_t kFactorGroups = 8, kFactorBytes = (2 + kFactorGroups) * 2 * kPanel;  // of 256 inputs

inline int64_t scale_groups(const PackedMatrix& weights) {
  return (blocks(weights.inputs) * 32 + weights.group - 1) / weights.group;
}

// kLanes numbers of float16.
inline floats load_float16(const uint8_t* from) {
#if defined(__AVX512F__)
  return (floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__aarch64__)
  _Float16 halves[kLanes];
  std::memcpy(halves, from, sizeof halves);
  floats numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = static_cast<float>(halves[i]);
  return numbers;
#else
  floats numbers;
  for (int i = 0; i < kLanes; ++i) {  // not all compilers know its type
    uint16_t half;
    std::memcpy(&half, from + 2 * i, sizeof half);
    const uint32_t rest = uint32_t{half} & 0x7fff, not_finite = rest >= 0x7c00 ? 0x7f800000 : 0;
    const float scaled = __builtin_bit_cast(float, rest << 13) * 0x1p112f;  // numbers below the least normal one, too
    const uint32_t bits = __builtin_bit_cast(uint32_t, scaled) | not_finite | (uint32_t{half} & 0x8000) << 16;
    numbers[i] = __builtin_bit_cast(float, bits);
  }
  return numbers;
#endif
}

inline floats load_bytes_as_floats(const uint8_t* from) {
  typedef uint8_t lane_bytes __attribute__((vector_size(kLanes)));
  lane_bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
#if defined(__AVX512F__)
  return (floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)bytes));
#elif defined(__AVX2__)
  return (floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  return __builtin_convertvector(bytes, floats);
#endif
}

// Of kLanes outputs.
struct GroupScales {
  floats scale, zero;  // or below
};

inline bool has_below(const PackedMatrix& weights) {
  return weights.scale_form == ScaleForm::kFactors || weights.scale_form == ScaleForm::kLess;
}

// The factors (kFactors) of a group of a panel, and of those around it.
inline const uint8_t* factors_at(const PackedMatrix& weights, int64_t panel, int64_t groups, int64_t group) {
  const int64_t per_panel = (groups + kFactorGroups - 1) / kFactorGroups;
  return reinterpret_cast<const uint8_t*>(weights.scales) + (panel * per_panel + group / kFactorGroups) * kFactorBytes;
}

// What they make of a group from `output` on.
inline GroupScales factors_of(const uint8_t* large, int64_t group, int output) {
  const uint8_t* const small = large + 4 * kPanel + group % kFactorGroups * 2 * kPanel;
  const floats scale = load_float16(large + 2 * output) * load_bytes_as_floats(small + output);
  return {scale, load_float16(large + 2 * (kPanel + output)) * load_bytes_as_floats(small + kPanel + output)};
}

// Those of a group of a panel from `output` on; no zeros where there are none. `groups` are those of a row.
inline GroupScales scales_at(const PackedMatrix& weights, int64_t panel, int64_t groups, int64_t group, int output) {
  const int64_t at = (panel * groups + group) * kPanel + output;
  const auto* const held = reinterpret_cast<const uint8_t*>(weights.scales);
  if (weights.scale_form == ScaleForm::kFloat16) return {load_float16(held + 2 * at), splat(0)};
  if (weights.scale_form != ScaleForm::kFactors)
    return {load(weights.scales + at), weights.zeros != nullptr ? load(weights.zeros + at) : splat(0)};
  return factors_of(factors_at(weights, panel, groups, group), group, output);
}

// The matrix with scales in float32 of blocks [step, step + now) of a panel, at most 4 * kSteps; until the
// next one of the same thread.
inline PackedMatrix opened(const PackedMatrix& weights, int64_t panel, int64_t step, int64_t now) {
  PackedMatrix open = weights;
  if (weights.scale_form == ScaleForm::kFloat32) return open;
  alignas(64) static thread_local float room[2][4 * kSteps * kPanel];
  const int64_t groups = scale_groups(weights), first = step * 32 / weights.group;
  const int64_t count = ((step + now) * 32 + weights.group - 1) / weights.group - first;
  for (int64_t i = 0; i < count; ++i)
    for (int output = 0; output < kPanel; output += kLanes) {
      const GroupScales some = scales_at(weights, panel, groups, first + i, output);
      store(room[0] + i * kPanel + output, some.scale), store(room[1] + i * kPanel + output, some.zero);
    }
  const int64_t before = (panel * groups + first) * kPanel;
  open.scales = room[0] - before;  // what is indexed as in a whole matrix
  open.zeros = weights.zeros != nullptr ? room[1] - before : nullptr;
  open.scale_form = weights.scale_form == ScaleForm::kFactors ? ScaleForm::kLess : ScaleForm::kFloat32;
  return open;
}

}  // namespace rhizome
