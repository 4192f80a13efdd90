// Weights in bfloat16 that take 12 bits: the bits are those of bfloat16, only fewer of them are read.
//
// Exponents of trained weights take few values (Zhang et al., DFloat11, 2025: 2.6 bits of information of 8). So the high
// byte of a weight, its sign and all but the last bit of its exponent, is a code of 4 bits for one of the sixteen that are
// most frequent in the matrix, and the low byte is as it is. Weights with another high byte are listed apart and put in
// place afterwards, as in PFOR (Zukowski et al., 2006).
//
// A block of 32 inputs by 32 outputs is eight packs of 192 bytes for 128 weights, four rows of 32 of its two tiles each: 64
// bytes with two codes each, then 128 low bytes. Two rows lie in 64 bytes by turns, so that one is put together by masks and
// the other by shifts; the lower codes are those of the first two rows. With AVX2 alone it is eight bytes of them by turns,
// which bytes taken by turns from two vectors put together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear.h"

#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace rhizome {

inline constexpr int64_t kPackWeights = 128, kPackBytes = 192;
inline constexpr int64_t kBlockPacks = 2 * kTileElements / kPackWeights;
inline constexpr int64_t kCompressedBlock = kBlockPacks * kPackBytes;  // bytes

// Where, in a pack, the code and the low byte of weight `column` of row `row` (of four) lie.
struct PackPlace {
  int code_byte, code_shift, low_byte;
  PackPlace(int row, int column) {
    code_shift = row / 2 * 4, low_byte = 64 + row / 2 * 64;
#if defined(__AVX2__) && !defined(__AVX512BW__)
    code_byte = column / 8 * 16 + row % 2 * 8 + column % 8, low_byte += code_byte;
#else
    code_byte = 2 * column + 1 - row % 2, low_byte += 2 * column + row % 2;
#endif
  }

  // The number, in two rows, of the weight whose code is in this byte.
  static int weight_of(int code_byte) {
#if defined(__AVX2__) && !defined(__AVX512BW__)
    return code_byte / 8 % 2 * 32 + code_byte / 16 * 8 + code_byte % 8;
#else
    return code_byte / 2 + (1 - code_byte % 2) * 32;
#endif
  }
};

inline const uint8_t* compressed_block(const PackedMatrix& weights, int64_t block) {
  return reinterpret_cast<const uint8_t*>(weights.data) + block * kCompressedBlock;
}

#if defined(__ARM_NEON)
typedef uint16_t EightHalves __attribute__((vector_size(16), aligned(1), may_alias));

inline EightHalves load_halves(const void* from) { return *static_cast<const EightHalves*>(from); }
inline void store_halves(void* to, EightHalves value) { *static_cast<EightHalves*>(to) = value; }
#endif

// What the code of a weight says, which is not the weight if it is an exception; `place` is its number in the block.
inline bf16 coded(const PackedMatrix& weights, int64_t block, int place) {
  const uint8_t* const pack = compressed_block(weights, block) + place / kPackWeights * kPackBytes;
  const PackPlace at(place % kPackWeights / 32, place % 32);
  return static_cast<bf16>(weights.high_bytes[pack[at.code_byte] >> at.code_shift & 15] << 8 | pack[at.low_byte]);
}

// Puts in place what has no code; the rest of blocks [block, end) is at `to`.
inline void put_exceptions(const PackedMatrix& weights, int64_t block, int64_t end, bf16* to) {
  for (uint32_t first = weights.exception_starts[block]; block < end; ++block, to += 2 * kTileElements) {
    const uint32_t last = weights.exception_starts[block + 1];
    for (; first < last; ++first) to[weights.exceptions[first] >> 16] = static_cast<bf16>(weights.exceptions[first]);
  }
}

// The weights of one output, by input.
inline void inflate_row(const PackedMatrix& weights, int64_t output, bf16* out) {
  constexpr int64_t kTileBytes = kCompressedBlock / 2, kTilePacks = kBlockPacks / 2, kAhead = 4;  // blocks
  const int64_t steps = blocks(weights.inputs), first = output / kPanel * steps;
  const int tile = static_cast<int>(output % kPanel / kTile), column = static_cast<int>(output % kTile);
  const uint8_t* from = compressed_block(weights, first) + tile * kTileBytes;
  for (int64_t step = 0; step < steps; ++step, from += kCompressedBlock) {
    for (int64_t line = 0; line < kTileBytes && step + kAhead < steps; line += 64)  // one of three is of another column
      __builtin_prefetch(from + kAhead * kCompressedBlock + line);
    bf16 numbers[32];
    for (int pack = 0; pack < kTilePacks; ++pack)
      for (int i = 0; i < 8; ++i) {
        const PackPlace at(i / 2, 2 * column + i % 2);
        const uint8_t* const bytes = from + pack * kPackBytes;
        numbers[pack * 8 + i] =
            static_cast<bf16>(weights.high_bytes[bytes[at.code_byte] >> at.code_shift & 15] << 8 | bytes[at.low_byte]);
      }
    for (uint32_t i = weights.exception_starts[first + step]; i < weights.exception_starts[first + step + 1]; ++i) {
      const int place = static_cast<int>(weights.exceptions[i] >> 16), row = place % kTileElements / 32;
      if (place / kTileElements == tile && place % 32 / 2 == column)
        numbers[2 * row + place % 2] = static_cast<bf16>(weights.exceptions[i]);
    }
    memcpy(out + step * 32, numbers, std::min<int64_t>(32, weights.inputs - step * 32) * sizeof(bf16));
  }
}

