// Mamba-1 layers (Gu and Dao, 2023) as Mamba, Falcon-Mamba and Jamba have them: the convolution, and the recurrence. Between
// the two come projections.
#pragma once

#include <cstdint>

#include "abi.h"
#include "bf16.h"

namespace rhizome {

inline constexpr int64_t kMostStates = 64;  // of a channel

// `ScanStruct` of worker_proc/cpu/selective_scan.py.
struct ScanBatch {
  const bf16* projected;     // [T, 2 * channels]: what is convolved, gates
  const float* conv_weight;  // [kernel, channels]
  const float* conv_bias;    // [channels]
  const float* rate;         // [states, channels]: -exp(A_log)
  const float* skip;         // [channels]: D
  bf16* conv;                // [rows, channels, kernel]: the last inputs of the convolution
  float* state;              // [rows, channels, states]
  const int64_t* segments;   // [num_segments, 3]: row of conv and state, first token, tokens
  bf16* mixed;               // [T, channels]: SiLU of the convolution's outputs
  const bf16* steps;         // [T, channels], before softplus
  const bf16* into;          // [T, states]: B
  const bf16* out_of;        // [T, states]: C
  bf16* out;                 // [T, channels]
  int64_t num_segments, channels, states, kernel;
};

}  // namespace rhizome

// Both compute the segments' tokens and take what they keep on: `mixed` and `conv`, `out` and `state`. A token's bits depend on
// its own sequence alone, not on where that is cut into segments. No row is in two segments; channels come in 16s.
RHIZOME_EXPORT void rhizome_scan_convolve(const rhizome::ScanBatch* batch);
RHIZOME_EXPORT void rhizome_selective_scan(const rhizome::ScanBatch* batch);
