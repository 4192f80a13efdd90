#include "linear_quantized.h"

#include <algorithm>

#include "parallel.h"

void rhizome_pack_codes(const rhizome::PackedMatrix* weights, const uint8_t* source, int64_t stride, int64_t rows,
                        int64_t first, int paired) {
  using namespace rhizome;
  // Tasks are rows of one panel at most, which share no byte with others.
  const int64_t per_panel = paired == 0 ? kPanel : kTile;
  const int64_t begin_panel = first / per_panel, end_panel = (first + rows + per_panel - 1) / per_panel;
  parallel_for(end_panel - begin_panel, [&](int64_t task, int) {
    const int64_t panel = begin_panel + task;
    const int64_t begin = std::max(first, panel * per_panel), end = std::min(first + rows, (panel + 1) * per_panel);
    for (int64_t at = begin; at < end; ++at) {
      const int64_t output = at % per_panel + (paired == 2 ? kTile : 0);
      const uint8_t* const from = source + (at - first) * stride;
      for (int64_t input = 0; input < weights->inputs; ++input) {
        auto* const codes = const_cast<uint8_t*>(codes_at(*weights, panel, input / 32));
        const CodePlace place = place_of(weights->format, output, input % 32);
        codes[place.byte] |= static_cast<uint8_t>(from[input] << place.shift);
      }
    }
  });
}
