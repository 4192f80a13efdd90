#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kv_int8.h"
#include "norm.h"
#include "parallel.h"
#include "stopwatch.h"

namespace rhizome {
namespace {

// Elements from row to row: whole blocks of 32 inputs, and an odd number of cache lines, so that the rows of a tile do
// not share the few places of a cache where addresses 4096 apart go.
int64_t row_stride(int64_t size) { return (blocks(size) | 1) * 32; }

// The same for float32.
int64_t float_stride(int64_t size) { return ((size + 15) / 16 | 1) * 16; }

// The buffers of a step, one after another in its workspace.
struct Buffers {
  float* partial;   // [tokens, hidden], contiguous
  float* x;         // [tokens, hidden]: the hidden states, `x_stride` apart
  float* cos;       // [tokens, head_dim / 2]
  float* sin;
  bf16* normed;     // [tokens, hidden]
  bf16* qkv;        // [tokens, (heads + 2 kv_heads) * head_dim]
  bf16* attended;   // [tokens, heads * head_dim]
  bf16* inner;      // [tokens, inner]
  int64_t x_stride, normed_stride, qkv_stride, attended_stride, inner_stride;
  int64_t bytes;

  Buffers(const DecoderModel& model, int64_t tokens, void* workspace) {
    x_stride = float_stride(model.hidden);
    normed_stride = row_stride(model.hidden);
    qkv_stride = row_stride((model.heads + 2 * model.kv_heads) * model.head_dim);
    attended_stride = row_stride(model.heads * model.head_dim);
    inner_stride = row_stride(model.inner);
    char* next = static_cast<char*>(workspace);
    auto take = [&]<class Element>(Element*& buffer, int64_t count) {
      buffer = reinterpret_cast<Element*>(next);
      next += (count * static_cast<int64_t>(sizeof(Element)) + 63) / 64 * 64;
    };
    take(partial, model.several ? tokens * model.hidden : 0);
    take(x, tokens * x_stride);
    take(cos, tokens * model.head_dim / 2);
    take(sin, tokens * model.head_dim / 2);
    take(normed, tokens * normed_stride);
    take(qkv, tokens * qkv_stride);
    take(attended, tokens * attended_stride);
    take(inner, tokens * inner_stride);
    bytes = next - static_cast<char*>(workspace);
  }
};

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

// What follows the last number of a row up to the next multiple of 32 must be 0, see linear.h.
void clear_padding(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers) {
  auto clear = [&](bf16* buffer, int64_t size, int64_t stride) {
    const int64_t padding = blocks(size) * 32 - size;
    if (padding == 0) return;
    for (int64_t row = 0; row < step.tokens; ++row) memset(buffer + row * stride + size, 0, padding * sizeof(bf16));
  };
  clear(buffers.normed, model.hidden, buffers.normed_stride);
  clear(buffers.attended, model.heads * model.head_dim, buffers.attended_stride);
  clear(buffers.inner, model.inner, buffers.inner_stride);
}

void embed(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers) {
  const Stopwatch time(step.op_ns, kEmbed);
  const int64_t hidden = model.hidden, half = model.head_dim / 2;
  for_rows(step.tokens, 4 * hidden, [&](int64_t token) {
    float* const x = buffers.x + token * buffers.x_stride;
    float* const to = model.several ? buffers.partial + token * hidden : x;
    if (model.several) std::fill(x, x + hidden, 0.0f);
    const int64_t local = step.token_ids[token] - model.vocab_first;
    if (local < 0 || local >= model.vocab_count) {
      std::fill(to, to + hidden, 0.0f);
    } else if (model.embedding != nullptr) {
      for (int64_t i = 0; i < hidden; ++i) to[i] = to_float(model.embedding[local * hidden + i]);
    } else {
      bf16* const row = buffers.normed + token * buffers.normed_stride;
      unpack_row(model.head, local, row);
      for (int64_t i = 0; i < hidden; ++i) to[i] = to_float(row[i]);
    }
    const float position = static_cast<float>(step.positions[token]);
    for (int64_t i = 0; i < half; ++i) {
      const float angle = position * model.inverse_frequencies[i];
      buffers.cos[token * half + i] = cosf(angle) * model.attention_factor;
      buffers.sin[token * half + i] = sinf(angle) * model.attention_factor;
    }
  });
  clear_padding(model, step, buffers);
}

// Adds what the ranks have just computed to the hidden states.
void add_partial(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers) {
  if (!model.several) return;
  for_rows(step.tokens, model.hidden, [&](int64_t token) {
    const float* const partial = buffers.partial + token * model.hidden;
    float* const x = buffers.x + token * buffers.x_stride;
    for (int64_t i = 0; i < model.hidden; ++i) x[i] += partial[i];
  });
}

void norm(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers, const float* weight) {
  const Stopwatch time(step.op_ns, kNorm);
  add_partial(model, step, buffers);
  for_rows(step.tokens, model.hidden, [&](int64_t token) {
    rms_norm(buffers.x + token * buffers.x_stride, weight, model.hidden, model.norm_eps,
             buffers.normed + token * buffers.normed_stride);
  });
}

// Adds a projection to the hidden states, or leaves it as this rank's part.
void add(const DecoderModel& model, const PackedMatrix& weights, const bf16* x, int64_t x_stride, int64_t tokens,
         const Buffers& buffers) {
  if (model.several)
    linear(weights, x, x_stride, tokens, buffers.partial, model.hidden, Finish::kStoreFloat);
  else
    linear(weights, x, x_stride, tokens, buffers.x, buffers.x_stride, Finish::kAdd);
}

// Queries are rotated in place, keys and values go to their pages.
void rotate_and_store(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers,
                      const DecoderLayer& layer) {
  const Stopwatch time(step.op_ns, kRotate);
  const AttentionBatch& pages = *step.attention;
  const int64_t dim = model.head_dim, half = dim / 2;
  for_rows(step.tokens, 2 * buffers.qkv_stride, [&](int64_t token) {
    const float* const cos = buffers.cos + token * half;
    const float* const sin = buffers.sin + token * half;
    bf16* from = buffers.qkv + token * buffers.qkv_stride;
    const int64_t page = step.slots[token] / pages.page_size, offset = step.slots[token] % pages.page_size;
    const int64_t k_at = page * pages.k_page_stride + offset * pages.k_token_stride;
    const int64_t v_at = page * pages.v_page_stride + offset * pages.v_token_stride;
    bf16* const k = static_cast<bf16*>(layer.k_pages) + k_at;
    bf16* const v = static_cast<bf16*>(layer.v_pages) + v_at;
    for (int64_t head = 0; head < model.heads; ++head, from += dim)
      norm_and_rotate(from, layer.q_norm, model.norm_eps, cos, sin, dim, from);
    if (pages.kv_int8) {
      auto* const k_codes = static_cast<int8_t*>(layer.k_pages) + k_at;
      auto* const v_codes = static_cast<int8_t*>(layer.v_pages) + v_at;
      int64_t scale = page * model.kv_heads * pages.page_size + offset;
      for (int64_t head = 0; head < model.kv_heads; ++head, scale += pages.page_size) {
        bf16 *const key = from + head * dim, *const value = key + model.kv_heads * dim;
        norm_and_rotate(key, layer.k_norm, model.norm_eps, cos, sin, dim, key);
        layer.k_scales[scale] = quantize_head(key, dim, k_codes + head * pages.k_head_stride);
        layer.v_scales[scale] = quantize_head(value, dim, v_codes + head * pages.v_head_stride);
      }
      return;
    }
    for (int64_t head = 0; head < model.kv_heads; ++head, from += dim)
      norm_and_rotate(from, layer.k_norm, model.norm_eps, cos, sin, dim, k + head * pages.k_head_stride);
    for (int64_t head = 0; head < model.kv_heads; ++head, from += dim)
      memcpy(v + head * pages.v_head_stride, from, dim * sizeof(bf16));
  });
}

void attention_stage(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers,
                     const DecoderLayer& layer) {
  norm(model, step, buffers, layer.input_norm);
  {
    const Stopwatch time(step.op_ns, kQkv);
    linear(layer.qkv, buffers.normed, buffers.normed_stride, step.tokens, buffers.qkv, buffers.qkv_stride,
           Finish::kStore);
  }
  rotate_and_store(model, step, buffers, layer);
  const AttentionLayer attention{buffers.qkv,      buffers.qkv_stride,      layer.k_pages, layer.v_pages,
                                 buffers.attended, buffers.attended_stride, layer.scale,   0.0f,
                                 layer.window,     0,                       layer.k_scales, layer.v_scales};
  {
    const Stopwatch time(step.op_ns, kAttend);
    rhizome_attention(step.attention, &attention);
  }
  const Stopwatch time(step.op_ns, kO);
  add(model, layer.o, buffers.attended, buffers.attended_stride, step.tokens, buffers);
}

void mlp_stage(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers, const DecoderLayer& layer) {
  norm(model, step, buffers, layer.post_norm);
  {
    const Stopwatch time(step.op_ns, kGateUp);
    linear(layer.gate_up, buffers.normed, buffers.normed_stride, step.tokens, buffers.inner, buffers.inner_stride,
           Finish::kSiluMul);
  }
  const Stopwatch time(step.op_ns, kDown);
  add(model, layer.down, buffers.inner, buffers.inner_stride, step.tokens, buffers);
}

// The normed hidden states of the tokens whose logits are wanted, as the first rows of `normed`.
void final_norm(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers) {
  const Stopwatch time(step.op_ns, kNorm);
  add_partial(model, step, buffers);
  for_rows(step.num_logits, model.hidden, [&](int64_t row) {
    rms_norm(buffers.x + step.logit_rows[row] * buffers.x_stride, model.norm, model.hidden, model.norm_eps,
             buffers.normed + row * buffers.normed_stride);
  });
}

}  // namespace
}  // namespace rhizome

