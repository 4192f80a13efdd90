// Gated DeltaNet (Yang et al., 2024) as Qwen3-Next and Qwen 3.5 have it: what lies between the projections of a layer.
#pragma once

#include <cstdint>

#include "abi.h"
#include "bf16.h"

namespace rhizome {

// `DeltaStruct` of worker_proc/cpu/delta_net.py. Channels are those of q, k and v, one after another: 2 * k_heads *
// k_dim + v_heads * v_dim. Value head h goes with key head (first_head + h) / alike % k_heads.
struct DeltaBatch {
  const bf16* qkv;           // [T, channels], like the next three with the numbers of a token side by side
  const bf16* z;             // [T, v_heads * v_dim]: the gate of what comes out
  const bf16* b;             // [T, v_heads]: beta before its sigmoid
  const bf16* a;             // [T, v_heads]: the step size before bias and softplus
  const float* conv_weight;  // [kernel, channels]
  const float* rate;         // [v_heads]: -exp(A_log)
  const float* dt_bias;      // [v_heads]
  const float* norm;         // [v_dim]
  bf16* conv;                // [rows, channels, kernel]: the last inputs of the convolution
  float* state;              // [rows, v_heads, k_dim, v_dim]
  const int64_t* segments;   // [num_segments, 3]: row of conv and state, first token, tokens
  bf16* out;                 // [T, v_heads * v_dim]
  int64_t qkv_stride, z_stride, b_stride, a_stride, out_stride;  // from token to token
  int64_t num_segments, k_heads, v_heads, k_dim, v_dim, kernel;
  int64_t first_head, alike;  // of all ranks' value heads: the first one here; so many in a row have the same key head
  float eps;
};

// Copies states: `copies` [count, 2] says from which row of conv and state to which.
void copy_states(const DeltaBatch& batch, const int64_t* copies, int64_t count);

}  // namespace rhizome

// Computes `out` of the segments' tokens, and takes their states on. A token's bits depend on its own sequence alone,
// not on where that is cut into segments. No row is in two segments.
RHIZOME_EXPORT void rhizome_delta_net(const rhizome::DeltaBatch* batch);
