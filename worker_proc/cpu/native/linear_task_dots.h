// The products of a task with AVX512's dot products: piece after piece of 16 KiB of weights, in the L1 cache, by which all
// rows go. What the next piece needs is done meanwhile: its memory is fetched, and if it is compressed, it is inflated.
#pragma once

#if defined(__AVX512BF16__)

#include <algorithm>

#include "linear_compressed.h"
#include "linear_dots.h"
#include "linear_quantized.h"
#include "linear_task.h"

namespace rhizome {

// Lines that are fetched a few at a time.
class LinesAhead {
 public:
  // `bytes` from `from` on, within `turns` calls.
  void begin(const void* from, int64_t bytes, int64_t turns) {
    next_ = static_cast<const char*>(from);
    end_ = next_ + bytes;
    step_ = (bytes / 64 + turns - 1) / turns * 64;
  }

  void operator()() {
    if (next_ >= end_) return;
    for (const char* const stop = next_ + step_; next_ < stop; next_ += 64) __builtin_prefetch(next_, 0, 3);
  }

 private:
  const char *next_ = nullptr, *end_ = nullptr;
  int64_t step_ = 0;
};

// Weights as they lie in memory.
class PlainPieces {
 public:
  PlainPieces(const PackedMatrix& weights, const PieceOrder& order) : weights_(weights), order_(order) {}

  // The weights of `piece`, for `passes` calls of `dot_block`.
  const bf16* take(const Piece& piece, int64_t passes) {
    const Piece next = order_.after(piece);
    if (!order_.ended(next))
      ahead_.begin(weights_at(weights_, next.panel, next.step), next.now * 4 * kTileElements,
                   piece.now * kDotSlots * passes);
    return weights_at(weights_, piece.panel, piece.step);
  }

  void operator()() { ahead_(); }

 private:
  const PackedMatrix& weights_;
  const PieceOrder& order_;
  LinesAhead ahead_;
};

// Codes, widened piece by piece.
class WidenedPieces {
 public:
  WidenedPieces(const PackedMatrix& weights, const PieceOrder&) : weights_(weights) {}

  const bf16* take(const Piece& piece, int64_t /*passes*/) {
    alignas(64) static thread_local bf16 widened[kSteps * 2 * kTileElements];
    widen(weights_, piece.panel, piece.step, piece.now, widened);
    return widened;
  }

  void operator()() {}

 private:
  const PackedMatrix& weights_;
};

// Compressed weights: while rows go by a piece, the next one is inflated, a pack with every call, and the one after it
// fetched.
class InflatedPieces {
 public:
  InflatedPieces(const PackedMatrix& weights, const PieceOrder& order)
      : weights_(weights), order_(order), inflater_(weights), room_(room()) {
    inflate(order.start());
    finish();
  }

  const bf16* take(const Piece& piece, int64_t passes) {
    finish();
    const bf16* const ready = to_begin_;
    const Piece next = order_.after(piece);
    if (order_.ended(next)) return ready;
    inflate(next);
    const Piece third = order_.after(next);
    if (!order_.ended(third))
      ahead_.begin(compressed_block(weights_, block_of(third)), third.now * kCompressedBlock,
                   piece.now * kDotSlots * passes);
    return ready;
  }

  void operator()() {
    ahead_();
    if (from_ < from_end_) inflate_pack();
  }

 private:
  static constexpr int64_t kPieceWeights = kSteps * 2 * kTileElements;

  static bf16* room() {
    alignas(64) static thread_local bf16 pieces[2 * kPieceWeights];
    return pieces;
  }

  int64_t block_of(const Piece& piece) const { return piece.panel * blocks(weights_.inputs) + piece.step; }

  // Begins with a piece, in the half of the room that the last one is not in.
  void inflate(const Piece& piece) {
    block_ = block_of(piece), end_ = block_ + piece.now;
    from_ = compressed_block(weights_, block_), from_end_ = compressed_block(weights_, end_);
    to_ = to_begin_ = to_begin_ == room_ ? room_ + kPieceWeights : room_;
  }

  void inflate_pack() {
    inflater_.inflate(from_, to_);
    from_ += kPackBytes, to_ += kPackWeights;
  }

  void finish() {
    while (from_ < from_end_) inflate_pack();
    if (block_ < end_) put_exceptions(weights_, block_, end_, to_begin_);
    block_ = end_;
  }

  const PackedMatrix& weights_;
  const PieceOrder& order_;
  const Inflater inflater_;
  bf16* const room_;
  bf16 *to_begin_ = nullptr, *to_ = nullptr;
  const uint8_t *from_ = nullptr, *from_end_ = nullptr;
  int64_t block_ = 0, end_ = 0;  // of the matrix: those that are inflated, and have their exceptions to come
  LinesAhead ahead_;
};

template <class Pieces, class Before, class Then>
void multiply_pieces(const PackedMatrix& weights, const bf16* x, int64_t x_stride, const Range& range, Before& before,
                     Then& then) {
  const int64_t steps = blocks(weights.inputs), rows = range.row_end - range.row_begin;
  const int64_t part = rows > kBlockRows && steps > kWholeSteps ? kPartSteps : steps;
  const PieceOrder order(range, steps, part);
  Pieces pieces(weights, order);
  for (Piece piece = order.start(); !order.ended(piece); piece = order.after(piece)) {
    const bf16* const data = pieces.take(piece, dot_passes(rows));
    float* const sums = sums_of_thread() + (part < steps ? (piece.panel - range.panel_begin) * rows * kPanel : 0);
    const bool last = piece.step + piece.now == steps;
    for (int64_t at = 0; at < rows; at += kBlockRows) {
      const int count = static_cast<int>(std::min<int64_t>(kBlockRows, rows - at));
      const int64_t row = range.row_begin + at;
      if (last) before(piece.panel, row, count);
      dot_rows(x + row * x_stride + piece.step * 32, x_stride, count, data, piece.now, sums + at * kPanel, piece.step > 0,
               pieces);
      if (last) then(piece.panel, row, count, sums + at * kPanel);
    }
  }
}

// Calls then(panel, row, count, sums) with the sums [count, 32] of all panels and rows of a range, up to kBlockRows at once,
// and before(panel, row, count) when their last inputs are about to be multiplied.
template <class Before, class Then>
void multiply(const PackedMatrix& weights, const bf16* x, int64_t x_stride, const Range& range, Before& before,
              Then& then) {
  if (weights.format == Format::kBFloat16)
    multiply_pieces<PlainPieces>(weights, x, x_stride, range, before, then);
  else if (weights.format == Format::kCompressed)
    multiply_pieces<InflatedPieces>(weights, x, x_stride, range, before, then);
  else
    multiply_pieces<WidenedPieces>(weights, x, x_stride, range, before, then);
}

}  // namespace rhizome

#endif
