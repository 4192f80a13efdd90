// What the kernels use of AVX512 in AVX2, with the same bits (but for `rcp14`, which processors compute differently), so that
// their sets for AVX512 can be tested on processors without it. Included before everything else (`-include`). What the
// processor would refuse ends the process. RHIZOME_EMULATED_VNNI, RHIZOME_EMULATED_BF16 and RHIZOME_EMULATED_VBMI2: those
// instructions too.
//
// Source: the operations of Intel's Intrinsics Guide.
#pragma once

#include <immintrin.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#if defined(RHIZOME_EMULATED_VNNI)
#define __AVX512VNNI__ 1
#endif
#if defined(RHIZOME_EMULATED_BF16)
#define __AVX512BF16__ 1
#endif
#if defined(RHIZOME_EMULATED_VBMI2)
#define __AVX512VBMI2__ 1
#endif

namespace rhizome_emulated_avx512 {

#define EMULATED __attribute__((always_inline)) inline
#define CALLED __attribute__((noinline)) inline  // what would take compilers minutes in every place where it is used

typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint64_t Longs __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(128)));
typedef int64_t WideInts __attribute__((vector_size(128)));

template <class To, class From>
EMULATED To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class Vector>
EMULATED Vector load(const void* from) {
  Vector to;
  std::memcpy(&to, from, sizeof to);
  return to;
}

EMULATED const void* aligned(const void* memory) {
  if (reinterpret_cast<uintptr_t>(memory) % 64 == 0) return memory;
  std::fprintf(stderr, "emulated AVX512: memory that is not aligned\n");
  std::abort();
}

EMULATED void put(void* to, const __m512i& x) { std::memcpy(to, &x, 64); }
EMULATED void put_aligned(void* to, const __m512i& x) { put(const_cast<void*>(aligned(to)), x); }

// f(x, ...) of both halves of vectors of floats.
template <class Function, class... Vectors>
EMULATED __m512 by_halves(Function f, const Vectors&... vectors) {
  __m256 halves[2];
  for (int half = 0; half < 2; ++half) halves[half] = f(load<__m256>(reinterpret_cast<const char*>(&vectors) + 32 * half)...);
  return load<__m512>(halves);
}

// Element i is f(i).
template <class Vector, class Function>
EMULATED Vector each(Function f) {
  Vector out;
  for (size_t i = 0; i < sizeof out / sizeof out[0]; ++i) out[i] = f(static_cast<int>(i));
  return out;
}

EMULATED __m512 set1_ps(float x) { return each<__m512>([=](int) { return x; }); }
CALLED __m512i set1_epi32(int x) { return (__m512i)each<Ints>([=](int) { return x; }); }
CALLED __m512i set1_epi16(short x) { return (__m512i)each<Halves>([=](int) { return static_cast<uint16_t>(x); }); }
CALLED __m512i set1_epi8(char x) { return (__m512i)each<Bytes>([=](int) { return static_cast<uint8_t>(x); }); }
EMULATED __m512 setzero_ps() { return __m512{}; }
EMULATED __m512i setzero_si512() { return __m512i{}; }
template <class... Numbers>
EMULATED __m512 setr_ps(Numbers... numbers) {
  static_assert(sizeof...(numbers) == 16);
  return (__m512)Floats{static_cast<float>(numbers)...};
}
template <class... Numbers>
EMULATED __m512i setr_epi32(Numbers... numbers) {
  static_assert(sizeof...(numbers) == 16);
  return (__m512i)Ints{static_cast<int32_t>(numbers)...};
}
template <class... Numbers>
EMULATED __m512 set_ps(Numbers... numbers) {
  const __m512 turned = setr_ps(numbers...);
  return each<__m512>([&](int i) { return turned[15 - i]; });
}
template <class... Numbers>
EMULATED __m512i set_epi32(Numbers... numbers) {
  const Ints turned = (Ints)setr_epi32(numbers...);
  return (__m512i)each<Ints>([&](int i) { return turned[15 - i]; });
}

EMULATED __m512 loadu_ps(const void* from) { return load<__m512>(from); }
EMULATED __m512 load_ps(const void* from) { return load<__m512>(aligned(from)); }
EMULATED __m512i loadu_si512(const void* from) { return load<__m512i>(from); }
EMULATED __m512i load_si512(const void* from) { return load<__m512i>(aligned(from)); }
EMULATED void storeu_ps(void* to, __m512 x) { put(to, (__m512i)x); }
EMULATED void store_ps(void* to, __m512 x) { put_aligned(to, (__m512i)x); }
EMULATED void storeu_si512(void* to, __m512i x) { put(to, x); }
EMULATED void store_si512(void* to, __m512i x) { put_aligned(to, x); }
EMULATED void stream_si512(void* to, __m512i x) { put_aligned(to, x); }
EMULATED __m512i broadcast_i32x4(__m128i x) { return (__m512i)each<Longs>([&](int i) { return x[i % 2]; }); }
EMULATED float cvtss_f32(__m512 x) { return x[0]; }
// what the processor leaves undefined is not a number
EMULATED __m512 castps256_ps512(__m256 x) { return each<__m512>([&](int i) { return i < 8 ? x[i] : NAN; }); }

