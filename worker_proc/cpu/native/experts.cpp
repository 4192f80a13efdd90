#include "experts.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "room.h"
#include "rows.h"

namespace rhizome {
namespace {

struct Place {
  int64_t token;
  float share;
};

}  // namespace
}  // namespace rhizome

using namespace rhizome;

void rhizome_experts(const PackedMatrix* gate_ups, const PackedMatrix* downs, int64_t experts, const bf16* x,
                     int64_t x_stride, int64_t tokens, const int64_t* chosen, const float* shares, int64_t each, int finish,
                     float* out) {
  const int64_t inputs = gate_ups[0].inputs, channels = downs[0].inputs, outputs = downs[0].outputs;
  std::vector<std::vector<Place>> places(experts);
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t i = token * each; i < (token + 1) * each; ++i)
      if (chosen[i] >= 0 && chosen[i] < experts) places[chosen[i]].push_back({token, shares[i]});
  size_t most = 0;
  for (const auto& of_expert : places) most = std::max(most, of_expert.size());
  const int64_t rows = static_cast<int64_t>(most);
  const int64_t in_stride = row_stride(inputs), inner_stride = row_stride(channels), out_stride = float_stride(outputs);
  static thread_local std::vector<bf16> kept_taken, kept_inner;
  static thread_local std::vector<float> kept_made;
  bf16* const taken = room_in(kept_taken, rows * in_stride);
  bf16* const inner = room_in(kept_inner, rows * inner_stride);
  float* const made = room_in(kept_made, rows * out_stride);
  std::fill(out, out + tokens * outputs, 0.0f);
  for (int64_t expert = 0; expert < experts; ++expert) {
    const std::vector<Place>& of_expert = places[expert];
    if (of_expert.empty()) continue;
    const int64_t count = static_cast<int64_t>(of_expert.size());
    for_rows(count, inputs, [&](int64_t row) {
      memcpy(taken + row * in_stride, x + of_expert[row].token * x_stride, inputs * sizeof(bf16));
      clear_padding(taken + row * in_stride, inputs);
      clear_padding(inner + row * inner_stride, channels);
    });
    linear(gate_ups[expert], taken, in_stride, count, inner, inner_stride, static_cast<Finish>(finish));
    linear(downs[expert], inner, inner_stride, count, made, out_stride, Finish::kStoreFloat);
    for_rows(count, outputs, [&](int64_t row) {
      float* const to = out + of_expert[row].token * outputs;
      const float* const from = made + row * out_stride;
      const float share = of_expert[row].share;
      for (int64_t i = 0; i < outputs; ++i) to[i] += share * from[i];
    });
  }
}
