// The products of a task in ordinary vector registers, without dot products of bfloat16.
#pragma once

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
        ahead_(piece_ahead(weights, following, steps_, steps_ * kSimdTurns * simd_runs(static_cast<int>(rows)))) {
    if (weights.format == Format::kBFloat16) {
      plain_ = weights_at(weights, piece.panel, piece.step);
    } else if (!has_codes(weights.format) || !widened_in_passing(weights.format, rows)) {
      alignas(64) static thread_local bf16 plain[kSteps * 2 * kTileElements];
      make_plain(weights, block_, steps_, plain);
      plain_ = plain;
    }
  }

  // At most kBlockRows rows.
  void multiply(int count, const SimdRows& rows) {
    for (int done = 0, now; done < count; done += now) {
      now = simd_pass_rows(count - done);
      const SimdRows some{rows.x + done * rows.x_stride, rows.x_stride, rows.sums + done * kPanel, rows.adding};
      if (plain_ == nullptr)
        code_pass(weights_, block_, now, some, steps_, ahead_);
      else
        simd_pass(now, some, PlainPiece(plain_), steps_, ahead_);
    }
  }

 private:
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
