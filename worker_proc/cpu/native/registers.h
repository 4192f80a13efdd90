// The vector registers: what fits in them.
#pragma once

#include <cstdint>

namespace rhizome {

// Vectors of sums that are held at once, beside what is multiplied: 32 registers, or 16. At most: where that is little.
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kHeldSums = 16, kMostSums = 16;
#else
inline constexpr int kHeldSums = 8, kMostSums = 12;
#endif

// x, which compilers do not make anew for every use of it, nor make another vector of what it was made of. By value: a
// reference to it would be one to a type without the attributes of x, and so to an address that x need not have.
template <class Vector>
[[nodiscard]] inline Vector held(Vector x) {
#if defined(RHIZOME_EMULATED_AVX512)  // tests/native/emulated_avx512.h
  asm("" : "+m"(x));
#elif defined(__AVX2__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

// The same, and nothing that is held so changes places.
template <class Vector>
[[nodiscard]] inline Vector held_in_order(Vector x) {
#if defined(RHIZOME_EMULATED_AVX512)
  asm volatile("" : "+m"(x));
#elif defined(__AVX2__)
  asm volatile("" : "+v"(x));
#endif
  return x;
}

// The distance between rows, of which compilers would otherwise keep all multiples at hand, in memory, for lack of registers.
[[nodiscard]] inline int64_t held_stride(int64_t stride) {
  asm("" : "+r"(stride));
  return stride;
}

}  // namespace rhizome
