// The products of a task in ordinary vector registers, without dot products of bfloat16.
#pragma once

#include <algorithm>

#include "linear_compressed.h"
#include "linear_quantized.h"
#include "linear_simd.h"
#include "linear_task.h"

namespace rhizome {

// Blocks [step, step + count) of a panel, of weights that are not stored as bfloat16, in the layout of linear.h.
inline void make_plain(const PackedMatrix& weights, int64_t panel, int64_t step, int64_t count, bf16* out) {
  if (weights.format != Format::kCompressed) return widen(weights, panel, step, count, out);
#if defined(__AVX512BW__)
  const int64_t first = panel * blocks(weights.inputs) + step;
  const uint8_t* from = compressed_block(weights, first);
  const Inflater inflater(weights);
  bf16* to = out;
  for (int64_t pack = 0; pack < count * kBlockPacks; ++pack, from += kPackBytes, to += kPackWeights) {
    fetch(reinterpret_cast<const char*>(from) + 4096, kPackBytes / 64);
    inflater.inflate(from, to);
  }
  put_exceptions(weights, first, first + count, out);
#endif
}

// Calls then(panel, row, count, sums) with the sums [count, 32] of all panels and rows of a range, up to kBlockRows at once,
// and before(panel, row, count) when their last inputs are about to be multiplied.
//
// With many rows, inputs are cut into pieces and parts as on AMX (linear_task_amx.h), and a piece of weights that are not
// stored as bfloat16 is made plain for all rows together.
template <class Before, class Then>
void multiply(const PackedMatrix& weights, const float* x, int64_t x_stride, const Range& range, Before& before,
              Then& then) {
  const int64_t steps = blocks(weights.inputs), rows = range.row_end - range.row_begin;
  const bool other = weights.format != Format::kBFloat16, few = rows <= kBlockRows && !other;
  const int64_t piece = few ? steps : kSteps;
  const int64_t part = !few && steps > kWholeSteps ? kPartSteps : steps;
  for (int64_t first = 0; first < steps; first += part) {
    const int64_t stop = std::min(steps, first + part);
    for (int64_t panel = range.panel_begin; panel < range.panel_end; ++panel) {
      float* const sums = sums_of_thread() + (part < steps ? (panel - range.panel_begin) * rows * kPanel : 0);
      for (int64_t step = first; step < stop; step += piece) {
        const int64_t now = std::min(piece, stop - step);
        const bf16* data = weights_at(weights, panel, step);
        if (other) {
          alignas(64) static thread_local bf16 plain[kSteps * 2 * kTileElements];
          make_plain(weights, panel, step, now, plain);
          data = plain;
        }
        for (int64_t at = 0; at < rows; at += kBlockRows) {
          const int count = static_cast<int>(std::min<int64_t>(kBlockRows, rows - at));
          const int64_t row = range.row_begin + at;
          const bool last = step + now == steps;
          if (last) before(panel, row, count);
          simd_block(x + row * x_stride + step * 32, x_stride, count, data, now, sums + at * kPanel, step > 0);
          if (few)  // main memory would be idle while the sums are finished
            fetch(reinterpret_cast<const char*>(weights_at(weights, panel + 1, 0)), kBlockLines);
          if (last) then(panel, row, count, sums + at * kPanel);
        }
      }
    }
  }
}

}  // namespace rhizome
