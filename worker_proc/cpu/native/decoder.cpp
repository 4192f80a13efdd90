#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "decoder_buffers.h"
#include "decoder_heads.h"
#include "decoder_inputs.h"
#include "decoder_last.h"
#include "decoder_mixture.h"
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
}

// What was kept apart and is not yet in the hidden states.
struct Pending {
  bool any;
  const float* norm;  // of it, or null
  float scale;
  float after = 1.0f;  // of the hidden states with it
  const DecoderLayer* beside = nullptr;  // whose MLP and experts have made two parts of it
};

// Norms what an MLP and the experts beside it have made, and adds them up.
void add_made(const DecoderModel& model, const DecoderLayer& layer, const Buffers& buffers, int64_t row) {
  float* const partial = buffers.partial + row * model.hidden;
  const float* const made = buffers.made + row * model.hidden;
  const float scale = inverse_rms(partial, model.hidden, model.norm_eps);
  const float made_scale = inverse_rms(made, model.hidden, model.norm_eps);
  for_lanes(model.hidden, [&](int64_t i, int count) {
    const floats sum = load_lanes(partial + i, count) * scale * load_lanes(layer.beside_norm + i, count) +
                       load_lanes(made + i, count) * made_scale * load_lanes(layer.made_norm + i, count);
    store_lanes(partial + i, sum, count);
  });
}

void add_pending(const DecoderModel& model, const Pending& pending, const Buffers& buffers, int64_t token) {
  if (!pending.any) return;
  if (pending.beside != nullptr) add_made(model, *pending.beside, buffers, token);
  const float* const partial = buffers.partial + token * model.hidden;
  float* const x = buffers.x + token * buffers.x_stride;
  if (pending.norm == nullptr) {
    for (int64_t i = 0; i < model.hidden; ++i) x[i] += partial[i] * pending.scale;
    return;
  }
  const float scale = inverse_rms(partial, model.hidden, model.norm_eps) * pending.scale;
  for_lanes(model.hidden, [&](int64_t i, int count) {
    const floats added = load_lanes(partial + i, count) * scale * load_lanes(pending.norm + i, count);
    store_lanes(x + i, (load_lanes(x + i, count) + added) * pending.after, count);
  });
}

// What the MLP of a layer has made.
Pending of_mlp(const DecoderModel& model, const DecoderLayer& layer) {
  const float after = model.inputs > 0 ? 1.0f : layer.output_scale;
  return {apart(model), layer.mlp_norm, model.residual_scale, after, layer.made_norm != nullptr ? &layer : nullptr};
}

