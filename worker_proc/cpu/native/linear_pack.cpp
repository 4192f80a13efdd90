#include "linear_pack.h"

#include <algorithm>

#include "linear.h"

using rhizome::bf16;

// Packs rows [rows, inputs] (bfloat16, `stride` elements apart) into `packed`, zeroed memory of full panels and blocks.
// Row r becomes packed output first + r, or with paired = 1 gate first + r, with 2 up first + r.
RHIZOME_EXPORT void rhizome_pack(bf16* packed, int64_t inputs, const bf16* source, int64_t stride, int64_t rows,
                                 int64_t first, int paired) {
  using namespace rhizome;
  const int64_t steps = blocks(inputs);
  for_tile_rows(rows, first, paired, [&](int64_t begin, int64_t end, int64_t output) {
    bf16* tile = packed + (output / kPanel * steps * 2 + output % kPanel / kTile) * kTileElements + output % kTile * 2;
    const bf16* from = source + begin * stride;
    for (int64_t input = 0; input < inputs; input += 32, tile += 2 * kTileElements, from += 32) {
      if (end - begin == kTile && inputs - input >= 32) {
        pack_tile(from, stride, tile);
      } else {
        for (int64_t row = 0; row < end - begin; ++row)
          for (int64_t i = 0; i < std::min<int64_t>(32, inputs - input); ++i)
            tile[(i / 2 * kTile + row) * 2 + i % 2] = from[row * stride + i];
      }
    }
  });
}
