// Drawing tokens from logits: what worker_proc/sampler.py defines, one row per task.
#pragma once

#include <algorithm>
#include <cstdint>

#include "abi.h"

namespace rhizome {

// `DrawBatch` of worker_proc/cpu/sampling.py. Strides in elements.
struct DrawBatch {
  const float* logits;     // [S, vocab]
  const float* best;       // [S]: the largest of each row
  const double* params;    // [4, max_slots]: temperature, top_k, top_p, min_p
  const int64_t* seeds;    // [max_slots]
  const int64_t* index;    // [3, R]: row of the step, slot, tokens before the drawn one
  int64_t* tokens;         // [S]
  int64_t rows, vocab, logits_stride, params_stride, index_stride;
};

// What a row's draw leaves out. Without a temperature, all but the largest.
struct RowFilters {
  float temperature;
  int64_t top_k;  // 0: all
  double top_p, min_p;

  // So many of the largest logits bound what is kept.
  int64_t count() const { return temperature > 0 ? std::max<int64_t>(top_k, 1) : 1; }
};

// Of a column of `params` as in DrawBatch.
inline RowFilters filters_of(const double* column, int64_t stride) {
  return {static_cast<float>(column[0]), static_cast<int64_t>(column[stride]), column[2 * stride], column[3 * stride]};
}

// A bound of the logits that a draw keeps: all that are less have no part in it, whatever they are. The row's `count`-th largest
// logit is not less than `last`, its largest from `low` to `high`.
float least_kept(const RowFilters& filters, float last, float low, float high);

}  // namespace rhizome

// The largest logit of each row, and its smallest index. Of a row with NaN: some index.
RHIZOME_EXPORT void rhizome_best(const float* logits, int64_t stride, int64_t rows, int64_t vocab, float* best,
                                 int64_t* index);

// Draws tokens[row] for every column of `index`.
RHIZOME_EXPORT void rhizome_draw(const rhizome::DrawBatch* batch);

// For tests: the weights [vocab] that a row of logits, whose largest is `best`, is drawn from.
RHIZOME_EXPORT void rhizome_draw_weights(const float* logits, int64_t vocab, float best, float temperature,
                                         float* weights);

// For tests: the number in [0, 1) of a seed and position.
RHIZOME_EXPORT double rhizome_draw_uniform(int64_t seed, int64_t position);
