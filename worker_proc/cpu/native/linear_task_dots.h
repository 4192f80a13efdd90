// The products of a task with AVX512's dot products.
#pragma once

#if defined(__AVX512BF16__)

#include "linear_dots.h"
#include "linear_quantized_dots.h"
#include "linear_task_pieces.h"

namespace rhizome {

// One piece, for one pass of rows after the other.
class DotPiece {
 public:
  static int64_t most_steps(const PackedMatrix& weights, int64_t rows) {
    return in_nibbles(weights.format) && dot_passes(rows) == 1 ? 4 * kSteps : kSteps;
  }

  // `following` is the block with which the thread goes on after this piece.
  DotPiece(const PackedMatrix& weights, const Piece& piece, int64_t following, int64_t rows)
      : weights_(weights), block_(piece.panel * blocks(weights.inputs) + piece.step), steps_(piece.now),
        only_(dot_passes(rows) == 1), packed_(weights.format != Format::kBFloat16),
        plain_(packed_ ? room() : weights.data + block_ * 2 * kTileElements),
        ahead_(!packed_ && found_ahead(rows)
                   ? LinesAhead()
                   : piece_ahead(weights, following, steps_, steps_ * kDotTurns * dot_passes(rows))) {}

  // At most kBlockRows rows.
  void multiply(int count, const DotRows& rows) {
    for (int done = 0, passes = dot_passes(count); done < count; --passes) {
      const int now = (count - done + passes - 1) / passes;
      pass(now, {rows.x + done * rows.x_stride, rows.x_stride, rows.sums + done * kPanel, rows.adding});
      done += now;
    }
  }

 private:
  void pass(int count, const DotRows& rows) {
    if (!packed_) return dots(count, PlainDots{plain_}, rows, steps_, ahead_);
    packed_ = false;
    if (has_codes(weights_.format))
      code_dots(weights_, block_, count, rows, steps_, ahead_, room(), !only_);
    else if (only_)
      dots(count, InflatedDots<false>{weights_, block_, room()}, rows, steps_, ahead_);
    else
      dots(count, InflatedDots<true>{weights_, block_, room()}, rows, steps_, ahead_);
  }

  static bf16* room() {
    alignas(64) static thread_local bf16 plain[kSteps * 2 * kTileElements];
    return plain;
  }

  const PackedMatrix& weights_;
  const int64_t block_, steps_;
  const bool only_;
  bool packed_;  // and not plain yet
  const bf16* plain_;
  LinesAhead ahead_;
};

template <class Before, class Then>
void multiply(const PackedMatrix& weights, const bf16* x, int64_t x_stride, const Range& range, Before& before,
              Then& then) {
  multiply_pieces<DotPiece, DotRows>(weights, x, x_stride, range, before, then);
}

}  // namespace rhizome

#endif
