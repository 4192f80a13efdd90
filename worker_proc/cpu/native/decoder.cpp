#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "decoder_buffers.h"
#include "decoder_last.h"
#include "experts.h"
#include "kv_int8.h"
#include "norm.h"
#include "rows.h"
#include "stopwatch.h"

namespace rhizome {
namespace {

// By what a rotation scales queries at a position (Llama 4, Ministral 3).
float temperature(const DecoderModel& model, int rope, int64_t position) {
  const int64_t periods = model.betas[rope] == 0.0f ? 0 : position / model.periods[rope];
  return 1.0f + model.betas[rope] * std::log1p(static_cast<float>(periods));
}

void embed(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers) {
  const Stopwatch time(step.op_ns, kEmbed);
  const int64_t hidden = model.hidden, half = model.rotated / 2;
  const float scale = model.embedding_scale;
  for_rows(step.tokens, 4 * hidden, [&](int64_t token) {
    float* const x = buffers.x + token * buffers.x_stride;
    float* const to = model.several ? buffers.partial + token * hidden : x;
    if (model.several) std::fill(x, x + hidden, 0.0f);
    const int64_t local = step.token_ids[token] - model.vocab_first;
    if (local < 0 || local >= model.vocab_count) {
      std::fill(to, to + hidden, 0.0f);
    } else if (model.embedding != nullptr) {
      for (int64_t i = 0; i < hidden; ++i) to[i] = scale * to_float(model.embedding[local * hidden + i]);
    } else {
      bf16* const row = buffers.normed + token * buffers.normed_stride;
      unpack_row(model.head, local, row);
      for (int64_t i = 0; i < hidden; ++i) to[i] = scale * to_float(row[i]);
    }
    const float position = static_cast<float>(step.positions[token]);
    for (int rope = 0; rope < model.ropes; ++rope) {
      const int64_t row = (rope * step.tokens + token) * half;
      const float factor = model.attention_factors[rope] * temperature(model, rope, step.positions[token]);
      for (int64_t i = 0; i < half; ++i) {
        const float angle = position * model.inverse_frequencies[rope * half + i];
        buffers.cos[row + i] = cosf(angle) * factor;
        buffers.sin[row + i] = sinf(angle) * factor;
      }
    }
  });
  clear_rows(buffers.normed, model.hidden, buffers.normed_stride, step.tokens);
  clear_rows(buffers.inner, model.inner, buffers.inner_stride, step.tokens);
}

// What was kept apart and is not yet in the hidden states.
struct Pending {
  bool any;
  const float* norm;  // of it, or null
  float scale;
};

void add_pending(const DecoderModel& model, const Pending& pending, const Buffers& buffers, int64_t token) {
  if (!pending.any) return;
  const float* const partial = buffers.partial + token * model.hidden;
  float* const x = buffers.x + token * buffers.x_stride;
  if (pending.norm == nullptr) {
    for (int64_t i = 0; i < model.hidden; ++i) x[i] += partial[i] * pending.scale;
    return;
  }
  const float scale = inverse_rms(partial, model.hidden, model.norm_eps) * pending.scale;
  for_lanes(model.hidden, [&](int64_t i, int count) {
    const floats added = load_lanes(partial + i, count) * scale * load_lanes(pending.norm + i, count);
    store_lanes(x + i, load_lanes(x + i, count) + added, count);
  });
}

void norm(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers, const Pending& pending,
          const float* weight, int64_t tokens) {
  const Stopwatch time(step.op_ns, kNorm);
  for_rows(tokens, model.hidden, [&](int64_t token) {
    add_pending(model, pending, buffers, token);
    rms_norm(buffers.x + token * buffers.x_stride, weight, model.hidden, model.norm_eps,
             buffers.normed + token * buffers.normed_stride);
  });
}

// Adds a projection to the hidden states, or keeps it apart.
void add(const DecoderModel& model, const PackedMatrix& weights, const bf16* x, int64_t x_stride, int64_t tokens,
         const Buffers& buffers) {
  if (apart(model))
    linear(weights, x, x_stride, tokens, buffers.partial, model.hidden, Finish::kStoreFloat);
  else
    linear(weights, x, x_stride, tokens, buffers.x, buffers.x_stride, Finish::kAdd);
}

// What becomes of the heads of a token: queries are normed, rotated and kept, keys and values go to their pages, gates stay.
class Rotation {
 public:
  Rotation(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers, const DecoderLayer& layer)
      : model_(model), step_(step), buffers_(buffers), layer_(layer), pages_(*step.attention),
        whole_(model.rotated == model.head_dim),
        past_(kWritesPast && step.tokens >= kStreamRows && whole_ && model.head_dim == 128 && aligned(buffers.qkv) &&
              aligned(layer.k_pages) && aligned(layer.v_pages)) {}

