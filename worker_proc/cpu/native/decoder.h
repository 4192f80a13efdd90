// One rank's share of a decoder-only transformer of the Llama family, from token ids to logits, in bfloat16.
//
// Between layers, hidden states are float32; what enters a projection is rounded to bfloat16, sums are float32. With
// several ranks a stage leaves its share of the result in `partial`, for the caller to add up over all ranks; the next
// stage begins by adding it to the hidden states. So does a model that norms or scales what it adds.
#pragma once

#include <cstdint>

#include "attention.h"
#include "delta_net.h"
#include "linear.h"
#include "screen.h"
#include "short_conv.h"
#include "state_space.h"

namespace rhizome {

// Plain C types only: decoder.py mirrors these with ctypes.
struct DecoderLayer {
  PackedMatrix qkv;      // all queries, all keys, all values; then gates, one for each number of a query
  PackedMatrix o;
  PackedMatrix gate_up;  // paired; in a mixture of the shared expert, if there is one
  PackedMatrix down;
  PackedMatrix router;                  // of a mixture (else of no outputs); behind the experts' the gate of the shared one
  const PackedMatrix* expert_gate_ups;  // [experts]
  const PackedMatrix* expert_downs;
  // Of a Gated DeltaNet, which stands in place of attention, what is no step's. `qkv` has q, k, v and z then. Or null.
  const DeltaBatch* delta;
  PackedMatrix gates;  // its b and a
  // The same of a gated short convolution. `qkv` has its two gates and what goes in then.
  const ConvBatch* conv;
  const SpaceBatch* space;  // and of a Mamba-2 layer; `qkv` has all that is projected
  const float* choice_bias;  // [experts] of a mixture: what choosing adds to what is likely; or null
  const float* input_norm;  // [hidden]
  const float* post_norm;
  const float* attention_norm;  // [hidden], of what attention adds to the hidden states, or null
  const float* mlp_norm;        // the same for the MLP
  // Where a mixture is beside an MLP (Gemma 4), each has norms of its own, before and after; else null.
  const float* router_norm;   // [hidden], of what its router sees
  const float* experts_norm;  // [hidden], of what its experts see
  const float* beside_norm;   // [hidden], of what the MLP makes
  const float* made_norm;     // [hidden], of what the experts make
  const float* expert_scales;  // [experts]: of their shares, or null
  const float* q_norm;      // [head_dim], or null
  const float* k_norm;
  const float* v_norm;      // [head_dim], or null
  PackedMatrix input_gate;     // of a token's own input to this layer (per-layer embeddings), or of no outputs
  PackedMatrix input_output;   // what comes of it
  const float* inputs_norm;    // [hidden], of that
  void* k_pages;             // of the layer itself, or of the one whose keys and values it reads
  void* v_pages;
  float* k_scales;  // where the pages hold int8, see attention.h
  float* v_scales;
  const float* sinks;  // [heads], see attention.h, or null
  float scale;
  float output_scale;  // of the hidden states behind the layer
  int32_t window;  // 0: none
  int32_t rope;    // which of the model's rotations is that of keys
  int32_t query_rope;
  int32_t rotated;     // the first numbers of a head, which are rotated: even
  int32_t kv_heads;    // of the rank; 0: none of its own
  int32_t head_dim;
  int32_t batch;       // which of the step's describes its heads to attention
};

struct DecoderModel {
  const DecoderLayer* layers;
  PackedMatrix head;
  PackedMatrix token_inputs;  // makes of embeddings what layers have of a token beside `inputs`, or of no outputs
  const HeadScreen* screen;   // of the head, or null
  const bf16* embedding;      // [vocabulary rows of the rank, hidden], or null: the rows of the head
  const float* norm;          // [hidden]
  const float* inverse_frequencies;  // [ropes, rotated / 2]
  const float* attention_factors;    // [ropes]: multiply cos and sin
  const float* token_inputs_norm;    // [a layer's inputs]
  const float* betas;         // [ropes]: 1 + this * log(1 + position / period), rounded down, multiplies them, too
  const int64_t* periods;     // [ropes]
  float norm_eps;
  float embedding_scale;
  float residual_scale;       // multiplies what attention and MLP add to the hidden states
  float softcap;              // of attention scores, 0: none
  float share_scale;          // of what a mixture's experts give
  float inputs_scale;         // of a step's `inputs`
  int32_t num_layers;
  int32_t hidden;
  int32_t heads;              // of the rank
  int32_t ropes;
  int32_t rotated;            // most of a layer
  int32_t gate;               // of the MLP: the Finish that makes gates and ups one
  int32_t inner;              // most channels of an MLP or shared expert, or inputs of a layer
  int32_t experts;            // 0: no mixture
  int32_t experts_each;       // that a token goes through
  int32_t renormalizes;       // 1: their shares add up to 1
  int32_t vocab_first;        // of the rank: others are embedded as zeros, which the other ranks' rows are added to
  int32_t vocab_count;
  int32_t several;            // 1 when there are more ranks than this one
  int32_t gated;              // 1: what attention gives is multiplied by the sigmoid of gates
  int32_t projected;          // most numbers that `qkv` and `gates` of a layer make of a token
  int32_t mixed;              // most that its `o` takes
  int32_t shared;             // 1: all tokens go through one more expert
  int32_t shared_gate;        // 1: as far as its gate lets them
  int32_t sigmoid;            // 1: an expert is as likely as the sigmoid of its output; 0: a softmax over all
  int32_t beside;             // 1: mixtures are beside MLPs
  int32_t inputs;             // numbers of a layer's input, or 0
  int32_t first_input;        // of which the rank has these in its layers
  int32_t last_whole;         // the last layer that all tokens need, for the keys and values or states that it writes
};

// What recurrent layers compute together, before states are copied.
struct Wave {
  const int64_t* segments;  // [num_segments, 3]: see delta_net.h
  const int64_t* copies;    // [num_copies, 2]: row from which, and to which
  int64_t num_segments;
  int64_t num_copies;
};

// The operations of a step, in the order of `op_ns`. decoder.py names them.
enum Operation : int32_t { kEmbed, kNorm, kQkv, kRotate, kAttend, kRecur, kO, kGateUp, kDown, kHead, kOperations };

struct DecoderStep {
  const AttentionBatch* const* attention;  // for each kind of heads
  const int64_t* token_ids;   // [tokens]
  const bf16* inputs;         // [tokens, layers, inputs] by their ids, where layers have such
  const int64_t* positions;
  const int64_t* slots;       // page * page_size + offset, where K and V are written
  const int64_t* logit_rows;  // [num_logits]: tokens whose logits are wanted
  const Wave* waves;          // [num_waves], where there are recurrent layers
  int64_t num_waves;
  int64_t tokens;
  int64_t num_logits;
  void* workspace;            // rhizome_decoder_workspace bytes, aligned to 64; first float32 partial [tokens, hidden],
                              // and the same of experts where they are beside an MLP
  int64_t* op_ns;             // [kOperations]: the time of each operation is added up here; null: not measured
};

}  // namespace rhizome

