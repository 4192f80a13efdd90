// Lanes of two vectors in another order.
#pragma once

#include <cstdint>

namespace rhizome {

// Lane i is lane kFrom[i] of `a` followed by `b`: as many lanes, of 32 bits, as each of them has.
template <int... kFrom, class Vector>
inline Vector lanes_of(Vector a, Vector b) {
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12  // which do not know the other function
  typedef int32_t Places __attribute__((vector_size(4 * sizeof...(kFrom))));
  return __builtin_shuffle(a, b, Places{kFrom...});
#else
  return __builtin_shufflevector(a, b, kFrom...);
#endif
}

}  // namespace rhizome
