// What a task of a product works on, and how it cuts its inputs.
#pragma once

#include <algorithm>

#include "linear.h"

namespace rhizome {

constexpr int64_t kGroupRows = 576;  // of x that a task takes at most, for the L2 cache: 512 and some decodes
constexpr int64_t kSteps = 8;        // blocks of 32 inputs in one pass over the rows of a group: 16 KiB of weights
constexpr int64_t kWholeSteps = 32;  // more blocks are taken in parts
constexpr int64_t kPartSteps = 16;   // blocks in a part
constexpr int64_t kPartRows = 320;   // the same where the inputs are taken in parts: 256 and some decodes
constexpr int64_t kMaxChunk = kMaxHead / kPanel;
constexpr int kBlockLines = 2 * kTileElements * sizeof(bf16) / 64;

// Rows of x and panels of weights, [begin, end), and the panel with which the thread probably goes on afterwards: what lies
// there may be fetched, behind the end of the matrix too.
struct Range {
  int64_t row_begin, row_end, panel_begin, panel_end, panel_next;
};

// Block `step` of the inputs of a panel.
inline const bf16* weights_at(const PackedMatrix& weights, int64_t panel, int64_t step) {
  return weights.data + (panel * blocks(weights.inputs) + step) * 2 * kTileElements;
}

// Weights that will be wanted soon: `lines` cache lines more with every block of inputs.
struct Prefetch {
  const char* next;
  int lines;
};

// Brings lines to the L2 cache.
inline void fetch(const char* from, int64_t lines) {
  for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(from + line * 64, 0, 2);
}

// Lines that are fetched a few at a time, into the L2 cache: only few can be on their way to an L1 cache at once. Zen 4 seems to
// drop what is asked for while all places are taken, so each line is asked for once more, half a piece of 12 KiB later.
class LinesAhead {
 public:
  LinesAhead() = default;

  // `bytes` from `from` on, within `turns` calls.
  LinesAhead(const void* from, int64_t bytes, int64_t turns)
      : next_(static_cast<const char*>(from)), end_(next_ + bytes), step_((bytes / 64 + turns - 1) / turns * 64) {}

  void operator()() {
    if (next_ >= end_) return;
    for (const char* const stop = next_ + step_; next_ < stop; next_ += 64) {
      __builtin_prefetch(next_, 0, 2);
      __builtin_prefetch(next_ - kAgain, 0, 2);
    }
  }

 private:
  static constexpr int64_t kAgain = 6144;  // bytes; what lies before them is fetched or in a cache already

  const char *next_ = nullptr, *end_ = nullptr;
  int64_t step_ = 0;
};

// Whether so few rows read weights so fast, in the order in which they lie, that the processor, which finds such a stream by itself,
// has more lines on their way than can be asked for: each of those holds one of the few places of the L1 cache's.
inline bool found_ahead(int64_t rows) { return rows <= 2; }

// Where the pieces of a task lie, in the order in which they are multiplied.
struct Piece {
  int64_t first, stop, panel, step, now;  // the part [first, stop) of the inputs, and blocks [step, step + now) of it
};

class PieceOrder {
 public:
  // Pieces of at most `most` blocks.
  PieceOrder(const Range& range, int64_t steps, int64_t part, int64_t most = kSteps)
      : range_(range), steps_(steps), part_(part), most_(most) {}

  Piece start() const { return at(0, range_.panel_begin, 0); }

  // Where there is no other, one that has `ended`: it lies behind all of them.
  Piece after(const Piece& piece) const {
    if (piece.step + piece.now < piece.stop) return at(piece.first, piece.panel, piece.step + piece.now);
    if (piece.panel + 1 < range_.panel_end) return at(piece.first, piece.panel + 1, piece.first);
    return at(piece.stop, range_.panel_begin, piece.stop);
  }

  bool ended(const Piece& piece) const { return piece.first >= steps_; }

 private:
  Piece at(int64_t first, int64_t panel, int64_t step) const {
    const int64_t stop = std::min(steps_, first + part_);
    return {first, stop, panel, step, std::min(most_, stop - step)};
  }

  const Range& range_;
  const int64_t steps_, part_, most_;
};

// Room for the sums of a task: of all its panels where the inputs are taken in parts, else of one.
inline float* sums_of_thread() {
  alignas(64) static thread_local float sums[std::max(kGroupRows, kPartRows * kMaxChunk) * kPanel];
  return sums;
}

// kVectors vectors of the sums [kRows, 32] of a panel become 0.
template <int kRows, int kVectors>
__attribute__((always_inline)) inline void clear_sums(float* sums) {
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < kVectors; ++v) store(sums + row * kPanel + v * kLanes, floats{});
}

}  // namespace rhizome
