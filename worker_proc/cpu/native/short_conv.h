// The gated short convolution of LFM2 (Liquid AI, 2025): what lies between the projections of a layer.
#pragma once

#include <cstdint>

#include "abi.h"
#include "bf16.h"

namespace rhizome {

// `ConvStruct` of worker_proc/cpu/short_conv.py.
struct ConvBatch {
  const bf16* inputs;       // [T, 3 * channels]: the gate of what goes in, the gate of what comes out, x
  const float* weight;      // [kernel, channels]
  const float* bias;        // [channels]
  bf16* conv;               // [rows, channels, kernel]: the last inputs of the convolution
  const int64_t* segments;  // [num_segments, 3]: row of conv, first token, tokens
  bf16* out;                // [T, channels]
  int64_t inputs_stride, out_stride;  // from token to token
  int64_t num_segments, channels, kernel;
};

// Copies states: `copies` [count, 2] says from which row of conv to which.
void copy_states(const ConvBatch& batch, const int64_t* copies, int64_t count);

}  // namespace rhizome

// Computes `out` of the segments' tokens, and takes their states on. A token's bits depend on its own sequence alone,
// not on where that is cut into segments. No row is in two segments.
RHIZOME_EXPORT void rhizome_short_conv(const rhizome::ConvBatch* batch);
