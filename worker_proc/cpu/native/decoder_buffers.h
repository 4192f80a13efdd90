// Where a step of the decoder has its numbers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "decoder.h"
#include "rows.h"

namespace rhizome {

// Whether what attention and MLP compute is kept apart before it is added to the hidden states.
inline bool apart(const DecoderModel& model) {
  return model.several || model.experts > 0 || model.residual_scale != 1.0f || model.layers[0].attention_norm != nullptr;
}

// The buffers of a step, one after another in its workspace.
struct Buffers {
  float* partial;   // [tokens, hidden], contiguous
  float* made;      // [tokens, hidden], the same of experts beside an MLP
  float* x;         // [tokens, hidden]: the hidden states, `x_stride` apart
  float* cos;       // [ropes, tokens, rotated / 2]
  float* sin;
  bf16* normed;     // [tokens, hidden]
  bf16* qkv;        // [tokens, projected]
  bf16* attended;   // [tokens, mixed]
  bf16* inner;      // [tokens, inner]; begins where `qkv` does, as nothing of an attention is needed in the MLP after it
  bf16* inputs;     // [tokens, layers, inputs]
  float* routes;    // [tokens, experts + shared_gate]: outputs of the router, and then places for a sort
  float* shares;    // [tokens, experts_each]
  int64_t* chosen;  // [tokens, experts_each]
  int64_t x_stride, normed_stride, qkv_stride, attended_stride, inner_stride, inputs_stride;
  int64_t bytes;

  Buffers(const DecoderModel& model, int64_t tokens, void* workspace) {
    x_stride = float_stride(model.hidden);
    normed_stride = row_stride(model.hidden);
    qkv_stride = row_stride(model.projected);
    attended_stride = row_stride(model.mixed);
    inner_stride = row_stride(model.inner);
    inputs_stride = int64_t{model.num_layers} * model.inputs;
    char* next = static_cast<char*>(workspace);
    auto take = [&]<class Element>(Element*& buffer, int64_t count) {
      buffer = reinterpret_cast<Element*>(next);
      next += (count * static_cast<int64_t>(sizeof(Element)) + 63) / 64 * 64;
    };
    take(partial, apart(model) ? tokens * model.hidden : 0);
    take(made, model.beside ? tokens * model.hidden : 0);
    take(x, tokens * x_stride);
    take(inputs, tokens * inputs_stride);
    take(cos, model.ropes * tokens * model.rotated / 2);
    take(sin, model.ropes * tokens * model.rotated / 2);
    take(normed, tokens * normed_stride);
    char* const attention = next;
    take(qkv, tokens * qkv_stride);
    take(attended, tokens * attended_stride);
    char* const end = next;
    next = attention;
    take(inner, tokens * inner_stride);
    take(routes, tokens * (model.experts + model.shared_gate));
    take(shares, tokens * model.experts_each);
    take(chosen, tokens * model.experts_each);
    bytes = std::max(next, end) - static_cast<char*>(workspace);
  }
};

inline void clear_rows(bf16* buffer, int64_t size, int64_t stride, int64_t tokens) {
  if (size % 32 == 0) return;
  for (int64_t row = 0; row < tokens; ++row) clear_padding(buffer + row * stride, size);
}

}  // namespace rhizome
