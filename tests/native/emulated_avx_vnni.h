// AVX-VNNI's dot products by those of AVX2, for processors without them.
#pragma once

#include <immintrin.h>

#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 rhizome_emulated_dpbusd
#define _mm256_dpwssd_avx_epi32 rhizome_emulated_dpwssd

static inline __m256i rhizome_emulated_dpwssd(__m256i sums, __m256i a, __m256i b) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
}

// Bytes without a sign by bytes with one, four to a sum: those at even places and those at odd ones, as numbers of 16 bits.
static inline __m256i rhizome_emulated_dpbusd(__m256i sums, __m256i a, __m256i b) {
  const __m256i even = _mm256_set1_epi16(255);
  sums = rhizome_emulated_dpwssd(sums, _mm256_and_si256(a, even), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  return rhizome_emulated_dpwssd(sums, _mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
}
