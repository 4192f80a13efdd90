// What linear_panels.cpp sees of the quantized products on AMX tiles (linear_quantized_amx.h).
#pragma once

#include <algorithm>
#include <vector>

#include "callback.h"
#include "linear_amx.h"
#include "linear_quantized.h"
#include "parallel.h"
#include "room.h"
#include "transpose.h"

namespace rhizome {

// The rows of x as second operands: tiles of `columns` rows, [tile][block of inputs][16 pairs of inputs][columns][2].
class TurnedRows {
 public:
  TurnedRows(const bf16* x, int64_t x_stride, int64_t rows, int64_t steps) : steps_(steps) {
    while (columns_ < 16 && columns_ < rows) columns_ *= 2;
    if (columns_ == 1) {  // a row is turned over as it is
      data_ = x;
      return;
    }
    const int64_t tiles = rows <= kTile ? 1 : (rows + kBlockRows - 1) / kBlockRows * 2;
    static thread_local std::vector<bf16> memory;
    bf16* const data = room_in(memory, tiles * steps * 32 * columns_);
    data_ = data;
    constexpr int64_t kAtOnce = 32;  // blocks of inputs
    const int64_t parts = (steps + kAtOnce - 1) / kAtOnce;
    parallel_for(tiles * parts, [&](int64_t task, int) {
      const int64_t tile = task / parts, begin = task % parts * kAtOnce, end = std::min(steps, begin + kAtOnce);
      const int count = static_cast<int>(std::clamp<int64_t>(rows - tile * kTile, 0, kTile));
      for (int64_t step = begin; step < end; ++step)
        turn_block(x + tile * kTile * x_stride + step * 32, x_stride, count, data + (tile * steps + step) * 32 * columns_);
    });
  }

  int columns() const { return columns_; }
  const bf16* block(int64_t tile, int64_t step) const { return data_ + (tile * steps_ + step) * 32 * columns_; }
  int64_t block_elements() const { return 32 * columns_; }

 private:
  void turn_block(const bf16* x, int64_t x_stride, int count, bf16* to) const {
    __m512i rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = i < count ? _mm512_loadu_si512(x + i * x_stride) : _mm512_setzero_si512();
    transpose(rows);
    const __mmask16 mask = static_cast<__mmask16>((1u << columns_) - 1);
    for (int i = 0; i < 16; ++i) _mm512_mask_storeu_epi32(to + 2 * i * columns_, mask, rows[i]);
  }

  int64_t steps_;
  int columns_ = 1;
  const bf16* data_;
};

// Tiles 0..3: sums (half of the panel, tile of rows) in the order 00 10 01 11; 4, 5: weights; 6, 7: x.
inline void configure_turned_tiles(int columns) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = 16;
    config.row_bytes[tile] = tile == 4 || tile == 5 ? 64 : static_cast<uint16_t>(4 * columns);
  }
  use_tiles(config);
}

// then(row, count, sums [count, 32]) for all rows of a range, in blocks of up to 32. Tiles are configured.
using RowSums = Callback<int64_t, int, float*>;
void multiply_codes(const PackedMatrix& weights, const TurnedRows& x, int64_t row_begin, int64_t row_end, int64_t panel,
                    RowSums then);

}  // namespace rhizome
