// Mamba-2 layers (Dao and Gu, 2024) as Granite 4, Bamba and Nemotron-H have them: what lies between the projections.
#pragma once

#include <cstdint>

#include "abi.h"
#include "bf16.h"

namespace rhizome {

// `SpaceStruct` of worker_proc/cpu/state_space.py. A row of `inputs` has the gate [heads * head_dim], then the
// channels: x as wide, B and C [groups, state_size] each, then the step sizes [heads]. Head h goes with group
// h / (heads / groups).
struct SpaceBatch {
  const bf16* inputs;        // [T, 2 * heads * head_dim + 2 * groups * state_size + heads]
  const float* conv_weight;  // [kernel, channels]
  const float* conv_bias;    // [channels]
  const float* rate;         // [heads]: -exp(A_log)
  const float* dt_bias;      // [heads]
  const float* skip;         // [heads]: D
  const float* norm;         // [heads * head_dim]
  bf16* conv;                // [rows, channels, kernel]: the last inputs of the convolution
  float* state;              // [rows, heads, head_dim, state_size]
  const int64_t* segments;   // [num_segments, 3]: row of conv and state, first token, tokens
  bf16* out;                 // [T, heads * head_dim]
  float* squares;            // [T] or null: sums over what the norm divides by their root, which is left undivided
  int64_t inputs_stride, out_stride;  // from token to token
  int64_t num_segments, heads, head_dim, groups, state_size, norm_groups, kernel;
  float eps, least_dt, most_dt;
};

// Copies states: `copies` [count, 2] says from which row of conv and state to which.
void copy_states(const SpaceBatch& batch, const int64_t* copies, int64_t count);

}  // namespace rhizome

// Computes `out` of the segments' tokens, and takes their states on. A token's bits depend on its own sequence alone,
// not on where that is cut into segments. No row is in two segments.
RHIZOME_EXPORT void rhizome_state_space(const rhizome::SpaceBatch* batch);
