// The products of a task with rows of int8 (plane_rows.h) by dot products of bytes (VPDPBUSD), four to a sum of 32 bits: twice as
// many as of 16 bits or bfloat16. They have the bits that AMX's tiles make.
#pragma once

#include "linear_quantized.h"

#if defined(RHIZOME_INT8_DOTS)

#include <utility>

#include "byte_vectors.h"
#include "linear_task_pieces.h"
#include "registers.h"

namespace rhizome {

inline constexpr int64_t kTileBytes = 2 * kTileElements;
inline constexpr int kByteTurns = 4;                    // calls of `ahead` per block
inline constexpr int64_t kApartBytes = kByteRuns == 1 ? kTileBytes : 32;
inline constexpr int64_t kApartSums = kByteRuns == 1 ? kTile : 8;

// Rows of x, pairs of int8, and the sums of a panel, whole numbers [rows][32] of 32 bits.
struct ByteRows {
  const bf16* x;
  int64_t x_stride;
  float* sums;
  bool adding;
};

// Adds the products of a block with a tile.
template <int kRows>
__attribute__((always_inline)) inline void add_tile(Bytes (&sums)[kRows], const uint8_t* codes, const bf16* x, int64_t x_stride) {
#pragma GCC unroll 16
  for (int i = 0; i < kTile; ++i) {
    const Bytes of_four = held_in_order(load_bytes(codes + 64 * i));
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) sums[row] = byte_dots(sums[row], of_four, four_of(x + 2 * i + row * x_stride));
  }
}

// `steps` blocks of two vectors.
template <int kRows>
void byte_pass(const uint8_t* codes, float* sums, const ByteRows& rows, int64_t steps, LinesAhead& outside) {
  LinesAhead ahead = outside;  // in registers
  Bytes first[kRows] = {}, second[kRows] = {};
  if (rows.adding)
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      first[row] = load_bytes(sums + row * kPanel);
      second[row] = load_bytes(sums + row * kPanel + kApartSums);
    }
  const bf16* x = rows.x;
  if constexpr (kRows <= kBytesInTurn)
    for (; steps > 0; --steps, codes += 2 * kTileBytes, x += 2 * kTile) {
      for (int turn = 0; turn < kByteTurns; ++turn) ahead();
      add_tile(first, codes, x, rows.x_stride);
      add_tile(second, codes + kTileBytes, x, rows.x_stride);
    }
  for (; steps > 0; --steps, codes += 2 * kTileBytes)
    for (int turn = 0; turn < kByteTurns; ++turn) {
      ahead();
      for (int i = turn * kTile / kByteTurns; i < (turn + 1) * kTile / kByteTurns; ++i, x += 2) {
        const Bytes left = load_bytes(codes + 64 * i), right = load_bytes(codes + 64 * i + kApartBytes);
#pragma GCC unroll 12
        for (int row = 0; row < kRows; ++row) {
          const int32_t four = four_of(x + row * rows.x_stride);
          first[row] = byte_dots(first[row], left, four);
          second[row] = byte_dots(second[row], right, four);
        }
      }
    }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    store_bytes(sums + row * kPanel, first[row]);
    store_bytes(sums + row * kPanel + kApartSums, second[row]);
  }
  outside = ahead;
}

template <int... kCounts>
inline void byte_pass_of(int count, const uint8_t* codes, float* sums, const ByteRows& rows, int64_t steps, LinesAhead& ahead,
                         std::integer_sequence<int, kCounts...>) {
  using Pass = void (*)(const uint8_t*, float*, const ByteRows&, int64_t, LinesAhead&);
  static constexpr Pass kPasses[] = {byte_pass<kCounts + 1>...};
  kPasses[count - 1](codes, sums, rows, steps, ahead);
}

// One piece of a matrix in pairs (`as_pairs`), for one pass of rows after the other.
class BytePiece {
 public:
  // `following` is the block with which the thread goes on after this piece.
  BytePiece(const PackedMatrix& pairs, const Piece& piece, int64_t following, int64_t rows)
      : codes_(reinterpret_cast<const uint8_t*>(weights_at(pairs, piece.panel, piece.step))), steps_(piece.now),
        ahead_(kBytesInTurn > 0 && found_ahead(rows)
                   ? LinesAhead()
                   : piece_ahead(pairs, following, steps_, steps_ * kByteTurns * kByteRuns * passes(rows))) {}

  // At most kBlockRows rows.
  void multiply(int count, const ByteRows& rows) {
    for (int done = 0, left = passes(count); done < count; --left) {
      const int now = (count - done + left - 1) / left;
      const ByteRows some{rows.x + done * rows.x_stride, rows.x_stride, rows.sums + done * kPanel, rows.adding};
      for (int run = 0; run < kByteRuns; ++run)
        byte_pass_of(now, codes_ + run * kTileBytes, some.sums + run * kTile, some, steps_, ahead_,
                     std::make_integer_sequence<int, kMostByteRows>());
      done += now;
    }
  }

 private:
  static int passes(int64_t rows) { return rows <= kMostByteRows ? 1 : static_cast<int>((rows + kByteRows - 1) / kByteRows); }

  const uint8_t* const codes_;
  const int64_t steps_;
  LinesAhead ahead_;
};

template <class Before, class Then>
void multiply_bytes(const PackedMatrix& pairs, const bf16* x, int64_t x_stride, const Range& range, Before& before, Then& then) {
  multiply_pieces<BytePiece, ByteRows>(pairs, x, x_stride, range, before, then);
}

}  // namespace rhizome

#endif