using namespace rhizome;

int64_t rhizome_decoder_workspace(const DecoderModel* model, int64_t tokens) {
  return Buffers(*model, tokens, nullptr).bytes;
}

void rhizome_decoder_embed(const DecoderModel* model, const DecoderStep* step) {
  embed(*model, *step, Buffers(*model, step->tokens, step->workspace));
}

void rhizome_decoder_attention(const DecoderModel* model, const DecoderStep* step, int layer) {
  attention_stage(*model, *step, Buffers(*model, step->tokens, step->workspace), model->layers[layer]);
}

void rhizome_decoder_mlp(const DecoderModel* model, const DecoderStep* step, int layer) {
  mlp_stage(*model, *step, Buffers(*model, step->tokens, step->workspace), model->layers[layer]);
}

void rhizome_decoder_logits(const DecoderModel* model, const DecoderStep* step, float* logits, int64_t stride) {
  const Buffers buffers(*model, step->tokens, step->workspace);
  final_norm(*model, *step, buffers);
  const Stopwatch time(step->op_ns, kHead);
  linear(model->head, buffers.normed, buffers.normed_stride, step->num_logits, logits, stride,
         Finish::kStoreFloat);
}

void rhizome_decoder_argmax(const DecoderModel* model, const DecoderStep* step, int64_t* index, float* best) {
  const Buffers buffers(*model, step->tokens, step->workspace);
  final_norm(*model, *step, buffers);
  const Stopwatch time(step->op_ns, kHead);
  linear_argmax(model->head, buffers.normed, buffers.normed_stride, step->num_logits, index, best);
}

void rhizome_decoder_layers(const DecoderModel* model, const DecoderStep* step) {
  const Buffers buffers(*model, step->tokens, step->workspace);
  embed(*model, *step, buffers);
  for (int layer = 0; layer < model->num_layers; ++layer) {
    attention_stage(*model, *step, buffers, model->layers[layer]);
    mlp_stage(*model, *step, buffers, model->layers[layer]);
  }
}
