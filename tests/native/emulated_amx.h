// AMX's tiles in ordinary vectors, with the same bits, so that the kernels for AMX can be tested on processors without
// it. Included before everything else (`-include`). What the processor would refuse ends the process.
//
// Source: the descriptions of LDTILECFG, TILELOADD, TILESTORED, TDPBF16PS and TDPBSUD in Intel's Architecture Instruction Set
// Extensions Programming Reference.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

namespace rhizome_emulated {

constexpr int kTiles = 8, kMostRows = 16, kMostBytes = 64;

struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

struct Tile {
  int rows, row_bytes;  // 0: not configured
  alignas(64) uint8_t data[kMostRows][kMostBytes];
};

inline thread_local Tile tiles[kTiles];

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "emulated AMX: %s\n", what);
  std::abort();
}

inline Tile& configured(int number) {
  require(tiles[number].rows > 0, "a tile that is not configured");
  return tiles[number];
}

inline void release() { std::memset(tiles, 0, sizeof tiles); }

inline void load_config(const void* from) {
  Config config;
  std::memcpy(&config, from, sizeof config);
  require(config.palette == 1 && config.start_row == 0, "a configuration of an unknown palette, or of a load in progress");
  for (const uint8_t byte : config.reserved) require(byte == 0, "a configuration with reserved bytes");
  release();
  for (int i = 0; i < 16; ++i) {
    const int rows = config.rows[i], bytes = config.row_bytes[i];
    require(rows <= kMostRows && bytes <= kMostBytes && (rows == 0) == (bytes == 0), "a tile of no possible size");
    require(i < kTiles || rows == 0, "a configuration of more than eight tiles");
    if (i < kTiles) tiles[i].rows = rows, tiles[i].row_bytes = bytes;
  }
}

inline void zero(int number) { std::memset(configured(number).data, 0, sizeof tiles[number].data); }

inline void load(int number, const void* from, int64_t stride) {
  zero(number);
  Tile& tile = tiles[number];
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(tile.data[row], static_cast<const char*>(from) + row * stride, tile.row_bytes);
}

inline void store(int number, void* to, int64_t stride) {
  const Tile& tile = configured(number);
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, tile.data[row], tile.row_bytes);
}

// Sums of even and of odd inputs in chains of their own, fused; then both together, then onto what is there. Never inlined,
// as compilers know nothing of MXCSR.
__attribute__((noinline)) inline void add_dots(Tile& sums, const Tile& a, const Tile& b) {
  const auto lanes = static_cast<__mmask16>((1u << sums.row_bytes / 4) - 1);
  for (int row = 0; row < sums.rows; ++row) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int k = 0; k < a.row_bytes / 4; ++k) {
      uint32_t pair;
      std::memcpy(&pair, a.data[row] + 4 * k, 4);
      const __m512i both = _mm512_load_si512(b.data[k]);
      even = _mm512_fmadd_ps((__m512)_mm512_set1_epi32(static_cast<int>(pair << 16)), (__m512)_mm512_slli_epi32(both, 16), even);
      odd = _mm512_fmadd_ps((__m512)_mm512_set1_epi32(static_cast<int>(pair & 0xffff0000u)),
                            (__m512)_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))), odd);
    }
    const __m512 sum = _mm512_add_ps(_mm512_load_ps(sums.data[row]), _mm512_add_ps(even, odd));
    _mm512_store_ps(sums.data[row], _mm512_maskz_mov_ps(lanes, sum));
  }
}

inline void check_product(int to, int first, int second) {
  const Tile &sums = configured(to), &a = configured(first), &b = configured(second);
  require(to != first && to != second && first != second, "a product of a tile with itself");
  require(sums.rows == a.rows && sums.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows, "a product of other sizes");
  require(sums.row_bytes % 4 == 0, "a product of parts of numbers");
}

inline void dot_products(int to, int first, int second) {
  check_product(to, first, second);
  const uint32_t control = _mm_getcsr();
  _mm_setcsr(0x1f80 | 0x8040);  // to nearest, nothing trapped, denormals are zero
  add_dots(tiles[to], tiles[first], tiles[second]);
  _mm_setcsr(control);
}

// Signed bytes by those without a sign, four to a sum of 32 bits that wraps around.
inline void int8_dot_products(int to, int first, int second) {
  check_product(to, first, second);
  Tile& sums = tiles[to];
  const Tile &a = tiles[first], &b = tiles[second];
  for (int row = 0; row < sums.rows; ++row)
    for (int column = 0; column < sums.row_bytes / 4; ++column) {
      uint32_t sum;
      std::memcpy(&sum, sums.data[row] + 4 * column, 4);
      for (int k = 0; k < a.row_bytes; ++k)
        sum += static_cast<uint32_t>(static_cast<int8_t>(a.data[row][k]) * b.data[k / 4][4 * column + k % 4]);
      std::memcpy(sums.data[row] + 4 * column, &sum, 4);
    }
}

}  // namespace rhizome_emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig rhizome_emulated::load_config
#define _tile_release rhizome_emulated::release
#define _tile_zero rhizome_emulated::zero
#define _tile_loadd rhizome_emulated::load
#define _tile_stored rhizome_emulated::store
#define _tile_dpbf16ps rhizome_emulated::dot_products
#define _tile_dpbsud rhizome_emulated::int8_dot_products
