// Configurations of the tiles of the AMX attention kernel.
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)

#include <immintrin.h>

#include <cstdint>

namespace rhizome {

// For all tiles in full, or for up to 1, 2 or 4 queries: the part of the tiles that those need.
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

constexpr TileConfig few_queries(uint8_t n) {
  const uint16_t bytes = static_cast<uint16_t>(4 * n);
  return {1, 0, {}, {bytes, bytes, 64, 64, 64, 64, bytes, bytes}, {16, 16, 16, 16, 16, 16, 16, 16}};
}

// Static, as the compiler does not know that all of it is read when it is loaded.
alignas(64) static constexpr TileConfig kTileConfigs[] = {
    {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}},
    few_queries(1),
    few_queries(2),
    {},
    few_queries(4),
};

// What was stored before may be loaded into tiles: compilers do not know that those instructions read memory.
inline void before_tiles() { asm volatile("" ::: "memory"); }

}  // namespace rhizome

#endif
