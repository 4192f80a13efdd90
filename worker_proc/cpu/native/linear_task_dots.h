// The products of a task with AVX512's dot products: piece after piece of 16 KiB of weights, in the L1 cache, by which all
// rows go, while the memory of the next piece is fetched.
#pragma once

#if defined(__AVX512BF16__)

#include <algorithm>

#include "linear_dots.h"
#include "linear_quantized_dots.h"
#include "linear_task.h"

namespace rhizome {

// One piece, for one pass of rows after the other.
class DotPiece {
 public:
  // `following` is the block with which the thread goes on after this piece.
  DotPiece(const PackedMatrix& weights, const Piece& piece, int64_t following, int64_t passes)
      : weights_(weights), block_(piece.panel * blocks(weights.inputs) + piece.step), steps_(piece.now), only_(passes == 1),
        plain_(room()) {
    const int64_t turns = steps_ * kDotTurns * passes;
    if (weights.format == Format::kBFloat16) {
      plain_ = weights.data + block_ * 2 * kTileElements;
      ahead_ = LinesAhead(weights.data + following * 2 * kTileElements, steps_ * 4 * kTileElements, turns);
    } else {
      packed_ = true;
      const bool compressed = weights.format == Format::kCompressed;
      const int64_t size = compressed ? kCompressedBlock : code_bytes(weights.format, kBlockWeights);
      ahead_ = LinesAhead(reinterpret_cast<const char*>(weights.data) + following * size, steps_ * size, turns);
    }
  }

  void multiply(int count, const DotRows& rows) {
    if (!packed_) return dots(count, PlainDots{plain_}, rows, steps_, ahead_);
    packed_ = false;
    if (weights_.format != Format::kCompressed)
      code_dots(weights_, block_, count, rows, steps_, ahead_, room(), !only_);
    else if (only_)
      dots(count, InflatedDots<false>{weights_, block_, room()}, rows, steps_, ahead_);
    else
      dots(count, InflatedDots<true>{weights_, block_, room()}, rows, steps_, ahead_);
  }

 private:
  static bf16* room() {
    alignas(64) static thread_local bf16 plain[kSteps * 2 * kTileElements];
    return plain;
  }

  const PackedMatrix& weights_;
  const int64_t block_, steps_;
  const bool only_;
  bool packed_ = false;  // and not plain yet
  const bf16* plain_;
  LinesAhead ahead_;
};

// Calls then(panel, row, count, sums) with the sums [count, 32] of all panels and rows of a range, up to kBlockRows at once,
// and before(panel, row, count) when their last inputs are about to be multiplied.
template <class Before, class Then>
void multiply(const PackedMatrix& weights, const bf16* x, int64_t x_stride, const Range& range, Before& before,
              Then& then) {
  const int64_t steps = blocks(weights.inputs), rows = range.row_end - range.row_begin;
  const int64_t part = rows > kBlockRows && steps > kWholeSteps ? kPartSteps : steps;
  const PieceOrder order(range, steps, part);
  for (Piece piece = order.start(), next = piece; !order.ended(piece); piece = next) {
    next = order.after(piece);
    DotPiece weights_now(weights, piece, order.ended(next) ? range.panel_next * steps : next.panel * steps + next.step,
                         dot_passes(rows));
    float* const sums = sums_of_thread() + (part < steps ? (piece.panel - range.panel_begin) * rows * kPanel : 0);
    const bool last = piece.step + piece.now == steps;
    for (int64_t at = 0; at < rows; at += kBlockRows) {
      const int count = static_cast<int>(std::min<int64_t>(kBlockRows, rows - at));
      const int64_t row = range.row_begin + at;
      if (last) before(piece.panel, row, count);
      const bf16* const inputs = x + row * x_stride + piece.step * 32;
      for (int done = 0, passes = dot_passes(count); done < count; --passes) {
        const int now = (count - done + passes - 1) / passes;
        weights_now.multiply(now, {inputs + done * x_stride, x_stride, sums + (at + done) * kPanel, piece.step > 0});
        done += now;
      }
      if (last) then(piece.panel, row, count, sums + at * kPanel);
    }
  }
}

}  // namespace rhizome

#endif
