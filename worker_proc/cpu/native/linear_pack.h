// How rows of a matrix are cut to be packed.
#pragma once

#include <algorithm>
#include <cstring>

#include "linear.h"
#include "parallel.h"

namespace rhizome {

// Calls body(begin, end, output) for groups of rows [begin, end) that share their tiles, in parallel; row `begin` becomes packed
// output `output`. Row r is packed output first + r, or with paired = 1 gate first + r, with 2 up first + r.
template <class Body>
void for_tile_rows(int64_t rows, int64_t first, int paired, Body&& body) {
  const int64_t head = std::min(rows, (kTile - first % kTile) % kTile);  // up to the next border
  const int64_t groups = (rows - head + kTile - 1) / kTile + (head > 0 ? 1 : 0);
  parallel_for(groups, [&](int64_t task, int) {
    const int64_t begin = head == 0 ? task * kTile : task == 0 ? 0 : head + (task - 1) * kTile;
    const int64_t end = std::min(rows, head > 0 && task == 0 ? head : begin + kTile);
    const int64_t at = first + begin;
    body(begin, end, paired == 0 ? at : at / kTile * kPanel + (paired - 1) * kTile + at % kTile);
  });
}

// 16 rows of 32 inputs as a tile.
inline void pack_tile(const bf16* from, int64_t stride, bf16* tile) {
  for (int row = 0; row < kTile; ++row)
    for (int pair = 0; pair < kTile; ++pair) memcpy(tile + (pair * kTile + row) * 2, from + row * stride + pair * 2, 4);
}

}  // namespace rhizome