// With masks: what is left out is not touched in memory.
CALLED __m512i maskz_loadu_epi16(__mmask32 mask, const void* from) {
  Halves out = {};
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) out[i] = load<uint16_t>(static_cast<const char*>(from) + 2 * i);
  return (__m512i)out;
}
CALLED __m256i maskz_loadu_epi8(__mmask32 mask, const void* from) {
  uint8_t out[32] = {};
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) out[i] = static_cast<const uint8_t*>(from)[i];
  return load<__m256i>(out);
}
CALLED __m512 mask_load_ps(__m512 others, __mmask16 mask, const void* from) {
  aligned(from);
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) others[i] = static_cast<const float*>(from)[i];
  return others;
}
CALLED void mask_storeu_epi32(void* to, __mmask16 mask, __m512i x) {
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) std::memcpy(static_cast<char*>(to) + 4 * i, reinterpret_cast<const char*>(&x) + 4 * i, 4);
}
CALLED __m512i mask_mov_epi8(__m512i others, __mmask64 mask, __m512i x) {
  const auto from = (Bytes)x, without = (Bytes)others;
  return (__m512i)each<Bytes>([&](int i) { return mask >> i & 1 ? from[i] : without[i]; });
}
CALLED __m512 maskz_mov_ps(__mmask16 mask, __m512 x) {
  return each<__m512>([&](int i) { return mask >> i & 1 ? x[i] : 0.0f; });
}
CALLED __mmask64 cmpeq_epi8_mask(__m512i a, __m512i b) {
  const auto same = (Bytes)((Bytes)a == (Bytes)b);
  __mmask64 mask = 0;
  for (int i = 0; i < 64; ++i) mask |= static_cast<__mmask64>(same[i] & 1) << i;
  return mask;
}
CALLED __mmask64 cmpneq_epi8_mask(__m512i a, __m512i b) { return ~cmpeq_epi8_mask(a, b); }

EMULATED __m512 add_ps(__m512 a, __m512 b) { return by_halves([](__m256 x, __m256 y) { return _mm256_add_ps(x, y); }, a, b); }
EMULATED __m512 sub_ps(__m512 a, __m512 b) { return by_halves([](__m256 x, __m256 y) { return _mm256_sub_ps(x, y); }, a, b); }
EMULATED __m512 mul_ps(__m512 a, __m512 b) { return by_halves([](__m256 x, __m256 y) { return _mm256_mul_ps(x, y); }, a, b); }
EMULATED __m512 div_ps(__m512 a, __m512 b) { return by_halves([](__m256 x, __m256 y) { return _mm256_div_ps(x, y); }, a, b); }
EMULATED __m512 max_ps(__m512 a, __m512 b) { return by_halves([](__m256 x, __m256 y) { return _mm256_max_ps(x, y); }, a, b); }
EMULATED __m512 min_ps(__m512 a, __m512 b) { return by_halves([](__m256 x, __m256 y) { return _mm256_min_ps(x, y); }, a, b); }
EMULATED __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return by_halves([](__m256 x, __m256 y, __m256 z) { return _mm256_fmadd_ps(x, y, z); }, a, b, c);
}
EMULATED __m512 fmsub_ps(__m512 a, __m512 b, __m512 c) {
  return by_halves([](__m256 x, __m256 y, __m256 z) { return _mm256_fmsub_ps(x, y, z); }, a, b, c);
}
EMULATED __m512 fnmadd_ps(__m512 a, __m512 b, __m512 c) {
  return by_halves([](__m256 x, __m256 y, __m256 z) { return _mm256_fnmadd_ps(x, y, z); }, a, b, c);
}
CALLED __m512 mask_max_ps(__m512 others, __mmask16 mask, __m512 a, __m512 b) {
  const __m512 all = max_ps(a, b);
  return each<__m512>([&](int i) { return mask >> i & 1 ? all[i] : others[i]; });
}
template <class Function>
EMULATED float reduce(__m512 x, Function f) {  // in the order of both compilers
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = f(x[i], x[i + half]);
  return x[0];
}
CALLED float reduce_add_ps(__m512 x) {
  return reduce(x, [](float a, float b) { return a + b; });
}
CALLED float reduce_max_ps(__m512 x) {
  return reduce(x, [](float a, float b) { return a > b ? a : b; });
}
CALLED __m512 rcp14_ps(__m512 x) {  // good to 14 bits
  return (__m512)((Words)(1.0f / (Floats)x) & 0xfffffe00u);
}
EMULATED __m512 floor_ps(__m512 x) {
  return by_halves([](__m256 y) { return _mm256_round_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }, x);
}
template <int kHow>
EMULATED __m512 roundscale_ps(__m512 x) {
  static_assert(kHow == (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), "not emulated");
  return by_halves([](__m256 y) { return _mm256_round_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }, x);
}
template <int kHow>
EMULATED __m512 reduce_ps(__m512 x) {
  static_assert(kHow == _MM_FROUND_TO_NEG_INF, "not emulated");
  const Floats whole = (Floats)floor_ps(x), rest = (Floats)sub_ps(x, (__m512)whole);
  return (__m512)((Floats)x - (Floats)x == 0.0f ? rest : (Floats)x != (Floats)x ? (Floats)x : Floats{});  // of infinity, 0
}
CALLED __m512 scalef_ps(__m512 x, __m512 power) {
  const __m512 bounded = min_ps(max_ps(floor_ps(power), set1_ps(-500.0f)), set1_ps(500.0f));
  const WideInts exponent = __builtin_convertvector((Floats)bounded, WideInts);
  const Doubles factor = (Doubles)((exponent + 1023) << 52);
  const Floats scaled = __builtin_convertvector(__builtin_convertvector((Floats)x, Doubles) * factor, Floats);
  return (__m512)((Floats)power == (Floats)power ? scaled : (Floats)power);
}