  // Head `head` of queries, keys, values and gates one after another, of a token: its numbers, which may be where queries
  // and gates are kept, and are not wanted afterwards.
  void take(int64_t head, int64_t token, bf16* numbers) const {
    const int64_t dim = model_.head_dim;
    bf16* const own = buffers_.qkv + token * buffers_.qkv_stride + head * dim;
    if (head < model_.heads) return turn(numbers, layer_.query_rope, layer_.q_norm, token, past_, own);
    if (head >= model_.heads + 2 * model_.kv_heads) {
      if (numbers != own) memcpy(own, numbers, dim * sizeof(bf16));
      return;
    }
    head -= model_.heads;
    const bool is_key = head < model_.kv_heads;
    if (!is_key) head -= model_.kv_heads;
    const int64_t page = step_.slots[token] / pages_.page_size, offset = step_.slots[token] % pages_.page_size;
    const int64_t at = is_key ? page * pages_.k_page_stride + offset * pages_.k_token_stride + head * pages_.k_head_stride
                              : page * pages_.v_page_stride + offset * pages_.v_token_stride + head * pages_.v_head_stride;
    void* const memory = is_key ? layer_.k_pages : layer_.v_pages;
    if (pages_.kv_int8) {
      if (is_key) turn(numbers, layer_.rope, layer_.k_norm, token, false, numbers);
      float* const scales = is_key ? layer_.k_scales : layer_.v_scales;
      scales[(page * model_.kv_heads + head) * pages_.page_size + offset] =
          quantize_head(numbers, dim, static_cast<int8_t*>(memory) + at);
    } else if (is_key) {
      turn(numbers, layer_.rope, layer_.k_norm, token, past_, static_cast<bf16*>(memory) + at);
    } else if (past_) {
      copy_lines<true>(numbers, dim, static_cast<bf16*>(memory) + at);
    } else {
      copy_lines<false>(numbers, dim, static_cast<bf16*>(memory) + at);
    }
  }

 private:
  static bool aligned(const void* memory) { return reinterpret_cast<uintptr_t>(memory) % 64 == 0; }

  void turn(const bf16* numbers, int64_t rope, const float* norm, int64_t token, bool past, bf16* to) const {
    const int64_t dim = model_.head_dim, half = model_.rotated / 2;
    const int64_t row = (rope * step_.tokens + token) * half;
    const float* const cos = buffers_.cos + row;
    const float* const sin = buffers_.sin + row;
    if (past)
      norm_and_rotate_lines<128, true>(numbers, norm, model_.norm_eps, cos, sin, to);
    else if (whole_ && dim == 128)
      norm_and_rotate_lines<128, false>(numbers, norm, model_.norm_eps, cos, sin, to);
    else if (whole_ && dim == 64)
      norm_and_rotate_lines<64, false>(numbers, norm, model_.norm_eps, cos, sin, to);
    else
      norm_and_rotate(numbers, norm, model_.norm_eps, cos, sin, dim, model_.rotated, to);
  }

