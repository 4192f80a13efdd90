// Log probabilities of tokens, their ranks, and the likeliest tokens: what worker_proc/logprobs.py defines.
#pragma once

#include <cstdint>

#include "abi.h"

namespace rhizome {

// `_ScoreStruct` of worker_proc/cpu/sampling.py. Strides in elements.
struct ScoreBatch {
  const float* logits;    // [R, vocab]
  const int64_t* tokens;  // [R]
  float* own;             // [R]: of `tokens`
  int64_t* ranks;         // [R]
  int64_t* top_ids;       // [R, most]
  float* top_values;      // [R, most]
  int64_t rows, vocab, logits_stride, most;
};

}  // namespace rhizome

// `most` is not above `vocab`. Rows without a distribution (NaN, inf, nothing but -inf) get NaN, rank 1, the first ids.
RHIZOME_EXPORT void rhizome_score(const rhizome::ScoreBatch* batch);
