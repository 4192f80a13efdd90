// What layers of the decoder have of a token itself, whatever was computed of its context: per-layer embeddings (Gemma 3n
// and 4, Google, 2025).
#pragma once

#include <cmath>
#include <cstdint>

#include "decoder.h"
#include "decoder_buffers.h"
#include "decoder_last.h"
#include "norm.h"
#include "rows.h"

namespace rhizome {

// The hidden states of a row as they are, for a projection.
inline void round_row(const DecoderModel& model, const Buffers& buffers, int64_t row) {
  const float* const x = buffers.x + row * buffers.x_stride;
  bf16* const to = buffers.normed + row * buffers.normed_stride;
  for_lanes(model.hidden, [&](int64_t i, int count) { store_lanes(to + i, load_lanes(x + i, count), count); });
}

// The inputs of all layers, from the embeddings, which `normed` holds: half of them by the ids, half by a projection, normed
// layer by layer.
inline void make_inputs(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers) {
  linear(model.token_inputs, buffers.normed, buffers.normed_stride, step.tokens, buffers.inputs, buffers.inputs_stride,
         Finish::kStore);
  const float eps = model.norm_eps * static_cast<float>(model.hidden);  // what is normed is that times hidden ** -0.5
  for_rows(step.tokens, 2 * buffers.inputs_stride, [&](int64_t token) {
    for (int64_t first = 0; first < buffers.inputs_stride; first += model.inputs) {
      bf16* const to = buffers.inputs + token * buffers.inputs_stride + first;
      const bf16* const own = step.inputs + token * buffers.inputs_stride + first;
      const float scale = inverse_rms(to, model.inputs, eps);
      for_lanes(model.inputs, [&](int64_t i, int count) {
        const floats made = load_lanes(to + i, count) * scale * load_lanes(model.token_inputs_norm + i, count);
        store_lanes(to + i, (made + load_lanes(own + i, count) * model.inputs_scale) * 0.70710678f, count);
      });
    }
  });
}

// What a layer makes of the hidden states in `normed` and its inputs, into `partial`.
inline void use_inputs(const DecoderModel& model, const Buffers& buffers, int index, const LastTokens* last,
                       int64_t rows) {
  const DecoderLayer& layer = model.layers[index];
  const int64_t size = layer.input_gate.outputs;
  linear(layer.input_gate, buffers.normed, buffers.normed_stride, rows, buffers.inner, buffers.inner_stride, Finish::kStore);
  for_rows(rows, 4 * size, [&](int64_t row) {
    const int64_t token = last == nullptr ? row : last->token(row);
    const bf16* const input = buffers.inputs + token * buffers.inputs_stride + index * model.inputs + model.first_input;
    bf16* const to = buffers.inner + row * buffers.inner_stride;
    for_lanes(size, [&](int64_t i, int count) {
      store_lanes(to + i, gelu(load_lanes(to + i, count)) * load_lanes(input + i, count), count);
    });
    clear_padding(to, size);
  });
  linear(layer.input_output, buffers.inner, buffers.inner_stride, rows, buffers.partial, model.hidden, Finish::kStoreFloat);
}

}  // namespace rhizome