EMULATED __m512i and_si512(__m512i a, __m512i b) { return a & b; }
EMULATED __m512i or_si512(__m512i a, __m512i b) { return a | b; }
EMULATED __m512i add_epi32(__m512i a, __m512i b) { return (__m512i)((Words)a + (Words)b); }
EMULATED __m512i add_epi16(__m512i a, __m512i b) { return (__m512i)((Halves)a + (Halves)b); }
EMULATED __m512i slli_epi32(__m512i x, int by) { return (__m512i)((Words)x << by); }
EMULATED __m512i srli_epi32(__m512i x, int by) { return (__m512i)((Words)x >> by); }
EMULATED __m512i slli_epi16(__m512i x, int by) { return (__m512i)((Halves)x << static_cast<uint16_t>(by)); }
EMULATED __m512i srli_epi16(__m512i x, int by) { return (__m512i)((Halves)x >> static_cast<uint16_t>(by)); }
EMULATED __m512i shldi_epi16(__m512i high, __m512i low, int by) { return or_si512(slli_epi16(high, by), srli_epi16(low, 16 - by)); }
CALLED __m512i ternarylogic_epi64(__m512i a, __m512i b, __m512i c, int table) {
  __m512i out = {};
  for (int bits = 0; bits < 8; ++bits)
    if (table >> bits & 1) out |= (bits & 4 ? a : ~a) & (bits & 2 ? b : ~b) & (bits & 1 ? c : ~c);
  return out;
}

CALLED __m512 cvtph_ps(__m256i x) {
  const __m256 halves[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
  return load<__m512>(halves);
}
EMULATED __m512 cvtepi32_ps(__m512i x) { return (__m512)__builtin_convertvector((Ints)x, Floats); }
template <class From, class Register>
CALLED __m512i widened(const Register& x) {
  From numbers[16];
  static_assert(sizeof numbers == sizeof x);
  std::memcpy(numbers, &x, sizeof x);
  return (__m512i)each<Ints>([&](int i) { return static_cast<int32_t>(numbers[i]); });
}
template <class From>
CALLED __m512i widened_to_halves(const __m256i& x) {
  From numbers[32];
  static_assert(sizeof numbers == sizeof x);
  std::memcpy(numbers, &x, sizeof x);
  Halves wide;
  for (int i = 0; i < 32; ++i) wide[i] = static_cast<uint16_t>(static_cast<int16_t>(numbers[i]));
  return (__m512i)wide;
}
EMULATED __m512i cvtepi8_epi16(__m256i x) { return widened_to_halves<int8_t>(x); }
EMULATED __m512i cvtepu8_epi16(__m256i x) { return widened_to_halves<uint8_t>(x); }
CALLED __m512i dpwssd_epi32(__m512i sums, __m512i a, __m512i b) {
  __m256i halves[2];
  for (int half = 0; half < 2; ++half)
    halves[half] = _mm256_add_epi32(load<__m256i>(reinterpret_cast<const char*>(&sums) + 32 * half),
                                    _mm256_madd_epi16(load<__m256i>(reinterpret_cast<const char*>(&a) + 32 * half),
                                                      load<__m256i>(reinterpret_cast<const char*>(&b) + 32 * half)));
  return load<__m512i>(halves);
}
// Sums of four products of unsigned bytes with signed ones: those of even bytes, and of odd ones.
CALLED __m512i dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
  __m256i halves[2];
  for (int half = 0; half < 2; ++half) {
    const __m256i x = load<__m256i>(reinterpret_cast<const char*>(&a) + 32 * half);
    const __m256i y = load<__m256i>(reinterpret_cast<const char*>(&b) + 32 * half);
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(x, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(y, 8));
    halves[half] = _mm256_add_epi32(load<__m256i>(reinterpret_cast<const char*>(&sums) + 32 * half), _mm256_add_epi32(even, odd));
  }
  return load<__m512i>(halves);
}
CALLED __m256i cvtepi16_epi8(__m512i x) {
  typedef uint8_t Low __attribute__((vector_size(32)));
  return (__m256i)each<Low>([&](int i) { return static_cast<uint8_t>(((Halves)x)[i]); });
}
EMULATED __m512i madd_epi16(__m512i a, __m512i b) { return dpwssd_epi32(__m512i{}, a, b); }
EMULATED __m512i cvtepu8_epi32(__m128i x) { return widened<uint8_t>(x); }
EMULATED __m512i cvtepi8_epi32(__m128i x) { return widened<int8_t>(x); }
EMULATED __m512i cvtepu16_epi32(__m256i x) { return widened<uint16_t>(x); }

