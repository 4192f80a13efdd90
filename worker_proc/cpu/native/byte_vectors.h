// Vectors of bytes, and their products with those of a row, four to a sum of 32 bits (VPDPBUSD).
#pragma once

#include "linear_quantized.h"

#if defined(RHIZOME_SEGMENTS)

#include <immintrin.h>

#include <cstring>

namespace rhizome {

#if defined(__AVX512F__)
using Bytes = __m512i;
inline constexpr int kByteRows = 8, kMostByteRows = 12;  // that are multiplied together; where there are not many
inline Bytes load_bytes(const void* from) { return _mm512_loadu_si512(from); }
inline void store_bytes(void* to, Bytes bytes) { _mm512_storeu_si512(to, bytes); }
#else
using Bytes = __m256i;
inline constexpr int kByteRows = 6, kMostByteRows = 6;
inline Bytes load_bytes(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void store_bytes(void* to, Bytes bytes) { _mm256_storeu_si256(static_cast<__m256i*>(to), bytes); }
#endif
inline constexpr int kByteRuns = sizeof(Bytes) == 64 ? 1 : 2;  // over a piece: two vectors are two tiles or one

// Four numbers of a row.
inline int32_t four_of(const void* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof four);
  return four;
}

// Up to so many rows take one tile after the other, see linear_dots.h.
inline constexpr int kBytesInTurn = kByteRuns == 1 ? 4 : 0, kNibblesInTurn = kByteRuns == 1 ? 2 : 0;

#if defined(RHIZOME_INT8_DOTS) && defined(__AVX512F__)
inline Bytes byte_dots(Bytes sums, Bytes codes, int32_t x) { return _mm512_dpbusd_epi32(sums, codes, _mm512_set1_epi32(x)); }
#elif defined(RHIZOME_INT8_DOTS)
inline Bytes byte_dots(Bytes sums, Bytes codes, int32_t x) { return _mm256_dpbusd_avx_epi32(sums, codes, _mm256_set1_epi32(x)); }
#endif

}  // namespace rhizome

#endif
