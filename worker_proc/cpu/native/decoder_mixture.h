// The mixtures of experts of a step of the decoder.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>

#include "decoder.h"
#include "decoder_buffers.h"
#include "experts.h"
#include "norm.h"
#include "rows.h"
#include "stopwatch.h"

namespace rhizome {

// Which experts a token goes through, and with which shares: the likeliest ones by a softmax over all, or by the sigmoid of
// each. They are distinct, as two threads would add to one row; where outputs of the router are not finite, the first ones,
// with NaN.
inline void choose_experts(const DecoderModel& model, const DecoderLayer& layer, const Buffers& buffers, int64_t tokens) {
  constexpr float taken = -std::numeric_limits<float>::infinity();  // biases are finite
  const int64_t experts = model.experts, each = model.experts_each;
  const float* const bias = layer.choice_bias;
  for_rows(tokens, 16 * experts, [&](int64_t token) {
    float* const routes = buffers.routes + token * (experts + model.shared_gate);
    float* const shares = buffers.shares + token * each;
    int64_t* const chosen = buffers.chosen + token * each;
    const float most = *std::max_element(routes, routes + experts);
    float total = 0.0f, of_chosen = model.sigmoid ? 1e-6f : 0.0f;
    for (int64_t i = 0; i < experts; ++i)
      total += routes[i] = model.sigmoid ? 1.0f / (1.0f + expf(-routes[i])) : expf(routes[i] - most);
    if (!std::isfinite(total)) {
      std::iota(chosen, chosen + each, 0);
      std::fill(shares, shares + each, total);
      return;
    }
    for (int64_t j = 0; j < each; ++j) {
      int64_t best = 0;
      float most_likely = taken;
      for (int64_t i = 0; i < experts; ++i) {
        const float likely = bias == nullptr ? routes[i] : routes[i] + bias[i];
        if (likely > most_likely) best = i, most_likely = likely;
      }
      chosen[j] = best;
      of_chosen += shares[j] = routes[best];
      routes[best] = taken;
    }
    const float scale = model.share_scale / (model.renormalizes ? of_chosen : model.sigmoid ? 1.0f : total);
    for (int64_t j = 0; j < each; ++j)
      shares[j] *= layer.expert_scales == nullptr ? scale : scale * layer.expert_scales[chosen[j]];
  });
}

// Routes tokens by what `normed` holds, and computes the experts of what it holds then, into `out` [tokens, hidden].
template <class Between>
void route(const DecoderModel& model, const DecoderLayer& layer, const Buffers& buffers, int64_t tokens, float* out,
           Between&& between) {
  linear(layer.router, buffers.normed, buffers.normed_stride, tokens, buffers.routes, model.experts + model.shared_gate,
         Finish::kStoreFloat);
  choose_experts(model, layer, buffers, tokens);
  between();
  rhizome_experts(layer.expert_gate_ups, layer.expert_downs, model.experts, buffers.normed, buffers.normed_stride, tokens,
                  buffers.chosen, buffers.shares, model.experts_each, model.gate, out);
}

inline void mixture(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers, const DecoderLayer& layer,
                    int64_t tokens) {
  const Stopwatch time(step.op_ns, kGateUp);
  route(model, layer, buffers, tokens, buffers.partial, [] {});
  if (!model.shared) return;
  const int64_t channels = layer.down.inputs, stride = model.experts + model.shared_gate;
  linear(layer.gate_up, buffers.normed, buffers.normed_stride, tokens, buffers.inner, buffers.inner_stride,
         static_cast<Finish>(model.gate));
  for_rows(tokens, channels, [&](int64_t token) {
    bf16* const inner = buffers.inner + token * buffers.inner_stride;
    if (model.shared_gate) {
      const float share = 1.0f / (1.0f + expf(-buffers.routes[token * stride + model.experts]));
      for_lanes(channels, [&](int64_t i, int count) {
        store_lanes(inner + i, share * load_lanes(inner + i, count), count);
      });
    }
    clear_padding(inner, channels);
  });
  linear(layer.down, buffers.inner, buffers.inner_stride, tokens, buffers.partial, model.hidden, Finish::kAdd);
}

// The mixture beside an MLP, whose router and experts see the hidden states through norms of their own, into `made`.
inline void mixture_beside(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers,
                           const DecoderLayer& layer, int64_t tokens) {
  const auto norm = [&](const float* weight) {
    for_rows(tokens, model.hidden, [&](int64_t row) {
      rms_norm(buffers.x + row * buffers.x_stride, weight, model.hidden, model.norm_eps,
               buffers.normed + row * buffers.normed_stride);
    });
  };
  const Stopwatch time(step.op_ns, kGateUp);
  norm(layer.router_norm);
  route(model, layer, buffers, tokens, buffers.made, [&] { norm(layer.experts_norm); });
}

}  // namespace rhizome