  const DecoderModel& model_;
  const DecoderStep& step_;
  const Buffers& buffers_;
  const DecoderLayer& layer_;
  const AttentionBatch& pages_;
  const bool whole_;  // heads are rotated
  const bool past_;  // they are many, so that they need not go to a cache
};

// Projects to queries, keys and values, and puts them where attention finds them.
void project_heads(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers,
                   const DecoderLayer& layer) {
  const Rotation rotation(model, step, buffers, layer);
  if (whole_heads(model.head_dim)) {
    const Stopwatch time(step.op_ns, kQkv);
    linear_heads(layer.qkv, buffers.normed, buffers.normed_stride, step.tokens, model.head_dim,
                 [&](int64_t head, int64_t row, int count, bf16* numbers) {
                   for (int i = 0; i < count; ++i) rotation.take(head, row + i, numbers + i * model.head_dim);
                 });
    return;
  }
  {
    const Stopwatch time(step.op_ns, kQkv);
    linear(layer.qkv, buffers.normed, buffers.normed_stride, step.tokens, buffers.qkv, buffers.qkv_stride,
           Finish::kStore);
  }
  const Stopwatch time(step.op_ns, kRotate);
  for_rows(step.tokens, 2 * buffers.qkv_stride, [&](int64_t token) {
    bf16* const from = buffers.qkv + token * buffers.qkv_stride;
    for (int64_t head = 0; head < layer.qkv.outputs / model.head_dim; ++head)
      rotation.take(head, token, from + head * model.head_dim);
  });
}

// Where the gates of a token begin.
int64_t first_gate(const DecoderModel& model) { return (model.heads + 2 * model.kv_heads) * model.head_dim; }

// `tokens` queries of `batch`, which lie in the first rows.
void attend(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers, const DecoderLayer& layer,
            const AttentionBatch& batch, int64_t tokens) {
  const AttentionLayer attention{buffers.qkv,      buffers.qkv_stride,      layer.k_pages, layer.v_pages,
                                 buffers.attended, buffers.attended_stride, layer.scale,   model.softcap,
                                 layer.window,     0,                       layer.k_scales, layer.v_scales,
                                 layer.sinks};
  const Stopwatch time(step.op_ns, kAttend);
  rhizome_attention(&batch, &attention);
  if (!model.gated) return;
  const int64_t width = int64_t{model.heads} * model.head_dim;
  for_rows(tokens, 2 * width, [&](int64_t token) {
    bf16* const to = buffers.attended + token * buffers.attended_stride;
    const bf16* const gates = buffers.qkv + token * buffers.qkv_stride + first_gate(model);
    for_lanes(width, [&](int64_t i, int count) {
      store_lanes(to + i, times_sigmoid(load_lanes(to + i, count), load_lanes(gates + i, count)), count);
    });
  });
}

// Computes a recurrent layer wave by wave, of all tokens: each of them changes the states.
template <class Batch>
void recur(const DecoderStep& step, Batch& batch, void (*compute)(const Batch*)) {
  for (const Wave* wave = step.waves; wave < step.waves + step.num_waves; ++wave) {
    batch.segments = wave->segments;
    batch.num_segments = wave->num_segments;
    compute(&batch);
    copy_states(batch, wave->copies, wave->num_copies);
  }
}

void delta_net(const DecoderStep& step, const Buffers& buffers, const DecoderLayer& layer) {
  bf16* const gates = buffers.qkv + layer.qkv.outputs;
  {
    const Stopwatch time(step.op_ns, kQkv);
    linear(layer.gates, buffers.normed, buffers.normed_stride, step.tokens, gates, buffers.qkv_stride, Finish::kStore);
  }
  const Stopwatch time(step.op_ns, kRecur);
  DeltaBatch batch = *layer.delta;
  batch.qkv = buffers.qkv;
  batch.z = buffers.qkv + layer.qkv.outputs - batch.v_heads * batch.v_dim;
  batch.b = gates;
  batch.a = gates + batch.v_heads;
  batch.out = buffers.attended;
  batch.qkv_stride = batch.z_stride = batch.b_stride = batch.a_stride = buffers.qkv_stride;
  batch.out_stride = buffers.attended_stride;
  recur(step, batch, rhizome_delta_net);
}

void short_conv(const DecoderStep& step, const Buffers& buffers, const DecoderLayer& layer) {
  const Stopwatch time(step.op_ns, kRecur);
  ConvBatch batch = *layer.conv;
  batch.inputs = buffers.qkv;
  batch.out = buffers.attended;
  batch.inputs_stride = buffers.qkv_stride;
  batch.out_stride = buffers.attended_stride;
  recur(step, batch, rhizome_short_conv);
}

bool attends(const DecoderLayer& layer) { return layer.delta == nullptr && layer.conv == nullptr; }

// What stands in place of attention.
void mix(const DecoderStep& step, const Buffers& buffers, const DecoderLayer& layer) {
  {
    const Stopwatch time(step.op_ns, kQkv);
    linear(layer.qkv, buffers.normed, buffers.normed_stride, step.tokens, buffers.qkv, buffers.qkv_stride, Finish::kStore);
  }
  layer.delta != nullptr ? delta_net(step, buffers, layer) : short_conv(step, buffers, layer);
}

// Moves the rows of the tokens that the last layer keeps to the front. One after another: they go where others lay.
void keep_rows(const DecoderModel& model, const LastTokens& last, const Buffers& buffers, const DecoderLayer& layer) {
  const auto move = [&](auto* rows, int64_t stride, int64_t count) {
    for (int64_t row = 0; row < last.count(); ++row)
      if (last.token(row) != row) memcpy(rows + row * stride, rows + last.token(row) * stride, count * sizeof(*rows));
  };
  const int64_t width = int64_t{model.heads} * model.head_dim;
  move(buffers.x, buffers.x_stride, model.hidden);
  if (!attends(layer)) return move(buffers.attended, buffers.attended_stride, layer.o.inputs);
  move(buffers.qkv, buffers.qkv_stride, width);
  if (model.gated) move(buffers.qkv + first_gate(model), buffers.qkv_stride, width);
}

// In the last layer, only tokens whose logits are wanted go further than to their keys and values.
void attention_stage(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers, int index) {
  const DecoderLayer& layer = model.layers[index];
  // the embedding of several ranks, or what the layer before has made
  const Pending pending = index == 0 ? Pending{model.several != 0, nullptr, 1.0f}
                                     : Pending{apart(model), model.layers[index - 1].mlp_norm, model.residual_scale};
  norm(model, step, buffers, pending, layer.input_norm, step.tokens);
  attends(layer) ? project_heads(model, step, buffers, layer) : mix(step, buffers, layer);
  int64_t tokens = step.tokens;
  if (index + 1 < model.num_layers) {
    if (attends(layer)) attend(model, step, buffers, layer, *step.attention, tokens);
  } else {
    const LastTokens last(step);
    tokens = last.count();
    keep_rows(model, last, buffers, layer);
    if (attends(layer)) attend(model, step, buffers, layer, last.batch(), tokens);
  }
  const Stopwatch time(step.op_ns, kO);
  clear_rows(buffers.attended, layer.o.inputs, buffers.attended_stride, tokens);
  add(model, layer.o, buffers.attended, buffers.attended_stride, tokens, buffers);
}

// Which experts a token goes through, and with which shares: the likeliest ones by a softmax over all, or by the sigmoid of
// each. They are distinct, as two threads would add to one row; where outputs of the router are not finite, the first ones,
// with NaN.
void choose_experts(const DecoderModel& model, const Buffers& buffers, const float* bias, int64_t tokens) {
  constexpr float taken = -std::numeric_limits<float>::infinity();  // biases are finite
  const int64_t experts = model.experts, each = model.experts_each;
  for_rows(tokens, 16 * experts, [&](int64_t token) {
    float* const routes = buffers.routes + token * (experts + model.shared);
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
    for (int64_t j = 0; j < each; ++j) shares[j] *= scale;
  });
}

void mixture(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers, const DecoderLayer& layer,
             int64_t tokens) {
  const Stopwatch time(step.op_ns, kGateUp);
  const int64_t stride = model.experts + model.shared;
  linear(layer.router, buffers.normed, buffers.normed_stride, tokens, buffers.routes, stride, Finish::kStoreFloat);
  choose_experts(model, buffers, layer.choice_bias, tokens);
  rhizome_experts(layer.expert_gate_ups, layer.expert_downs, model.experts, buffers.normed, buffers.normed_stride, tokens,
                  buffers.chosen, buffers.shares, model.experts_each,
                  model.gate, buffers.partial);
  if (!model.shared) return;
  linear(layer.gate_up, buffers.normed, buffers.normed_stride, tokens, buffers.inner, buffers.inner_stride,
         static_cast<Finish>(model.gate));
  for_rows(tokens, model.inner, [&](int64_t token) {
    bf16* const inner = buffers.inner + token * buffers.inner_stride;
    const float share = 1.0f / (1.0f + expf(-buffers.routes[token * stride + model.experts]));
    for_lanes(model.inner, [&](int64_t i, int count) {
      store_lanes(inner + i, share * load_lanes(inner + i, count), count);
    });
  });
  linear(layer.down, buffers.inner, buffers.inner_stride, tokens, buffers.partial, model.hidden, Finish::kAdd);
}

void mlp_stage(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers, int index) {
  const DecoderLayer& layer = model.layers[index];
  const int64_t tokens = index + 1 < model.num_layers ? step.tokens : LastTokens(step).count();
  norm(model, step, buffers, {apart(model), layer.attention_norm, model.residual_scale}, layer.post_norm, tokens);
  if (layer.router.outputs > 0) return mixture(model, step, buffers, layer, tokens);
  {
    const Stopwatch time(step.op_ns, kGateUp);
    linear(layer.gate_up, buffers.normed, buffers.normed_stride, tokens, buffers.inner, buffers.inner_stride,
           static_cast<Finish>(model.gate));
  }
  const Stopwatch time(step.op_ns, kDown);
  add(model, layer.down, buffers.inner, buffers.inner_stride, tokens, buffers);
}

// The normed hidden states of the tokens whose logits are wanted, as the first rows of `normed`.
void final_norm(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers) {
  const LastTokens last(step);
  const Stopwatch time(step.op_ns, kNorm);
  const Pending pending{apart(model), model.layers[model.num_layers - 1].mlp_norm, model.residual_scale};
  for_rows(last.count(), model.hidden, [&](int64_t row) { add_pending(model, pending, buffers, row); });
  for_rows(step.num_logits, model.hidden, [&](int64_t row) {
    rms_norm(buffers.x + last.row(step.logit_rows[row]) * buffers.x_stride, model.norm, model.hidden, model.norm_eps,
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
  attention_stage(*model, *step, Buffers(*model, step->tokens, step->workspace), layer);
}

void rhizome_decoder_mlp(const DecoderModel* model, const DecoderStep* step, int layer) {
  mlp_stage(*model, *step, Buffers(*model, step->tokens, step->workspace), layer);
}

int64_t rhizome_decoder_last_tokens(const DecoderStep* step) { return LastTokens(*step).count(); }

void rhizome_decoder_logits(const DecoderModel* model, const DecoderStep* step, float* logits, int64_t stride) {
  const Buffers buffers(*model, step->tokens, step->workspace);
  final_norm(*model, *step, buffers);
  const Stopwatch time(step->op_ns, kHead);
  linear(model->head, buffers.normed, buffers.normed_stride, step->num_logits, logits, stride,
         Finish::kStoreFloat);
}

void rhizome_decoder_filtered_logits(const DecoderModel* model, const DecoderStep* step, const double* params, float* logits,
                                     int64_t stride) {
  const Buffers buffers(*model, step->tokens, step->workspace);
  final_norm(*model, *step, buffers);
  const Stopwatch time(step->op_ns, kHead);
  filtered_outputs(model->head, model->screen, buffers.normed, buffers.normed_stride, step->num_logits, params,
                   model->several != 0, logits, stride);
}

void rhizome_decoder_argmax(const DecoderModel* model, const DecoderStep* step, int64_t* index, float* best) {
  const Buffers buffers(*model, step->tokens, step->workspace);
  final_norm(*model, *step, buffers);
  const Stopwatch time(step->op_ns, kHead);
  find_largest(model->head, model->screen, buffers.normed, buffers.normed_stride, step->num_logits, index, best);
}

void rhizome_decoder_layers(const DecoderModel* model, const DecoderStep* step) {
  const Buffers buffers(*model, step->tokens, step->workspace);
  embed(*model, *step, buffers);
  for (int layer = 0; layer < model->num_layers; ++layer) {
    attention_stage(*model, *step, buffers, layer);
    mlp_stage(*model, *step, buffers, layer);
  }
}
