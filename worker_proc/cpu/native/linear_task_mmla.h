// The products of a task with Arm's matrix products.
#pragma once

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

#include "linear_mmla.h"
#include "linear_plain.h"
#include "linear_task_pieces.h"

namespace rhizome {

using TaskRows = PairedRows;  // what `multiply` takes

// One piece, for one pass of rows after the other.
class MmlaPiece {
 public:
  // `following` is the block with which the thread goes on after this piece.
  MmlaPiece(const PackedMatrix& weights, const Piece& piece, int64_t following, int64_t rows)
      : steps_(piece.now), turned_(mmla_passes(rows) > 1), weights_(weights_at(weights, piece.panel, piece.step)),
        ahead_(piece_ahead(weights, following, steps_, steps_ * kMmlaTurns * 2 * mmla_passes(rows))) {
    alignas(64) static thread_local bf16 room[kSteps * 2 * kTileElements];
    if (weights.format != Format::kBFloat16) {
      make_plain(weights, piece.panel * blocks(weights.inputs) + piece.step, steps_, room, [] {});
      weights_ = room;
    }
    if (turned_) {
      turn_over(weights_, steps_, room);
      weights_ = room;
    }
  }

  // At most kBlockRows rows; in passes of two rows by two, about the same number each.
  void multiply(int count, const MmlaRows& rows) {
    for (int done = 0, passes = mmla_passes(count); done < count; --passes) {
      const int pairs = (count - done + 1) / 2, now = std::min((pairs + passes - 1) / passes * 2, count - done);
      const MmlaRows some{rows.x + done * rows.x_stride, rows.x_stride, rows.sums + done * kPanel, rows.adding};
      if (turned_)
        mmla_pass<true>(now, some, weights_, steps_, ahead_);
      else
        mmla_pass<false>(now, some, weights_, steps_, ahead_);
      done += now;
    }
  }

 private:
  const int64_t steps_;
  const bool turned_;
  const bf16* weights_;
  LinesAhead ahead_;
};

template <class Before, class Then>
void multiply(const PackedMatrix& weights, const uint32_t* x, int64_t x_stride, const Range& range, Before& before,
              Then& then) {
  multiply_pieces<MmlaPiece, MmlaRows>(weights, x, x_stride, range, before, then);
}

}  // namespace rhizome

#endif