// Whether products know such weights.
#if defined(__AVX2__) || defined(__ARM_NEON)
inline constexpr bool kInflates = true;
#else
inline constexpr bool kInflates = false;
#endif

#if defined(__AVX512BW__)
// Puts weights together from their codes.
class Inflater {
 public:
  explicit Inflater(const PackedMatrix& weights)
      : high_bytes_(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weights.high_bytes)))) {}

  // A pack to its four rows.
  void inflate(const uint8_t* from, bf16* to) const {
    const __m512i codes = _mm512_loadu_si512(from);
    for (int half = 0; half < 2; ++half) {
      __m512i two[2];
      rows(codes, low_bytes(from, half), half, two);
      _mm512_store_si512(to + 64 * half, two[0]);
      _mm512_store_si512(to + 64 * half + 32, two[1]);
    }
  }

  // Those of the first or the second two rows of the pack at `from`.
  static __m512i low_bytes(const uint8_t* from, int half) { return _mm512_loadu_si512(from + 64 + 64 * half); }

  // The first or the second two rows of a pack, of its codes and of their own low bytes.
  void rows(__m512i codes, __m512i low, int half, __m512i two[2]) const {
    const __m512i here = _mm512_and_si512(half == 0 ? codes : _mm512_srli_epi16(codes, 4), _mm512_set1_epi8(15));
    const __m512i high = _mm512_shuffle_epi8(high_bytes_, here);
    two[0] = _mm512_ternarylogic_epi64(_mm512_set1_epi16(255), low, high, 0xca);
#if defined(__AVX512VBMI2__)
    two[1] = _mm512_shldi_epi16(high, low, 8);
#else
    two[1] = _mm512_or_si512(_mm512_slli_epi16(high, 8), _mm512_srli_epi16(low, 8));
#endif
  }

 private:
  const __m512i high_bytes_;  // by code, four times
};
#elif defined(__AVX2__)
// Puts weights together from their codes.
class Inflater {
 public:
  explicit Inflater(const PackedMatrix& weights)
      : high_bytes_(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weights.high_bytes)))) {}

  // A pack to its four rows.
  void inflate(const uint8_t* from, bf16* to) const {
    for (int part = 0; part < 2; ++part) {  // half of a row
      const __m256i codes = at(from + 32 * part);
      for (int half = 0; half < 2; ++half) {
        __m256i two[2];
        rows(codes, from + 32 * part, half, two);
        put(to + 64 * half + 16 * part, two[0]);
        put(to + 64 * half + 16 * part + 32, two[1]);
      }
    }
  }

  // 16 weights of each of the first or the second two rows; `from` is where their codes lie.
  void rows(__m256i codes, const uint8_t* from, int half, __m256i two[2]) const {
    const __m256i here = _mm256_and_si256(half == 0 ? codes : _mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15));
    const __m256i low = at(from + 64 + 64 * half), high = _mm256_shuffle_epi8(high_bytes_, here);
    two[0] = _mm256_unpacklo_epi8(low, high), two[1] = _mm256_unpackhi_epi8(low, high);
  }

  static __m256i at(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

 private:
  static void put(bf16* to, __m256i row) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), row); }

  const __m256i high_bytes_;  // by code, twice
};
#elif defined(__ARM_NEON)
// Puts weights together from their codes.
class Inflater {
 public:
  explicit Inflater(const PackedMatrix& weights) : high_bytes_(vld1q_u8(weights.high_bytes)) {}

  // A pack to its four rows.
  void inflate(const uint8_t* from, bf16* to) const {
    for (int part = 0; part < 4; ++part) {  // a quarter of a row
      const EightHalves both = load_halves(from + 16 * part);
      for (int half = 0; half < 2; ++half) {
        const EightHalves codes = (half == 0 ? both : both >> 4) & 0x0f0f;
        const EightHalves low = load_halves(from + 64 + 64 * half + 16 * part);
        const EightHalves high = (EightHalves)vqtbl1q_u8(high_bytes_, (uint8x16_t)codes);
        bf16* const row = to + 64 * half + 8 * part;
        store_halves(row, (low & 0x00ff) | (high & 0xff00));
        store_halves(row + 32, high << 8 | low >> 8);
      }
    }
  }

 private:
  const uint8x16_t high_bytes_;  // by code
};
#endif

}  // namespace rhizome
