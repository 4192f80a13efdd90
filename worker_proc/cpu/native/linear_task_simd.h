// The products of a task in ordinary vector registers, without dot products of bfloat16.
#pragma once

#include "linear_inflated_simd.h"
#include "linear_plain.h"
#include "linear_quantized_simd.h"
#include "linear_simd.h"
#include "linear_task_pieces.h"

namespace rhizome {

using TaskRows = WideRows;  // what `multiply` takes

// One piece, for one pass of rows after the other.
class SimdPiece {
 public:
  // `following` is the block with which the thread goes on after this piece.
  SimdPiece(const PackedMatrix& weights, const Piece& piece, int64_t following, int64_t rows)
      : weights_(weights), block_(piece.panel * blocks(weights.inputs) + piece.step), steps_(piece.now),
        ahead_(piece_ahead(weights, following, steps_, steps_ * turns(weights, rows))) {
    if (weights.format == Format::kBFloat16) {
      plain_ = weights_at(weights, piece.panel, piece.step);
    } else if (!in_passing(weights.format, rows)) {
      make_plain(weights, block_, steps_, room(), ahead_);
      plain_ = room();
    }
  }

  // At most kBlockRows rows.
  void multiply(int count, const SimdRows& rows) {
    if (weights_.format != Format::kFloat8) return multiply_blocks(0, steps_, count, rows);
    // scales multiply the sums of a group
    alignas(64) float sums[kBlockRows * kPanel];
    const int64_t all = blocks(weights_.inputs), panel = block_ / all, first = block_ % all, of_group = weights_.group / 32;
    for (int64_t step = 0, now; step < steps_; step += now) {
      const int64_t group = (first + step) / of_group;
      now = std::min(steps_, (group + 1) * of_group - first) - step;
      multiply_blocks(step, now, count, {rows.x + 32 * step, rows.x_stride, sums, false});
      const float* const scales = weights_.scales + (panel * groups(weights_) + group) * kPanel;
      add_scaled(sums, scales, count, rows.sums, rows.adding || step > 0);
    }
  }

 private:
  // Blocks [begin, begin + steps) of the piece.
  void multiply_blocks(int64_t begin, int64_t steps, int count, const SimdRows& rows) {
    for (int done = 0, now; done < count; done += now) {
      now = simd_pass_rows(count - done);
      const SimdRows some{rows.x + done * rows.x_stride, rows.x_stride, rows.sums + done * kPanel, rows.adding};
      if (plain_ != nullptr)
        simd_pass(now, some, PlainPiece(plain_ + begin * 2 * kTileElements), steps, ahead_);
#if defined(RHIZOME_INFLATES_IN_PASSING)
      else if (weights_.format == Format::kCompressed)
        inflated_pass(now, some, weights_, block_, steps, room(), ahead_);
#endif
      else
        code_pass(weights_, block_ + begin, now, some, steps, ahead_);
    }
  }

  // Whether weights become numbers while so many rows go by, rather than before.
  static bool in_passing(Format format, int64_t rows) {
    return format == Format::kCompressed ? rows <= kInflatedRows : widened_in_passing(format, rows);
  }

  // Calls of `ahead` per block.
  static int64_t turns(const PackedMatrix& weights, int64_t rows) {
    const bool before = weights.format == Format::kCompressed && !in_passing(weights.format, rows);
    return kSimdTurns * simd_runs(static_cast<int>(rows)) + (before ? kInflateTurns : 0);
  }

  static bf16* room() {
    alignas(64) static thread_local bf16 plain[kSteps * 2 * kTileElements];
    return plain;
  }

  static void add_scaled(const float* sums, const float* scales, int count, float* to, bool adding) {
    for (int row = 0; row < count; ++row, sums += kPanel, to += kPanel)
      for (int i = 0; i < kPanel; i += kLanes) {
        floats product = load(sums + i) * load(scales + i);
        product = held(product);  // compilers would add it before it is rounded
        store(to + i, adding ? load(to + i) + product : product);
      }
  }

  const PackedMatrix& weights_;
  const int64_t block_, steps_;
  const bf16* plain_ = nullptr;  // codes are widened in passing then
  LinesAhead ahead_;
};

template <class Before, class Then>
void multiply(const PackedMatrix& weights, const float* x, int64_t x_stride, const Range& range, Before& before,
              Then& then) {
  multiply_pieces<SimdPiece, SimdRows>(weights, x, x_stride, range, before, then);
}

}  // namespace rhizome
