// The products of a task on AMX tiles, with compressed weights: blocks are inflated while the tiles work on earlier ones.
#pragma once

#include <algorithm>

#include "linear_compressed.h"
#include "linear_task_amx.h"

namespace rhizome {

// One block after the other of several panels, each inflated one block ahead of its use.
class InflatedStream {
 public:
  InflatedStream(const PackedMatrix& weights, int64_t first, int64_t end)
      : weights_(weights),
        inflater_(weights),
        from_(compressed_block(weights, first)),
        ring_(room()),
        at_(first),
        ready_(first),
        end_(end) {
    while (ready_ < std::min(first + kAhead, end_)) inflate();
  }

  const bf16* next() {
    if (ready_ < end_) inflate();
    return ring_ + at_++ % kSlots * 2 * kTileElements;
  }

 private:
  static constexpr int64_t kAhead = 1, kSlots = 2;
  static constexpr int64_t kFetch = 4096;  // bytes ahead

  static bf16* room() {
    alignas(64) static thread_local bf16 ring[kSlots * 2 * kTileElements];
    return ring;
  }

  void inflate() {
    bf16* const to = ring_ + ready_ % kSlots * 2 * kTileElements;
    for (int pack = 0; pack < kBlockPacks; ++pack, from_ += kPackBytes) {
      fetch(reinterpret_cast<const char*>(from_) + kFetch, kPackBytes / 64);
      inflater_.inflate(from_, to + pack * kPackWeights);
    }
    put_exceptions(weights_, ready_, ready_ + 1, to);
    ++ready_;
  }

  const PackedMatrix& weights_;
  const Inflater inflater_;
  const uint8_t* from_;
  bf16* const ring_;
  int64_t at_, ready_;  // blocks
  const int64_t end_;
};

template <bool kTwo, class Before, class Then>
void multiply_compressed_few(const PackedMatrix& weights, const bf16* x, int64_t x_stride, const Range& range,
                             Before& before, Then& then) {
  const int64_t steps = blocks(weights.inputs);
  const int count = static_cast<int>(range.row_end - range.row_begin);
  float* const sums = sums_of_thread();
  configure_tiles(count);
  TileSums<TileNumbers::kBFloat16, kTwo, Then> tiles(then);
  InflatedStream stream(weights, range.panel_begin * steps, range.panel_end * steps);
  for (int64_t panel = range.panel_begin; panel < range.panel_end; ++panel) {
    before(panel, range.row_begin, count);
    tiles.multiply(x + range.row_begin * x_stride, x_stride, stream, steps, sums, true);
    tiles.complete(panel, range.row_begin, count, sums);
    tiles.flush();
  }
}

// A piece of a panel, inflated. While the last rows go by it, each of its blocks is replaced by one of the next piece, so
// that all of this stays in the L1 cache.
class PieceBlocks {
 public:
  explicit PieceBlocks(const PackedMatrix& weights) : weights_(weights), inflater_(weights), piece_(room()) {}

  // The next piece are blocks [first, first + count) of the matrix.
  void begin(int64_t first, int64_t count) { first_ = at_ = first, end_ = first + count; }

  // The piece from block `first` on is fetched while `turns` blocks are taken; `always`: those of the last rows too.
  void fetch_piece(int64_t first, int64_t turns, bool always) {
    ahead_ = {reinterpret_cast<const char*>(compressed_block(weights_, first)),
              static_cast<int>((kPieceLines + turns - 1) / turns)};
    always_ = always;
  }

  void fetch_now(int64_t first) const {
    fetch(reinterpret_cast<const char*>(compressed_block(weights_, first)), kPieceLines);
  }

  // To the first block of the piece; with `last`, for the last time.
  void rewind(bool last) { tile_ = piece_, last_ = last; }

  const bf16* next() {
    if (!last_ || always_) {
      fetch(ahead_.next, ahead_.lines);
      ahead_.next += ahead_.lines * 64;
    }
    if (last_ && tile_ > piece_ && at_ < end_) inflate();
    const bf16* const tile = tile_;
    tile_ += 2 * kTileElements;
    return tile;
  }

  // The next piece takes the place of this one.
  void replace() {
    while (at_ < end_) inflate();
    put_exceptions(weights_, first_, end_, piece_);
  }

