// How AMX's tiles are configured.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace rhizome {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

inline void use_tiles(const TileConfig& config) {
#if defined(RHIZOME_EMULATED_AMX)  // tests/native/emulated_amx.h
  _tile_loadconfig(&config);
#else
  // not _tile_loadconfig: g++ 12 believes that it reads 8 bytes, and may leave out the stores to the rest
  asm volatile("ldtilecfg %0" : : "m"(config));
#endif
}

}  // namespace rhizome