// What the last stage of a layer has made.
Pending of_layer(const DecoderModel& model, const DecoderLayer& layer) {
  return model.inputs > 0 ? Pending{true, layer.inputs_norm, 1.0f, layer.output_scale} : of_mlp(model, layer);
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

// Where the gates of a token begin.
int64_t first_gate(const DecoderModel& model, const DecoderLayer& layer) {
  return int64_t{model.heads + 2 * layer.kv_heads} * layer.head_dim;
}

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
  const int64_t width = int64_t{model.heads} * layer.head_dim;
  for_rows(tokens, 2 * width, [&](int64_t token) {
    bf16* const to = buffers.attended + token * buffers.attended_stride;
    const bf16* const gates = buffers.qkv + token * buffers.qkv_stride + first_gate(model, layer);
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

// A layer of which `qkv` makes all that goes into it.
template <class Batch>
void recur_alone(const DecoderStep& step, const Buffers& buffers, Batch batch, void (*compute)(const Batch*)) {
  const Stopwatch time(step.op_ns, kRecur);
  batch.inputs = buffers.qkv;
  batch.out = buffers.attended;
  batch.inputs_stride = buffers.qkv_stride;
  batch.out_stride = buffers.attended_stride;
  recur(step, batch, compute);
}

bool attends(const DecoderLayer& layer) {
  return layer.delta == nullptr && layer.conv == nullptr && layer.space == nullptr;
}

// What stands in place of attention.
void mix(const DecoderStep& step, const Buffers& buffers, const DecoderLayer& layer) {
  {
    const Stopwatch time(step.op_ns, kQkv);
    linear(layer.qkv, buffers.normed, buffers.normed_stride, step.tokens, buffers.qkv, buffers.qkv_stride, Finish::kStore);
  }
  if (layer.delta != nullptr)
    delta_net(step, buffers, layer);
  else if (layer.conv != nullptr)
    recur_alone(step, buffers, *layer.conv, rhizome_short_conv);
  else
    recur_alone(step, buffers, *layer.space, rhizome_state_space);
}

// Moves the rows of the tokens that go on to the front. One after another: they go where others lay.
void keep_rows(const DecoderModel& model, const LastTokens& last, const Buffers& buffers, const DecoderLayer& layer) {
  const auto move = [&](auto* rows, int64_t stride, int64_t count) {
    for (int64_t row = 0; row < last.count(); ++row)
      if (last.token(row) != row) memcpy(rows + row * stride, rows + last.token(row) * stride, count * sizeof(*rows));
  };
  const int64_t width = int64_t{model.heads} * layer.head_dim;
  move(buffers.x, buffers.x_stride, model.hidden);
  if (!attends(layer)) return move(buffers.attended, buffers.attended_stride, layer.o.inputs);
  move(buffers.qkv, buffers.qkv_stride, width);
  if (model.gated) move(buffers.qkv + first_gate(model, layer), buffers.qkv_stride, width);
}

// Only tokens whose logits are wanted go further than to their keys and values in the last layer that writes some.
void attention_stage(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers, int index) {
  const DecoderLayer& layer = model.layers[index];
  // the embedding of several ranks, or what the layer before has made
  Pending pending = index == 0 ? Pending{model.several != 0, nullptr, 1.0f} : of_layer(model, model.layers[index - 1]);
  std::optional<LastTokens> last;
  if (index >= model.last_whole) last.emplace(step);
  const LastTokens* const before = index > model.last_whole ? &*last : nullptr;
  int64_t tokens = before != nullptr ? last->count() : step.tokens;
  if (index == 0 && model.inputs > 0) {
    const Stopwatch time(step.op_ns, kEmbed);
    for_rows(tokens, model.hidden, [&](int64_t token) {
      add_pending(model, pending, buffers, token);
      round_row(model, buffers, token);
    });
    make_inputs(model, step, buffers);
    pending.any = false;
  }
  norm(model, step, buffers, pending, layer.input_norm, tokens);
  attends(layer) ? project_heads(model, step, buffers, layer, before) : mix(step, buffers, layer);
  if (index == model.last_whole) {
    tokens = last->count();
    keep_rows(model, *last, buffers, layer);
  }
  if (attends(layer)) {
    const AttentionBatch batch = last ? last->batch(layer.batch) : *step.attention[layer.batch];
    attend(model, step, buffers, layer, batch, tokens);
  }
  const Stopwatch time(step.op_ns, kO);
  clear_rows(buffers.attended, layer.o.inputs, buffers.attended_stride, tokens);
  add(model, layer.o, buffers.attended, buffers.attended_stride, tokens, buffers);
}

void mlp_stage(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers, int index) {
  const DecoderLayer& layer = model.layers[index];
  const int64_t tokens = index < model.last_whole ? step.tokens : LastTokens(step).count();
  norm(model, step, buffers, {apart(model), layer.attention_norm, model.residual_scale}, layer.post_norm, tokens);
  if (layer.router.outputs > 0 && !model.beside) return mixture(model, step, buffers, layer, tokens);
  {
    const Stopwatch time(step.op_ns, kGateUp);
    linear(layer.gate_up, buffers.normed, buffers.normed_stride, tokens, buffers.inner, buffers.inner_stride,
           static_cast<Finish>(model.gate));
  }
  {
    const Stopwatch time(step.op_ns, kDown);
    clear_rows(buffers.inner, layer.down.inputs, buffers.inner_stride, tokens);
    add(model, layer.down, buffers.inner, buffers.inner_stride, tokens, buffers);
  }
  if (model.beside) mixture_beside(model, step, buffers, layer, tokens);
}

// What a layer makes of a token's own inputs, where there are any.
void inputs_stage(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers, int index) {
  const DecoderLayer& layer = model.layers[index];
  std::optional<LastTokens> last;
  if (index >= model.last_whole) last.emplace(step);
  const int64_t rows = last ? last->count() : step.tokens;
  const Stopwatch time(step.op_ns, kDown);
  for_rows(rows, model.hidden, [&](int64_t row) {
    add_pending(model, of_mlp(model, layer), buffers, row);
    round_row(model, buffers, row);
  });
  use_inputs(model, buffers, index, last ? &*last : nullptr, rows);
}

// The normed hidden states of the tokens whose logits are wanted, as the first rows of `normed`.
void final_norm(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers) {
  const LastTokens last(step);
  const Stopwatch time(step.op_ns, kNorm);
  const Pending pending = of_layer(model, model.layers[model.num_layers - 1]);
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

void rhizome_decoder_inputs(const DecoderModel* model, const DecoderStep* step, int layer) {
  inputs_stage(*model, *step, Buffers(*model, step->tokens, step->workspace), layer);
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
    if (model->inputs > 0) inputs_stage(*model, *step, buffers, layer);
  }
}