 private:
  static constexpr int64_t kPieceLines = kSteps * kCompressedBlock / 64;

  static bf16* room() {
    alignas(64) static thread_local bf16 piece[kSteps * 2 * kTileElements];
    return piece;
  }

  void inflate() {
    const uint8_t* from = compressed_block(weights_, at_);
    bf16* to = piece_ + (at_ - first_) * 2 * kTileElements;
    for (int pack = 0; pack < kBlockPacks; ++pack, from += kPackBytes, to += kPackWeights) inflater_.inflate(from, to);
    ++at_;
  }

  const PackedMatrix& weights_;
  const Inflater inflater_;
  bf16* const piece_;
  const bf16* tile_ = nullptr;
  Prefetch ahead_{};
  int64_t first_ = 0, at_ = 0, end_ = 0;  // blocks of the matrix
  bool last_ = false, always_ = false;
};

// Where rows are few, main memory must not be idle while a piece is inflated: pieces are fetched two ahead.
constexpr int64_t kSoonBlocks = 3;

template <class Before, class Then>
void multiply_compressed_many(const PackedMatrix& weights, const bf16* x, int64_t x_stride, const Range& range,
                              Before& before, Then& then) {
  const int64_t steps = blocks(weights.inputs), rows = range.row_end - range.row_begin;
  const int64_t row_blocks = (rows + kBlockRows - 1) / kBlockRows;
  const bool together = row_blocks <= kTogetherBlocks, soon = row_blocks <= kSoonBlocks;
  const int64_t part = steps > kWholeSteps ? kPartSteps : steps;
  configure_tiles(kBlockRows);
  TileSums<TileNumbers::kBFloat16, true, Then> tiles(then);
  PieceBlocks from(weights);
  const PieceOrder order(range, steps, part);
  Piece piece = order.start(), next = order.after(piece);
  const auto block_of = [steps](const Piece& one) { return one.panel * steps + one.step; };
  // behind the last piece lies, as a rule, the first one of the thread's next task
  const int64_t beyond = range.panel_end * steps;
  from.begin(block_of(piece), piece.now);
  from.replace();
  if (soon) from.fetch_now(order.ended(next) ? beyond : block_of(next));
  for (; !order.ended(piece); piece = next, next = order.after(next)) {
    const bool ends = order.ended(next);
    const int64_t following = ends ? beyond : block_of(next);
    from.begin(following, ends ? 0 : next.now);
    if (soon) {
      const Piece third = ends ? next : order.after(next);
      const int64_t later = ends ? beyond + kSteps : order.ended(third) ? beyond : block_of(third);
      from.fetch_piece(later, piece.now * row_blocks, true);
    } else {
      from.fetch_piece(following, piece.now * (row_blocks - 1), false);
    }
    const int64_t place = part < steps ? piece.panel - range.panel_begin : 0;
    float* const sums = sums_of_thread() + place * row_blocks * kBlockRows * kPanel;
    const bool last = piece.step + piece.now == steps;
    for (int64_t at = 0; at < rows; at += kBlockRows) {
      const int64_t begin = std::min(at, rows - kBlockRows), row = range.row_begin + at;
      const int count = static_cast<int>(std::min<int64_t>(kBlockRows, rows - at));
      float* const to = sums + at * kPanel;
      if (last) before(piece.panel, row, count);
      from.rewind(at + kBlockRows >= rows);
      const bf16* const inputs = x + (range.row_begin + begin) * x_stride + piece.step * 32;
      tiles.multiply(inputs, x_stride, from, piece.now, to, piece.step == 0);
      if (last) tiles.complete(piece.panel, row, count, to + (at - begin) * kPanel);
      if (!together) tiles.flush();
    }
    from.replace();
  }
  tiles.flush();
}

// As `multiply`, for compressed weights.
template <class Before, class Then>
void multiply_compressed(const PackedMatrix& weights, const bf16* x, int64_t x_stride, const Range& range,
                         Before& before, Then& then) {
  const int64_t rows = range.row_end - range.row_begin;
  if (rows <= kTile)
    multiply_compressed_few<false>(weights, x, x_stride, range, before, then);
  else if (rows <= kBlockRows)
    multiply_compressed_few<true>(weights, x, x_stride, range, before, then);
  else
    multiply_compressed_many(weights, x, x_stride, range, before, then);
}

}  // namespace rhizome