RHIZOME_EXPORT int64_t rhizome_decoder_workspace(const rhizome::DecoderModel* model, int64_t tokens);

// The stages of a step, for several ranks: embed, (attention, mlp, and inputs where there are any) for every layer, then
// logits or argmax. `partial` is to be added up over all ranks after each of them but the last, what experts have beside an
// MLP too. A step without tokens is not allowed.
RHIZOME_EXPORT void rhizome_decoder_embed(const rhizome::DecoderModel* model, const rhizome::DecoderStep* step);
RHIZOME_EXPORT void rhizome_decoder_attention(const rhizome::DecoderModel* model, const rhizome::DecoderStep* step,
                                              int layer);
RHIZOME_EXPORT void rhizome_decoder_mlp(const rhizome::DecoderModel* model, const rhizome::DecoderStep* step,
                                        int layer);
RHIZOME_EXPORT void rhizome_decoder_inputs(const rhizome::DecoderModel* model, const rhizome::DecoderStep* step,
                                           int layer);

// The rows of `partial` after any stage from the model's `last_whole` layer on: tokens whose logits are not wanted end with
// their keys and values there, and the others lie one after another.
RHIZOME_EXPORT int64_t rhizome_decoder_last_tokens(const rhizome::DecoderStep* step);

// Logits float32 [num_logits, outputs of the head], `stride` elements from row to row.
RHIZOME_EXPORT void rhizome_decoder_logits(const rhizome::DecoderModel* model, const rhizome::DecoderStep* step,
                                           float* logits, int64_t stride);

// The same, but minus infinity where no draw with `params` double [4, num_logits] keeps them, see screen.h.
RHIZOME_EXPORT void rhizome_decoder_filtered_logits(const rhizome::DecoderModel* model, const rhizome::DecoderStep* step,
                                                    const double* params, float* logits, int64_t stride);

// The likeliest of the rank's tokens, counted from 0, and its logit, [num_logits] each.
RHIZOME_EXPORT void rhizome_decoder_argmax(const rhizome::DecoderModel* model, const rhizome::DecoderStep* step,
                                           int64_t* index, float* best);

// All stages up to the last one, for one rank.
RHIZOME_EXPORT void rhizome_decoder_layers(const rhizome::DecoderModel* model, const rhizome::DecoderStep* step);
