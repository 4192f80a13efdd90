// Sums of x over the inputs of segments (linear_number_dots.h), which zeros are multiplied with: they lie behind the rows.
#pragma once

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "linear_quantized.h"
#include "room.h"
#include "rows.h"

namespace rhizome {

// How the blocks of a matrix in groups are cut: a segment ends where its group does, and before every 256 inputs.
class Segments {
 public:
  explicit Segments(const PackedMatrix& weights) : of_group_(weights.group / 32), of_both_(std::lcm(of_group_, kSteps)) {}

  int64_t group(int64_t step) const { return step / of_group_; }
  int64_t index(int64_t step) const { return step / of_group_ + step / kSteps - step / of_both_; }
  int64_t of_group() const { return of_group_; }
  int64_t left(int64_t step) const { return of_group_ - step % of_group_; }
  int64_t end(int64_t step) const { return std::min((step / of_group_ + 1) * of_group_, (step / kSteps + 1) * kSteps); }

 private:
  int64_t of_group_, of_both_;
};

// Where those of a row begin, float32, of which `x` is what block `step` takes.
inline const bf16* summed_behind(const bf16* x, const PackedMatrix& weights, int64_t step) {
  return x + 32 * (blocks(weights.inputs) - step);
}

// Until the next ones of the same thread.
class SummedRows {
 public:
  SummedRows(const bf16* x, int64_t x_stride, int64_t rows, const PackedMatrix& weights)
      : steps_(blocks(weights.inputs)), segments_(weights),
        stride_(row_stride(32 * steps_ + 2 * (segments_.index(steps_ - 1) + 1))) {
    static thread_local std::vector<bf16> memory;
    data_ = room_in(memory, rows * stride_);
    for_rows(rows, 32 * steps_, [&](int64_t row) { sum(x + row * x_stride, data_ + row * stride_); });
  }

  const bf16* data() const { return data_; }
  int64_t stride() const { return stride_; }

 private:
  typedef double doubles __attribute__((vector_size(64)));

  void sum(const bf16* from, bf16* to) const {
    std::memcpy(to, from, 64 * steps_);
    float* out = reinterpret_cast<float*>(to + 32 * steps_);
    for (int64_t step = 0; step < steps_;) {
      doubles sums = {};  // of numbers of like size exact
      for (const int64_t stop = std::min(steps_, segments_.end(step)); step < stop; ++step)
        for (int i = 0; i < 32; i += 8) {
          const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 32 * step + i)));
          sums += __builtin_convertvector(_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)), doubles);
        }
      double sum = 0;
      for (int i = 0; i < 8; ++i) sum += sums[i];
      *out++ = static_cast<float>(sum);
    }
  }

  const int64_t steps_;
  const Segments segments_;
  const int64_t stride_;
  bf16* data_;
};

}  // namespace rhizome

#endif