// Element i of the result is element index[i] of a, then b.
template <class Vector>
CALLED __m512i chosen(__m512i a, __m512i index, __m512i b) {
  constexpr int kCount = sizeof(Vector) / sizeof(Vector{}[0]);
  const auto first = (Vector)a, places = (Vector)index, second = (Vector)b;
  return (__m512i)each<Vector>([&](int i) {
    const int place = places[i] & (2 * kCount - 1);
    return place < kCount ? first[place] : second[place - kCount];
  });
}
EMULATED __m512i permutex2var_epi8(__m512i a, __m512i index, __m512i b) { return chosen<Bytes>(a, index, b); }
CALLED __m512i maskz_permutex2var_epi8(__mmask64 mask, __m512i a, __m512i index, __m512i b) {
  return mask_mov_epi8(__m512i{}, mask, permutex2var_epi8(a, index, b));
}
EMULATED __m512i permutex2var_epi16(__m512i a, __m512i index, __m512i b) { return chosen<Halves>(a, index, b); }
EMULATED __m512i permutex2var_epi32(__m512i a, __m512i index, __m512i b) { return chosen<Words>(a, index, b); }
EMULATED __m512 permutex2var_ps(__m512 a, __m512i index, __m512 b) {
  return (__m512)chosen<Words>((__m512i)a, index, (__m512i)b);
}
EMULATED __m512i permutexvar_epi16(__m512i index, __m512i x) { return chosen<Halves>(x, index, x); }
EMULATED __m512 permutexvar_ps(__m512i index, __m512 x) { return (__m512)chosen<Words>((__m512i)x, index, (__m512i)x); }
CALLED __m512i shuffle_epi8(__m512i x, __m512i index) {
  const auto from = (Bytes)x, places = (Bytes)index;
  return (__m512i)each<Bytes>([&](int i) { return places[i] & 128 ? uint8_t{0} : from[i / 16 * 16 + places[i] % 16]; });
}
CALLED __m512i shuffle_i32x4(__m512i a, __m512i b, int how) {
  return each<__m512i>([&](int i) { return (i < 4 ? a : b)[(how >> i / 2 * 2 & 3) * 2 + i % 2]; });
}
EMULATED __m512 shuffle_f32x4(__m512 a, __m512 b, int how) { return (__m512)shuffle_i32x4((__m512i)a, (__m512i)b, how); }
CALLED __m512 permute_ps(__m512 x, int how) {
  return each<__m512>([&](int i) { return x[i / 4 * 4 + (how >> i % 4 * 2 & 3)]; });
}
// Of each 16 bytes, the first or second half: elements of a and b in turn.
template <class Vector>
CALLED __m512i in_turn(__m512i a, __m512i b, bool second) {
  constexpr int kLane = 16 / sizeof(Vector{}[0]);
  const auto even = (Vector)a, odd = (Vector)b;
  return (__m512i)each<Vector>([&](int i) {
    const int place = i / kLane * kLane + (second ? kLane / 2 : 0) + i % kLane / 2;
    return i % 2 == 0 ? even[place] : odd[place];
  });
}
EMULATED __m512i unpacklo_epi8(__m512i a, __m512i b) { return in_turn<Bytes>(a, b, false); }
EMULATED __m512i unpackhi_epi8(__m512i a, __m512i b) { return in_turn<Bytes>(a, b, true); }
EMULATED __m512i unpacklo_epi32(__m512i a, __m512i b) { return in_turn<Words>(a, b, false); }
EMULATED __m512i unpackhi_epi32(__m512i a, __m512i b) { return in_turn<Words>(a, b, true); }
EMULATED __m512i unpacklo_epi64(__m512i a, __m512i b) { return in_turn<Longs>(a, b, false); }
EMULATED __m512i unpackhi_epi64(__m512i a, __m512i b) { return in_turn<Longs>(a, b, true); }

