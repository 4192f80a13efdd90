// The products of a task in vector registers: piece after piece of 16 KiB of weights, in the L1 cache, by which all rows go,
// while the memory of the next piece is fetched.
#pragma once

#include <algorithm>

#include "linear_compressed.h"
#include "linear_quantized.h"
#include "linear_task.h"

namespace rhizome {

// The memory of `steps` blocks from `block` on, however weights are stored, fetched within `turns` calls.
inline LinesAhead piece_ahead(const PackedMatrix& weights, int64_t block, int64_t steps, int64_t turns) {
  const int64_t size = weights.format == Format::kBFloat16     ? 2 * kTileElements * sizeof(bf16)
                       : weights.format == Format::kCompressed ? kCompressedBlock
                                                               : code_bytes(weights.format, kBlockWeights);
  return LinesAhead(reinterpret_cast<const char*>(weights.data) + block * size, steps * size, turns);
}

// Calls then(panel, row, count, sums) with the sums [count, 32] of all panels and rows of a range, up to kBlockRows at once,
// and before(panel, row, count) when their last inputs are about to be multiplied.
//
// A Weights(weights, piece, following, rows) is one piece, by which so many rows go, before the thread goes on with block
// `following`; its multiply(count, rows) takes some of them: a Rows{x, x_stride, sums, adding} are rows of x and the sums of a
// panel, [count][32], which are added to what is there if `adding`. Pieces are of kSteps blocks, or what its
// most_steps(weights, rows) says.
template <class Weights, class Rows, class Number, class Before, class Then>
void multiply_pieces(const PackedMatrix& weights, const Number* x, int64_t x_stride, const Range& range, Before& before,
                     Then& then) {
  const int64_t steps = blocks(weights.inputs), rows = range.row_end - range.row_begin;
  const int64_t part = rows > kBlockRows && steps > kWholeSteps ? kPartSteps : steps;
  int64_t most = kSteps;
  if constexpr (requires { Weights::most_steps(weights, rows); }) most = Weights::most_steps(weights, rows);
  const PieceOrder order(range, steps, part, most);
  for (Piece piece = order.start(), next = piece; !order.ended(piece); piece = next) {
    next = order.after(piece);
    Weights now(weights, piece, order.ended(next) ? range.panel_next * steps : next.panel * steps + next.step, rows);
    float* const sums = sums_of_thread() + (part < steps ? (piece.panel - range.panel_begin) * rows * kPanel : 0);
    const bool last = piece.step + piece.now == steps;
    for (int64_t at = 0; at < rows; at += kBlockRows) {
      const int count = static_cast<int>(std::min<int64_t>(kBlockRows, rows - at));
      const int64_t row = range.row_begin + at;
      if (last) before(piece.panel, row, count);
      now.multiply(count, Rows{x + row * x_stride + piece.step * 32, x_stride, sums + at * kPanel, piece.step > 0});
      if (last) then(piece.panel, row, count, sums + at * kPanel);
    }
  }
}

}  // namespace rhizome
