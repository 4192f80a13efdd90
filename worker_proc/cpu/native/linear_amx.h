// The micro-kernel for AMX: two by two tiles of sums, two of x, two of weights. Numbers are bfloat16, sums float32; or int8
// (of weights without a sign), two in the place of a bfloat16, and sums int32.
#pragma once

#include <immintrin.h>

#include "linear_task.h"
#include "tiles.h"

namespace rhizome {

enum class TileNumbers { kBFloat16, kInt8 };

// Tiles 0..3: sums (row tile, column tile); 4, 5: x; 6, 7: weights.
inline void configure_tiles(int rows) {
  const int first = rows < kTile ? rows : kTile, second = rows - first;
  TileConfig config;
  const int tile_rows[8] = {first, first, second, second, first, second, kTile, kTile};
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = static_cast<uint8_t>(tile_rows[tile]);
    config.row_bytes[tile] = tile_rows[tile] ? 64 : 0;
  }
  use_tiles(config);
}

constexpr int64_t kSumStride = kPanel * sizeof(float);

// The sums of up to 32 rows, [32, 32], out of the tiles.
template <bool kTwo>
inline void store_sums(float* sums) {
  _tile_stored(0, sums, kSumStride);
  _tile_stored(1, sums + kTile, kSumStride);
  if constexpr (kTwo) {
    _tile_stored(2, sums + kTile * kPanel, kSumStride);
    _tile_stored(3, sums + kTile * kPanel + kTile, kSumStride);
  }
}

// Weights as they lie in memory: block after block.
class PlainBlocks {
 public:
  PlainBlocks(const bf16* first, Prefetch ahead) : tile_(first), ahead_(ahead) {}

  // The next block, which is to be multiplied now.
  const bf16* next() {
    fetch(ahead_.next, ahead_.lines);
    ahead_.next += ahead_.lines * 64;
    const bf16* const tile = tile_;
    tile_ += 2 * kTileElements;
    return tile;
  }

 private:
  const bf16* tile_;
  Prefetch ahead_;
};

// Leaves in the tiles what `sums` [32, 32] (null: nothing) and x @ weights.T are together, for the rows that the tiles are
// configured for, one panel, the next `steps` blocks of inputs of `weights`. What was in the tiles goes to `held`, unless null:
// one tile after another is stored and filled anew between the first multiplications, which would have to wait for all of
// them otherwise. Calls stored() when that is done.
template <TileNumbers kNumbers, bool kTwo, class Blocks, class Stored>
inline void amx_block(const bf16* x, int64_t x_stride, Blocks& weights, int64_t steps, float* held, const float* sums,
                      Stored&& stored) {
  constexpr int64_t kLower = kTile * kPanel;
  const int64_t stride = x_stride * static_cast<int64_t>(sizeof(bf16));
  const bf16* const x_lower = x + kTile * x_stride;
#define RHIZOME_DOT(sums, rows, columns)          \
  if constexpr (kNumbers == TileNumbers::kInt8)   \
    _tile_dpbsud(sums, rows, columns);            \
  else                                            \
    _tile_dpbf16ps(sums, rows, columns)
#define RHIZOME_CHANGE(tile, place)                                     \
  if (held != nullptr) _tile_stored(tile, held + (place), kSumStride);  \
  if (sums != nullptr)                                                  \
    _tile_loadd(tile, sums + (place), kSumStride);                      \
  else                                                                  \
    _tile_zero(tile)
  const bf16* tile = weights.next();
  RHIZOME_CHANGE(0, 0);
  _tile_loadd(6, tile, 64);
  _tile_loadd(4, x, stride);
  RHIZOME_DOT(0, 4, 6);
  RHIZOME_CHANGE(1, kTile);
  _tile_loadd(7, tile + kTileElements, 64);
  RHIZOME_DOT(1, 4, 7);
  if constexpr (kTwo) {
    RHIZOME_CHANGE(2, kLower);
    _tile_loadd(5, x_lower, stride);
    RHIZOME_DOT(2, 5, 6);
    RHIZOME_CHANGE(3, kLower + kTile);
    RHIZOME_DOT(3, 5, 7);
  }
#undef RHIZOME_CHANGE
  stored();
  for (int64_t step = 1; step < steps; ++step) {
    tile = weights.next();
    _tile_loadd(6, tile, 64);
    _tile_loadd(4, x + step * 32, stride);
    RHIZOME_DOT(0, 4, 6);
    _tile_loadd(7, tile + kTileElements, 64);
    RHIZOME_DOT(1, 4, 7);
    if constexpr (kTwo) {
      _tile_loadd(5, x_lower + step * 32, stride);
      RHIZOME_DOT(2, 5, 6);
      RHIZOME_DOT(3, 5, 7);
    }
  }
#undef RHIZOME_DOT
}

}  // namespace rhizome
