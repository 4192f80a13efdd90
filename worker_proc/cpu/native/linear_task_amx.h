// The products of a task on AMX tiles.
#pragma once

#include <algorithm>

#include "linear_amx.h"
#include "linear_task.h"

namespace rhizome {

constexpr int64_t kDistance = 4096;     // bytes ahead that weights are fetched when one pass takes all inputs
constexpr int64_t kHeldSteps = 64;      // panels of more blocks are long beside what is made of their sums
constexpr int64_t kTogetherBlocks = 4;  // of rows, whose sums stay in the L1 cache: one begins while the last is stored

// The sums in the tiles of a thread. They are stored at `flush` or while the next block is begun, and only then is
// then(panel, row, count, sums [count, 32]) called for those that are complete.
template <TileNumbers kNumbers, bool kTwo, class Then>
class TileSums {
 public:
  explicit TileSums(Then& then) : then_(then) {}

  // Adds a block to `sums` in memory (`fresh`: to nothing), which are then to be found in the tiles.
  template <class Blocks>
  void multiply(const bf16* x, int64_t x_stride, Blocks& weights, int64_t steps, float* sums, bool fresh) {
    amx_block<kNumbers, kTwo>(x, x_stride, weights, steps, held_, fresh ? nullptr : sums, [this] { take(); });
    held_ = sums;
  }

  // What is in the tiles is complete; `sums` is the part of it that is wanted.
  void complete(int64_t panel, int64_t row, int count, float* sums) {
    panel_ = panel, row_ = row, count_ = count, complete_ = sums;
  }

  // Nothing is left in the tiles, and what is complete has been taken.
  void flush() {
    if (held_ == nullptr) return;
    store_sums<kTwo>(held_);
    held_ = nullptr;
    take();
  }

 private:
  void take() {
    if (count_ > 0) then_(panel_, row_, count_, complete_);
    count_ = 0;
  }

  Then& then_;
  float* held_ = nullptr;      // where the sums in the tiles belong
  float* complete_ = nullptr;  // sums of `count_` rows of a panel, in memory as soon as the tiles are stored
  int64_t panel_ = 0, row_ = 0;
  int count_ = 0;
};

// Inputs are cut into pieces of kSteps blocks, so that a piece of the panel stays in the L1 cache while the rows go by, and
// where there are many, into parts that all panels take before the next part: what they read of the rows should stay in
// the L2 cache. Up to kBlockRows rows take all inputs at once. With more, the last block of rows begins earlier rather
// than being smaller: tiles would have to be configured anew, which empties them.
template <TileNumbers kNumbers, bool kTwo, class Before, class Then>
void multiply_rows(const PackedMatrix& weights, const bf16* x, int64_t x_stride, const Range& range, Before& before,
                   Then& then) {
  const int64_t steps = blocks(weights.inputs), rows = range.row_end - range.row_begin;
  const int64_t row_blocks = (rows + kBlockRows - 1) / kBlockRows;
  const bool whole = row_blocks == 1, together = !whole && row_blocks <= kTogetherBlocks;
  const int64_t piece = whole ? steps : kSteps;
  const int64_t part = !whole && steps > kWholeSteps ? kPartSteps : steps;
  // A single tile of rows is quicker without prefetches: the processor finds the stream by itself.
  // Where one pass takes all inputs, main memory would be idle while the sums are taken: some lines are kept for that time.
  const int lines = !kTwo   ? 0
                    : whole ? kBlockLines - (steps <= kHeldSteps ? 1 : 0)
                            : static_cast<int>((kBlockLines + row_blocks - 1) / row_blocks);
  configure_tiles(static_cast<int>(std::min<int64_t>(rows, kBlockRows)));
  TileSums<kNumbers, kTwo, Then> tiles(then);
  for (int64_t first = 0; first < steps; first += part) {
    const int64_t stop = std::min(steps, first + part);
    for (int64_t panel = range.panel_begin; panel < range.panel_end; ++panel) {
      const int64_t place = part < steps ? panel - range.panel_begin : 0;
      float* const sums = sums_of_thread() + place * row_blocks * kBlockRows * kPanel;
      for (int64_t step = first; step < stop; step += piece) {
        const int64_t now = std::min(piece, stop - step);
        const bf16* const data = weights_at(weights, panel, step);
        // The memory of the next piece is fetched while the rows go by this one.
        const bf16* const next = whole                         ? data + kDistance / sizeof(bf16)
                                 : step + now < stop           ? weights_at(weights, panel, step + now)
                                 : panel + 1 < range.panel_end ? weights_at(weights, panel + 1, first)
                                 : stop < steps                ? weights_at(weights, range.panel_begin, stop)
                                                               : weights_at(weights, panel + 1, 0);
        Prefetch ahead{reinterpret_cast<const char*>(next), lines};
        for (int64_t at = 0; at < rows; at += kBlockRows, ahead.next += now * lines * 64) {
          const int64_t begin = std::max<int64_t>(0, std::min(at, rows - kBlockRows)), row = range.row_begin + at;
          const int count = static_cast<int>(std::min<int64_t>(kBlockRows, rows - at));
          float* const to = sums + at * kPanel;
          const bool last = step + now == steps;
          if (last) before(panel, row, count);
          PlainBlocks from(data, ahead);
          tiles.multiply(x + (range.row_begin + begin) * x_stride + step * 32, x_stride, from, now, to, step == 0);
          if (last) tiles.complete(panel, row, count, to + (at - begin) * kPanel);
          if (whole && kTwo) fetch(ahead.next + steps * lines * 64, steps * (kBlockLines - lines));
          if (whole && !kTwo) fetch(reinterpret_cast<const char*>(weights_at(weights, panel + 1, 0)), kBlockLines);
          if (!together) tiles.flush();
        }
      }
    }
  }
  tiles.flush();
}

// Calls then(panel, row, count, sums) with the sums [count, 32] of all panels and rows of a range, up to kBlockRows at once,
// and before(panel, row, count) when their last inputs are about to be multiplied. The weights are bfloat16.
template <TileNumbers kNumbers = TileNumbers::kBFloat16, class Before, class Then>
void multiply(const PackedMatrix& weights, const bf16* x, int64_t x_stride, const Range& range, Before& before,
              Then& then) {
  if (range.row_end - range.row_begin > kTile)
    multiply_rows<kNumbers, true>(weights, x, x_stride, range, before, then);
  else
    multiply_rows<kNumbers, false>(weights, x, x_stride, range, before, then);
}

// The same for a matrix of bytes in pairs (`as_pairs`) and rows of int8; sums are whole numbers of 32 bits.
template <class Before, class Then>
void multiply_bytes(const PackedMatrix& pairs, const bf16* x, int64_t x_stride, const Range& range, Before& before, Then& then) {
  multiply<TileNumbers::kInt8>(pairs, x, x_stride, range, before, then);
}

}  // namespace rhizome
