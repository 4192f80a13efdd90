// The products of a task in integers.
#pragma once

#include "linear_integers.h"
#include "linear_task_pieces.h"

#if defined(RHIZOME_INTEGERS)

namespace rhizome {

// One piece, for one pass of rows after the other.
class IntegerPiece {
 public:
  // `following` is the block with which the thread goes on after this piece.
  IntegerPiece(const PackedMatrix& weights, const Piece& piece, int64_t following, int64_t rows)
      : place_{weights, groups(weights), piece.panel, piece.step, piece.now},
        ahead_(piece_ahead(weights, following, piece.now, piece.now * kIntegerTurns * passes(rows) * integer_runs(static_cast<int>(rows)))) {
    static_assert(kSteps * 32 <= kMostExact);
    if (passes(rows) <= kInPassing) return;
    alignas(64) static thread_local int16_t room[kSteps * kBlockWeights];
    widen_integers(place_, room);
    wide_ = room;
  }

  // At most kBlockRows rows; in passes of about the same number.
  void multiply(int count, const IntegerRows& rows) {
    for (int done = 0, left = static_cast<int>(passes(count)); done < count; --left) {
      const int now = (count - done + left - 1) / left;
      const IntegerRows some{rows.x + done * rows.x_stride, rows.x_stride, rows.sums + done * kPanel, rows.adding};
      integer_pass(place_, now, some, wide_, ahead_);
      done += now;
    }
  }

 private:
  static int64_t passes(int64_t rows) { return (rows + kIntegerRows - 1) / kIntegerRows; }

  static constexpr int64_t kInPassing = 3;  // passes up to which it costs less to widen codes anew for each

  const IntegerPlace place_;
  const int16_t* wide_ = nullptr;  // codes are widened in registers then
  LinesAhead ahead_;
};

template <class Before, class Then>
void multiply_integers(const PackedMatrix& weights, const int16_t* x, int64_t x_stride, const Range& range, Before& before,
                       Then& then) {
  multiply_pieces<IntegerPiece, IntegerRows>(weights, x, x_stride, range, before, then);
}

}  // namespace rhizome

#endif
