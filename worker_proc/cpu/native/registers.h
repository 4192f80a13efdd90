// What fits in the vector registers.
#pragma once

namespace rhizome {

// Vectors of sums that are held at once, beside what is multiplied: 32 registers, or 16. At most: where that is little.
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kHeldSums = 16, kMostSums = 16;
#else
inline constexpr int kHeldSums = 8, kMostSums = 12;
#endif

}  // namespace rhizome
