// Scales that take fewer bits than float32, as GGUF files have them; a few groups at a time, they become float32 in the L1 cache.
//
//   kFloat16  [panels][groups][32], symmetric codes
//   kFactors  for each 256 inputs of a panel 640 bytes: [2][32] float16, then [8 groups][2][32] bytes, first those of scales and
//             then those of the numbers below zero that codes 0 stand for. A float16 times a byte is a scale, or such a number.
//
// What comes out has the bits of `steps_of` in worker_proc/quantization/rows.py.
#pragma once

#include <algorithm>

#include "linear.h"
#include "linear_task.h"

namespace rhizome {

inline constexpr int64_t kFactorGroups = 8, kFactorBytes = 640;  // of 256 inputs

inline int64_t scale_groups(const PackedMatrix& weights) {
  return (blocks(weights.inputs) * 32 + weights.group - 1) / weights.group;
}

// kLanes numbers of float16.
inline floats load_float16(const uint8_t* from) {
#if defined(__AVX512F__)
  return (floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  _Float16 halves[kLanes];
  std::memcpy(halves, from, sizeof halves);
  floats numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = static_cast<float>(halves[i]);
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

// Those of `count` groups of a panel from `first` on, [count][32], and the zeros where there are.
inline void open_scales(const PackedMatrix& weights, int64_t panel, int64_t first, int64_t count, float* scales, float* zeros) {
  const auto* const held = reinterpret_cast<const uint8_t*>(weights.scales);
  const int64_t all = scale_groups(weights);
  if (weights.scale_form == ScaleForm::kFloat16) {
    const uint8_t* const from = held + (panel * all + first) * kPanel * 2;
    for (int64_t i = 0; i < count * kPanel; i += kLanes) store(scales + i, load_float16(from + 2 * i));
    return;
  }
  const int64_t per_panel = (all + kFactorGroups - 1) / kFactorGroups;
  for (int64_t group = first; group < first + count; ++group, scales += kPanel, zeros += kPanel) {
    const uint8_t* const large = held + (panel * per_panel + group / kFactorGroups) * kFactorBytes;
    const uint8_t* const small = large + 4 * kPanel + group % kFactorGroups * 2 * kPanel;
    for (int i = 0; i < kPanel; i += kLanes) {
      floats scale = load_float16(large + 2 * i) * load_bytes_as_floats(small + i);
      const floats below = load_float16(large + 2 * (kPanel + i)) * load_bytes_as_floats(small + kPanel + i);
      scale = select(scale == 0, -below, scale);  // all numbers are one: codes are 0, one step from zero
      scale = select(scale == 0, splat(1), scale);
      store(scales + i, scale);
      store(zeros + i, below / scale);
    }
  }
}

// A matrix whose scales and zeros can be read, piece after piece.
class OpenMatrix {
 public:
  explicit OpenMatrix(const PackedMatrix& weights) : packed_(weights), open_(weights) { open_.scale_form = ScaleForm::kFloat32; }

  // With those of blocks [step, step + now) of a panel, at most kMostSteps; until the next ones of the same thread.
  const PackedMatrix& at(int64_t panel, int64_t step, int64_t now) {
    if (packed_.scale_form == ScaleForm::kFloat32) return packed_;
    alignas(64) static thread_local float room[2][kMostSteps * kPanel];
    const int64_t first = step * 32 / packed_.group, count = ((step + now) * 32 + packed_.group - 1) / packed_.group - first;
    open_scales(packed_, panel, first, count, room[0], room[1]);
    const int64_t before = (panel * scale_groups(packed_) + first) * kPanel;
    open_.scales = room[0] - before;  // what is indexed as in a whole matrix
    open_.zeros = packed_.scale_form == ScaleForm::kFactors ? room[1] - before : nullptr;
    return open_;
  }

 private:
  static constexpr int64_t kMostSteps = 4 * kSteps;

  const PackedMatrix& packed_;
  PackedMatrix open_;
};

}  // namespace rhizome