// bfloat16: numbers below 2^-126 are zero, before and after.
EMULATED Words without_denormals(Words bits) { return (bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits; }
EMULATED Words rounded(__m512 x) {  // in the lower half of words
  const Words bits = without_denormals((Words)x);
  const Words near = bits + 0x7fff + (bits >> 16 & 1);
  return ((Floats)x == (Floats)x ? near : bits | 0x400000u) >> 16;
}
CALLED __m256bh cvtneps_pbh(__m512 x) {
  const Words low = rounded(x);
  uint16_t out[16];
  for (int i = 0; i < 16; ++i) out[i] = static_cast<uint16_t>(low[i]);
  return load<__m256bh>(out);
}
CALLED __m512bh cvtne2ps_pbh(__m512 high, __m512 low) {
  const __m256bh halves[2] = {cvtneps_pbh(low), cvtneps_pbh(high)};
  return load<__m512bh>(halves);
}
// The second numbers of pairs first, each product added with one rounding.
CALLED __m512 dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
  const Words left = as<Words>(a), right = as<Words>(b);
  for (const bool second : {true, false}) {
    const Words x = second ? left & 0xffff0000u : left << 16, y = second ? right & 0xffff0000u : right << 16;
    const __m512 sum = fmadd_ps((__m512)without_denormals(x), (__m512)without_denormals(y), (__m512)without_denormals((Words)sums));
    sums = (__m512)without_denormals((Words)sum);
  }
  return sums;
}

// Whole numbers and doubles.
typedef int16_t Shorts __attribute__((vector_size(64)));
EMULATED __m512i max_epi16(__m512i a, __m512i b) { return (__m512i)((Shorts)a > (Shorts)b ? (Shorts)a : (Shorts)b); }
EMULATED __m512i min_epi16(__m512i a, __m512i b) { return (__m512i)((Shorts)a < (Shorts)b ? (Shorts)a : (Shorts)b); }
EMULATED __m512i max_epi32(__m512i a, __m512i b) { return (__m512i)((Ints)a > (Ints)b ? (Ints)a : (Ints)b); }
EMULATED __m512i srai_epi16(__m512i x, int by) { return (__m512i)((Shorts)x >> by); }
CALLED int reduce_max_epi32(__m512i x) {
  int most = ((Ints)x)[0];
  for (int i = 1; i < 16; ++i) most = ((Ints)x)[i] > most ? ((Ints)x)[i] : most;
  return most;
}
CALLED int reduce_add_epi32(__m512i x) {
  uint32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += ((Words)x)[i];
  return static_cast<int>(sum);
}
CALLED __m512i cvtps_epi32(__m512 x) {
  __m256i halves[2];
  for (int half = 0; half < 2; ++half) halves[half] = _mm256_cvtps_epi32(load<__m256>(reinterpret_cast<const char*>(&x) + 32 * half));
  return load<__m512i>(halves);
}
template <class Number, class Vector>
EMULATED Vector saturated(__m512i x) {
  Number out[16];
  for (int i = 0; i < 16; ++i) {
    const int number = ((Ints)x)[i], most = (1 << (8 * sizeof(Number) - 1)) - 1;
    out[i] = static_cast<Number>(number > most ? most : number < -most - 1 ? -most - 1 : number);
  }
  return load<Vector>(out);
}
CALLED __m256i cvtsepi32_epi16(__m512i x) { return saturated<int16_t, __m256i>(x); }
CALLED __m128i cvtsepi32_epi8(__m512i x) { return saturated<int8_t, __m128i>(x); }
EMULATED __m256i castsi512_si256(__m512i x) { return load<__m256i>(&x); }
EMULATED __m512i castsi256_si512(__m256i x) { return each<__m512i>([&](int i) { return i < 4 ? x[i] : 0; }); }
EMULATED __m512 castsi512_ps(__m512i x) { return (__m512)x; }
EMULATED __m256i extracti64x4_epi64(__m512i x, int half) { return load<__m256i>(reinterpret_cast<const char*>(&x) + 32 * half); }
EMULATED __m512i inserti64x4(__m512i x, __m256i y, int half) {
  std::memcpy(reinterpret_cast<char*>(&x) + 32 * half, &y, 32);
  return x;
}
EMULATED __m512 insertf32x8(__m512 x, __m256 y, int half) { return (__m512)inserti64x4((__m512i)x, (__m256i)y, half); }
EMULATED __m512d set1_pd(double x) { return each<__m512d>([=](int) { return x; }); }
EMULATED __m512d sub_pd(__m512d a, __m512d b) { return a - b; }
CALLED __m512d fmadd_pd(__m512d a, __m512d b, __m512d c) {
  return each<__m512d>([&](int i) { return std::fma(a[i], b[i], c[i]); });
}
CALLED __m512d cvtepi32_pd(__m256i x) {
  const auto numbers = as<std::array<int32_t, 8>>(x);
  return each<__m512d>([&](int i) { return static_cast<double>(numbers[i]); });
}
CALLED __m256 cvtpd_ps(__m512d x) { return each<__m256>([&](int i) { return static_cast<float>(x[i]); }); }

