// The products of a task in ordinary vector registers, without dot products of bfloat16.
#pragma once

#include "linear_simd.h"
#include "linear_task_pieces.h"

namespace rhizome {

// Blocks [step, step + count) of a panel, of weights that are not stored as bfloat16, in the layout of linear.h.
inline void make_plain(const PackedMatrix& weights, int64_t panel, int64_t step, int64_t count, bf16* out) {
  if (weights.format != Format::kCompressed) return widen(weights, panel, step, count, out);
#if defined(__AVX2__)
  const int64_t first = panel * blocks(weights.inputs) + step;
  const uint8_t* from = compressed_block(weights, first);
  const Inflater inflater(weights);
  bf16* to = out;
  for (int64_t pack = 0; pack < count * kBlockPacks; ++pack, from += kPackBytes, to += kPackWeights) inflater.inflate(from, to);
  put_exceptions(weights, first, first + count, out);
#endif
}

// One piece, for one pass of rows after the other.
class SimdPiece {
 public:
  // `following` is the block with which the thread goes on after this piece.
  SimdPiece(const PackedMatrix& weights, const Piece& piece, int64_t following, int64_t rows) : steps_(piece.now) {
    if (weights.format == Format::kBFloat16) {
      data_ = weights_at(weights, piece.panel, piece.step);
    } else {
      alignas(64) static thread_local bf16 plain[kSteps * 2 * kTileElements];
      make_plain(weights, piece.panel, piece.step, piece.now, plain);
      data_ = plain;
    }
    if (weights.format == Format::kBFloat16 || weights.format == Format::kCompressed)  // `widen` fetches codes
      ahead_ = piece_ahead(weights, following, steps_, steps_ * kSimdTurns * simd_runs(static_cast<int>(rows)));
  }

  // At most kBlockRows rows.
  void multiply(int count, const SimdRows& rows) {
    for (int done = 0, now; done < count; done += now) {
      now = simd_pass_rows(count - done);
      simd_pass(now, {rows.x + done * rows.x_stride, rows.x_stride, rows.sums + done * kPanel, rows.adding}, data_, steps_,
                ahead_);
    }
  }

 private:
  const bf16* data_;
  const int64_t steps_;
  LinesAhead ahead_;
};

template <class Before, class Then>
void multiply(const PackedMatrix& weights, const float* x, int64_t x_stride, const Range& range, Before& before,
              Then& then) {
  multiply_pieces<SimdPiece, SimdRows>(weights, x, x_stride, range, before, then);
}

}  // namespace rhizome
