// The products of a task with AVX512's dot products.
#pragma once

#if defined(__AVX512BF16__)

#include "linear_dots.h"
#include "linear_number_dots.h"
#include "linear_task_pieces.h"

namespace rhizome {

// One piece, for one pass of rows after the other.
class DotPiece {
 public:
  // Codes that one pass takes come in pieces of 16 KiB.
  static int64_t most_steps(const PackedMatrix& weights, int64_t rows) {
    return as_numbers(weights.format) && in_one_pass(rows) ? (in_nibbles(weights.format) ? 4 : 2) * kSteps : kSteps;
  }

  // `following` is the block with which the thread goes on after this piece.
  DotPiece(const PackedMatrix& weights, const Piece& piece, int64_t following, int64_t rows)
      : weights_(in_one_pass(rows) ? weights : opened(weights, piece.panel, piece.step, piece.now)), piece_(piece),
        only_(in_one_pass(rows)), at_once_(as_numbers(weights.format) ? number_rows(weights.format, weights.zeros != nullptr) : kDotRows),
        packed_(weights.format != Format::kBFloat16),
        plain_(packed_ ? room() : weights_at(weights, piece.panel, piece.step)),
        ahead_(!packed_ && found_ahead(rows)
                   ? LinesAhead()
                   : piece_ahead(weights, following, piece.now, piece.now * kDotTurns * passes(rows))) {}

  // At most kBlockRows rows.
  void multiply(int count, const DotRows& rows) {
    for (int done = 0, left = passes(count); done < count; --left) {
      const int now = (count - done + left - 1) / left;
      pass(now, {rows.x + done * rows.x_stride, rows.x_stride, rows.sums + done * kPanel, rows.adding});
      done += now;
    }
  }

 private:
  // How often so many rows go by weights: as evenly as can be. The bits of a row do not depend on it.
  int passes(int64_t rows) const { return only_ ? 1 : static_cast<int>((rows + at_once_ - 1) / at_once_); }

  void pass(int count, const DotRows& rows) {
    const bool kept = !packed_, numbers = as_numbers(weights_.format);
    packed_ = false;
    if (kept && (!numbers || by_channel(weights_.format))) return dots(count, PlainDots{plain_}, rows, piece_.now, ahead_);
    if (numbers) {
      const NumberPlace place{weights_, piece_.panel, piece_.step, piece_.now};
      if (kept) return kept_number_dots(place, count, rows, ahead_, room());
      bf16* const keep = only_ ? nullptr : room();
      if (in_nibbles(weights_.format)) return nibble_number_dots(place, count, rows, ahead_, keep);
      return byte_number_dots(place, count, rows, ahead_, keep);
    }
    const int64_t block = piece_.panel * blocks(weights_.inputs) + piece_.step;
    if (only_)
      dots(count, InflatedDots<false>{weights_, block, room()}, rows, piece_.now, ahead_);
    else
      dots(count, InflatedDots<true>{weights_, block, room()}, rows, piece_.now, ahead_);
  }

  static bf16* room() {
    alignas(64) static thread_local bf16 plain[kSteps * 2 * kTileElements];
    return plain;
  }

  const PackedMatrix weights_;
  const Piece& piece_;
  const bool only_;
  const int at_once_;
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
