// The numbers of codes as bfloat16, which holds them exactly: those of int8 and int4 less the middle code, those of FP8 and FP4 as
// float8.h and float4.h have them. For AVX512's dot products (linear_number_dots.h); codes lie as `place_of` says.
#pragma once

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

#include <immintrin.h>

#include <array>

#include "linear_quantized.h"

namespace rhizome {

constexpr uint16_t exact_bf16(float number) { return static_cast<uint16_t>(__builtin_bit_cast(uint32_t, number) >> 16); }

// A tile of codes of 4 bits: one instruction looks 32 of them up (VPERMW).
template <Format kFormat>
struct CodeNumbers {
  // Of eight inputs: a vector of words has four pairs of 16 outputs.
  static void of_eight(const uint8_t* codes, int eight, __m512i (&pairs)[4]) {
    const __m512i table = _mm512_load_si512(kNumbers.data()), words = _mm512_loadu_si512(codes + 64 * eight);
    pairs[0] = _mm512_permutexvar_epi16(words, table);
    pairs[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
    pairs[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table);
    pairs[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table);
  }

 private:
  // Twice: an index has five bits, of which the highest is not its own.
  alignas(64) static constexpr auto kNumbers = [] {
    std::array<uint16_t, 32> numbers{};
    for (int i = 0; i < 32; ++i)
      numbers[i] = exact_bf16(static_cast<float>(is_float4(kFormat) ? kFloat4Numbers[i % 16] : i % 16 - 8));
    return numbers;
  }();
};

#if defined(__AVX512VBMI__)
// The same in bytes: two look-ups find the halves of 64 numbers by the seven bits of their size (VPERMI2B).
template <Format kFormat>
  requires(!in_nibbles(kFormat))
struct CodeNumbers<kFormat> {
  static void of_eight(const uint8_t* codes, int eight, __m512i (&pairs)[4]) {
    for (int half = 0; half < 2; ++half) {
      const __m512i bytes = _mm512_loadu_si512(codes + 64 * (2 * eight + half));
      const __m512i lower = found(kHalves[0], ~0ull, bytes), upper = upper_of(bytes);
      pairs[2 * half] = _mm512_unpacklo_epi8(lower, upper), pairs[2 * half + 1] = _mm512_unpackhi_epi8(lower, upper);
    }
  }

 private:
  static __m512i upper_of(__m512i codes) {
    const __m512i sign = _mm512_set1_epi8(-128);
    if constexpr (is_float8(kFormat)) return _mm512_ternarylogic_epi64(found(kHalves[1], ~0ull, codes), codes, sign, 0xd8);
    const __mmask64 counts = _mm512_cmpneq_epi8_mask(codes, sign);  // 0 would have the size of -128
    return _mm512_ternarylogic_epi64(found(kHalves[1], counts, codes), codes, sign, 0x72);  // turned
  }
  static __m512i found(const std::array<uint8_t, 128>& table, __mmask64 where, __m512i sizes) {
    const __m512i low = _mm512_load_si512(table.data()), high = _mm512_load_si512(table.data() + 64);
    return _mm512_maskz_permutex2var_epi8(where, low, sizes, high);
  }

  // The lower and the upper bytes of the numbers of all sizes.
  alignas(64) static constexpr auto kHalves = [] {
    std::array<std::array<uint8_t, 128>, 2> halves{};
    for (int i = 0; i < 128; ++i) {
      const uint16_t number = exact_bf16(is_float8(kFormat) ? float8_number(i) : static_cast<float>(i != 0 ? i : 128));
      halves[0][i] = static_cast<uint8_t>(number), halves[1][i] = static_cast<uint8_t>(number >> 8);
    }
    return halves;
  }();
};
#else
// The same in bytes, converted by way of float32.
template <Format kFormat>
  requires(!in_nibbles(kFormat))
struct CodeNumbers<kFormat> {
  static void of_eight(const uint8_t* codes, int eight, __m512i (&pairs)[4]) {
    codes += 128 * eight;
    for (int i = 0; i < 4; ++i, codes += 32) pairs[i] = (__m512i)_mm512_cvtne2ps_pbh(numbers(codes + 16), numbers(codes));
  }

 private:
  static __m512 numbers(const uint8_t* from) {
    if constexpr (is_float8(kFormat)) return (__m512)float8_numbers(from);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
};
#endif

}  // namespace rhizome

#endif
