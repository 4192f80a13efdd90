// The vector registers: what fits in them.
#pragma once

namespace rhizome {

// Vectors of sums that are held at once, beside what is multiplied: 32 registers, or 16. At most: where that is little.
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kHeldSums = 16, kMostSums = 16;
#else
inline constexpr int kHeldSums = 8, kMostSums = 12;
#endif

// Keeps compilers from making a vector anew for every use of it, or another one of what it was made of.
template <class Vector>
inline void hold([[maybe_unused]] Vector& x) {
#if defined(RHIZOME_EMULATED_AVX512)  // tests/native/emulated_avx512.h
  asm("" : "+m"(x));
#elif defined(__AVX2__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
}

// The same, and nothing that is held so changes places.
template <class Vector>
inline void hold_in_order([[maybe_unused]] Vector& x) {
#if defined(RHIZOME_EMULATED_AVX512)
  asm volatile("" : "+m"(x));
#elif defined(__AVX2__)
  asm volatile("" : "+v"(x));
#endif
}

}  // namespace rhizome
