// The products of a task in ordinary vector registers.
#pragma once

#include <algorithm>

#include "linear_quantized.h"
#include "linear_simd.h"
#include "linear_task.h"

namespace rhizome {

// Calls then(panel, row, count, sums) with the sums [count, 32] of all panels and rows of a range, up to kBlockRows at once,
// and before(panel, row, count) when their last inputs are about to be multiplied.
//
// With many rows, inputs are cut into pieces and parts as on AMX (linear_task_amx.h), and a piece of quantized weights
// is widened for all rows together.
template <class Before, class Then>
void multiply(const PackedMatrix& weights, const bf16* x, int64_t x_stride, const Range& range, Before& before,
              Then& then) {
  const int64_t steps = blocks(weights.inputs), rows = range.row_end - range.row_begin;
  const bool quantized = weights.format != Format::kBFloat16, few = rows <= kBlockRows && !quantized;
  const int64_t piece = few ? steps : kSteps;
  const int64_t part = !few && steps > kWholeSteps ? kPartSteps : steps;
  for (int64_t first = 0; first < steps; first += part) {
    const int64_t stop = std::min(steps, first + part);
    for (int64_t panel = range.panel_begin; panel < range.panel_end; ++panel) {
      float* const sums = sums_of_thread() + (part < steps ? (panel - range.panel_begin) * rows * kPanel : 0);
      for (int64_t step = first; step < stop; step += piece) {
        const int64_t now = std::min(piece, stop - step);
        const bf16* data = weights_at(weights, panel, step);
        if (quantized) {
          alignas(64) static thread_local bf16 widened[kSteps * 2 * kTileElements];
          widen(weights, panel, step, now, widened);
          data = widened;
        }
        for (int64_t at = 0; at < rows; at += kBlockRows) {
          const int count = static_cast<int>(std::min<int64_t>(kBlockRows, rows - at));
          const int64_t row = range.row_begin + at;
          const bool last = step + now == steps;
          if (last) before(panel, row, count);
          simd_block(x + row * x_stride + step * 32, x_stride, count, data, now, sums + at * kPanel, step > 0);
          if (few)  // main memory would be idle while the sums are finished
            for (int line = 0; line < kBlockLines; ++line)
              __builtin_prefetch(reinterpret_cast<const char*>(weights_at(weights, panel + 1, 0)) + line * 64, 0, 2);
          if (last) then(panel, row, count, sums + at * kPanel);
        }
      }
    }
  }
}

}  // namespace rhizome
