// How rows of numbers lie in memory, and work on them by all threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear.h"
#include "parallel.h"

namespace rhizome {

// Elements from row to row: whole blocks of 32 inputs, and an odd number of cache lines, so that the rows of a tile do
// not share the few places of a cache where addresses 4096 apart go.
inline int64_t row_stride(int64_t size) { return (blocks(size) | 1) * 32; }

// The same for float32.
inline int64_t float_stride(int64_t size) { return ((size + 15) / 16 | 1) * 16; }

// What follows the last number of a row up to the next multiple of 32 must be 0, see linear.h.
inline void clear_padding(bf16* row, int64_t size) {
  std::memset(row + size, 0, (blocks(size) * 32 - size) * sizeof(bf16));
}

// Calls body(row) for all rows, in tasks of about `kTaskElements` numbers.
template <class Body>
void for_rows(int64_t rows, int64_t row_elements, Body&& body) {
  constexpr int64_t kTaskElements = 16384;
  const int64_t at_once = std::max<int64_t>(1, kTaskElements / row_elements);
  parallel_for((rows + at_once - 1) / at_once, [&](int64_t task, int) {
    const int64_t end = std::min(rows, (task + 1) * at_once);
    for (int64_t row = task * at_once; row < end; ++row) body(row);
  });
}

}  // namespace rhizome
