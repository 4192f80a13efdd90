// Configurations of the tiles of the AMX attention kernel.
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)

#include <cstdint>

#include "tiles.h"

namespace rhizome {

constexpr TileConfig few_queries(uint8_t n) {
  const uint16_t bytes = static_cast<uint16_t>(4 * n);
  return {1, 0, {}, {bytes, bytes, 64, 64, 64, 64, bytes, bytes}, {16, 16, 16, 16, 16, 16, 16, 16}};
}

// For all tiles in full, or for up to 1, 2 or 4 queries: the part of the tiles that those need. Static, as `_tile_loadconfig`
// does not tell the compiler that it reads all of it.
static constexpr TileConfig kTileConfigs[] = {
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