#undef EMULATED
#undef CALLED

}  // namespace rhizome_emulated_avx512

#undef _mm256_maskz_loadu_epi8
#undef _mm512_add_epi16
#undef _mm512_add_epi32
#undef _mm512_add_ps
#undef _mm512_and_si512
#undef _mm512_broadcast_i32x4
#undef _mm512_castps256_ps512
#undef _mm512_cmpeq_epi8_mask
#undef _mm512_cmpneq_epi8_mask
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi8_epi16
#undef _mm512_cvtepu8_epi16
#undef _mm512_cvtepu8_epi32
#undef _mm512_dpwssd_epi32
#undef _mm512_madd_epi16
#undef _mm512_dpbusd_epi32
#undef _mm512_max_epi16
#undef _mm512_min_epi16
#undef _mm512_max_epi32
#undef _mm512_srai_epi16
#undef _mm512_reduce_max_epi32
#undef _mm512_reduce_add_epi32
#undef _mm512_cvtps_epi32
#undef _mm512_cvtsepi32_epi16
#undef _mm512_cvtsepi32_epi8
#undef _mm512_castsi512_si256
#undef _mm512_castsi256_si512
#undef _mm512_castsi512_ps
#undef _mm512_extracti64x4_epi64
#undef _mm512_inserti64x4
#undef _mm512_insertf32x8
#undef _mm512_set1_pd
#undef _mm512_sub_pd
#undef _mm512_fmadd_pd
#undef _mm512_cvtepi32_pd
#undef _mm512_cvtpd_ps
#undef _mm512_cvtepi16_epi8
#undef _mm512_cvtne2ps_pbh
#undef _mm512_cvtneps_pbh
#undef _mm512_cvtph_ps
#undef _mm512_cvtss_f32
#undef _mm512_div_ps
#undef _mm512_dpbf16_ps
#undef _mm512_fmadd_ps
#undef _mm512_fmsub_ps
#undef _mm512_fnmadd_ps
#undef _mm512_load_ps
#undef _mm512_load_si512
#undef _mm512_loadu_ps
#undef _mm512_loadu_si512
#undef _mm512_mask_load_ps
#undef _mm512_mask_max_ps
#undef _mm512_mask_mov_epi8
#undef _mm512_mask_storeu_epi32
#undef _mm512_maskz_loadu_epi16
#undef _mm512_maskz_mov_ps
#undef _mm512_maskz_permutex2var_epi8
#undef _mm512_max_ps
#undef _mm512_min_ps
#undef _mm512_mul_ps
#undef _mm512_or_si512
#undef _mm512_permute_ps
#undef _mm512_permutex2var_epi16
#undef _mm512_permutex2var_epi32
#undef _mm512_permutex2var_epi8
#undef _mm512_permutex2var_ps
#undef _mm512_permutexvar_epi16
#undef _mm512_permutexvar_ps
#undef _mm512_rcp14_ps
#undef _mm512_reduce_add_ps
#undef _mm512_reduce_max_ps
#undef _mm512_reduce_ps
#undef _mm512_roundscale_ps
#undef _mm512_scalef_ps
#undef _mm512_set1_epi16
#undef _mm512_set1_epi32
#undef _mm512_set1_epi8
#undef _mm512_set1_ps
#undef _mm512_set_epi32
#undef _mm512_set_ps
#undef _mm512_setr_epi32
#undef _mm512_setr_ps
#undef _mm512_setzero_ps
#undef _mm512_setzero_si512
#undef _mm512_shldi_epi16
#undef _mm512_shuffle_epi8
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_i32x4
#undef _mm512_slli_epi16
#undef _mm512_slli_epi32
#undef _mm512_srli_epi16
#undef _mm512_srli_epi32
#undef _mm512_store_ps
#undef _mm512_store_si512
#undef _mm512_storeu_ps
#undef _mm512_storeu_si512
#undef _mm512_stream_si512
#undef _mm512_sub_ps
#undef _mm512_ternarylogic_epi64
#undef _mm512_unpackhi_epi32
#undef _mm512_unpackhi_epi64
#undef _mm512_unpackhi_epi8
#undef _mm512_unpacklo_epi32
#undef _mm512_unpacklo_epi64
#undef _mm512_unpacklo_epi8
#define _mm256_maskz_loadu_epi8 rhizome_emulated_avx512::maskz_loadu_epi8
#define _mm512_add_epi16 rhizome_emulated_avx512::add_epi16
#define _mm512_add_epi32 rhizome_emulated_avx512::add_epi32
#define _mm512_add_ps rhizome_emulated_avx512::add_ps
#define _mm512_and_si512 rhizome_emulated_avx512::and_si512
#define _mm512_broadcast_i32x4 rhizome_emulated_avx512::broadcast_i32x4
#define _mm512_castps256_ps512 rhizome_emulated_avx512::castps256_ps512
#define _mm512_cmpeq_epi8_mask rhizome_emulated_avx512::cmpeq_epi8_mask
#define _mm512_cmpneq_epi8_mask rhizome_emulated_avx512::cmpneq_epi8_mask
#define _mm512_cvtepi32_ps rhizome_emulated_avx512::cvtepi32_ps
#define _mm512_cvtepi8_epi32 rhizome_emulated_avx512::cvtepi8_epi32
#define _mm512_cvtepu16_epi32 rhizome_emulated_avx512::cvtepu16_epi32
#define _mm512_cvtepi8_epi16 rhizome_emulated_avx512::cvtepi8_epi16
#define _mm512_cvtepu8_epi16 rhizome_emulated_avx512::cvtepu8_epi16
#define _mm512_dpwssd_epi32 rhizome_emulated_avx512::dpwssd_epi32
#define _mm512_max_epi16 rhizome_emulated_avx512::max_epi16
#define _mm512_min_epi16 rhizome_emulated_avx512::min_epi16
#define _mm512_max_epi32 rhizome_emulated_avx512::max_epi32
#define _mm512_srai_epi16 rhizome_emulated_avx512::srai_epi16
#define _mm512_reduce_max_epi32 rhizome_emulated_avx512::reduce_max_epi32
#define _mm512_reduce_add_epi32 rhizome_emulated_avx512::reduce_add_epi32
#define _mm512_cvtps_epi32 rhizome_emulated_avx512::cvtps_epi32
#define _mm512_cvtsepi32_epi16 rhizome_emulated_avx512::cvtsepi32_epi16
#define _mm512_cvtsepi32_epi8 rhizome_emulated_avx512::cvtsepi32_epi8
#define _mm512_castsi512_si256 rhizome_emulated_avx512::castsi512_si256
#define _mm512_castsi256_si512 rhizome_emulated_avx512::castsi256_si512
#define _mm512_castsi512_ps rhizome_emulated_avx512::castsi512_ps
#define _mm512_extracti64x4_epi64 rhizome_emulated_avx512::extracti64x4_epi64
#define _mm512_inserti64x4 rhizome_emulated_avx512::inserti64x4
#define _mm512_insertf32x8 rhizome_emulated_avx512::insertf32x8
#define _mm512_set1_pd rhizome_emulated_avx512::set1_pd
#define _mm512_sub_pd rhizome_emulated_avx512::sub_pd
#define _mm512_fmadd_pd rhizome_emulated_avx512::fmadd_pd
#define _mm512_cvtepi32_pd rhizome_emulated_avx512::cvtepi32_pd
#define _mm512_cvtpd_ps rhizome_emulated_avx512::cvtpd_ps
#define _mm512_dpbusd_epi32 rhizome_emulated_avx512::dpbusd_epi32
#define _mm512_cvtepi16_epi8 rhizome_emulated_avx512::cvtepi16_epi8
#define _mm512_madd_epi16 rhizome_emulated_avx512::madd_epi16
#define _mm512_cvtepu8_epi32 rhizome_emulated_avx512::cvtepu8_epi32
#define _mm512_cvtne2ps_pbh rhizome_emulated_avx512::cvtne2ps_pbh
#define _mm512_cvtneps_pbh rhizome_emulated_avx512::cvtneps_pbh
#define _mm512_cvtph_ps rhizome_emulated_avx512::cvtph_ps
#define _mm512_cvtss_f32 rhizome_emulated_avx512::cvtss_f32
#define _mm512_div_ps rhizome_emulated_avx512::div_ps
#define _mm512_dpbf16_ps rhizome_emulated_avx512::dpbf16_ps
#define _mm512_fmadd_ps rhizome_emulated_avx512::fmadd_ps
#define _mm512_fmsub_ps rhizome_emulated_avx512::fmsub_ps
#define _mm512_fnmadd_ps rhizome_emulated_avx512::fnmadd_ps
#define _mm512_load_ps rhizome_emulated_avx512::load_ps
#define _mm512_load_si512 rhizome_emulated_avx512::load_si512
#define _mm512_loadu_ps rhizome_emulated_avx512::loadu_ps
#define _mm512_loadu_si512 rhizome_emulated_avx512::loadu_si512
#define _mm512_mask_load_ps rhizome_emulated_avx512::mask_load_ps
#define _mm512_mask_max_ps rhizome_emulated_avx512::mask_max_ps
#define _mm512_mask_mov_epi8 rhizome_emulated_avx512::mask_mov_epi8
#define _mm512_mask_storeu_epi32 rhizome_emulated_avx512::mask_storeu_epi32
#define _mm512_maskz_loadu_epi16 rhizome_emulated_avx512::maskz_loadu_epi16
#define _mm512_maskz_mov_ps rhizome_emulated_avx512::maskz_mov_ps
#define _mm512_maskz_permutex2var_epi8 rhizome_emulated_avx512::maskz_permutex2var_epi8
#define _mm512_max_ps rhizome_emulated_avx512::max_ps
#define _mm512_min_ps rhizome_emulated_avx512::min_ps
#define _mm512_mul_ps rhizome_emulated_avx512::mul_ps
#define _mm512_or_si512 rhizome_emulated_avx512::or_si512
#define _mm512_permute_ps rhizome_emulated_avx512::permute_ps
#define _mm512_permutex2var_epi16 rhizome_emulated_avx512::permutex2var_epi16
#define _mm512_permutex2var_epi32 rhizome_emulated_avx512::permutex2var_epi32
#define _mm512_permutex2var_epi8 rhizome_emulated_avx512::permutex2var_epi8
#define _mm512_permutex2var_ps rhizome_emulated_avx512::permutex2var_ps
#define _mm512_permutexvar_epi16 rhizome_emulated_avx512::permutexvar_epi16
#define _mm512_permutexvar_ps rhizome_emulated_avx512::permutexvar_ps
#define _mm512_rcp14_ps rhizome_emulated_avx512::rcp14_ps
#define _mm512_reduce_add_ps rhizome_emulated_avx512::reduce_add_ps
#define _mm512_reduce_max_ps rhizome_emulated_avx512::reduce_max_ps
#define _mm512_reduce_ps(x, how) rhizome_emulated_avx512::reduce_ps<(how)>(x)
#define _mm512_roundscale_ps(x, how) rhizome_emulated_avx512::roundscale_ps<(how)>(x)
#define _mm512_scalef_ps rhizome_emulated_avx512::scalef_ps
#define _mm512_set1_epi16 rhizome_emulated_avx512::set1_epi16
#define _mm512_set1_epi32 rhizome_emulated_avx512::set1_epi32
#define _mm512_set1_epi8 rhizome_emulated_avx512::set1_epi8
#define _mm512_set1_ps rhizome_emulated_avx512::set1_ps
#define _mm512_set_epi32 rhizome_emulated_avx512::set_epi32
#define _mm512_set_ps rhizome_emulated_avx512::set_ps
#define _mm512_setr_epi32 rhizome_emulated_avx512::setr_epi32
#define _mm512_setr_ps rhizome_emulated_avx512::setr_ps
#define _mm512_setzero_ps rhizome_emulated_avx512::setzero_ps
#define _mm512_setzero_si512 rhizome_emulated_avx512::setzero_si512
#define _mm512_shldi_epi16 rhizome_emulated_avx512::shldi_epi16
#define _mm512_shuffle_epi8 rhizome_emulated_avx512::shuffle_epi8
#define _mm512_shuffle_f32x4 rhizome_emulated_avx512::shuffle_f32x4
#define _mm512_shuffle_i32x4 rhizome_emulated_avx512::shuffle_i32x4
#define _mm512_slli_epi16 rhizome_emulated_avx512::slli_epi16
#define _mm512_slli_epi32 rhizome_emulated_avx512::slli_epi32
#define _mm512_srli_epi16 rhizome_emulated_avx512::srli_epi16
#define _mm512_srli_epi32 rhizome_emulated_avx512::srli_epi32
#define _mm512_store_ps rhizome_emulated_avx512::store_ps
#define _mm512_store_si512 rhizome_emulated_avx512::store_si512
#define _mm512_storeu_ps rhizome_emulated_avx512::storeu_ps
#define _mm512_storeu_si512 rhizome_emulated_avx512::storeu_si512
#define _mm512_stream_si512 rhizome_emulated_avx512::stream_si512
#define _mm512_sub_ps rhizome_emulated_avx512::sub_ps
#define _mm512_ternarylogic_epi64 rhizome_emulated_avx512::ternarylogic_epi64
#define _mm512_unpackhi_epi32 rhizome_emulated_avx512::unpackhi_epi32
#define _mm512_unpackhi_epi64 rhizome_emulated_avx512::unpackhi_epi64
#define _mm512_unpackhi_epi8 rhizome_emulated_avx512::unpackhi_epi8
#define _mm512_unpacklo_epi32 rhizome_emulated_avx512::unpacklo_epi32
#define _mm512_unpacklo_epi64 rhizome_emulated_avx512::unpacklo_epi64
#define _mm512_unpacklo_epi8 rhizome_emulated_avx512::unpacklo_epi8
