// Which tokens of a step are computed to the end: of the others nothing but keys and values is wanted any more in the last
// layer that writes some.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "decoder.h"

namespace rhizome {

// In every request, the tokens from the first to the last one whose logits are wanted. All of a request that has only one,
// as others may share its part of the plan.
class LastTokens {
 public:
  explicit LastTokens(const DecoderStep& step) : step_(step), rows_(step.tokens, -1), starts_(1, 0) {
    const AttentionBatch& all = *step.attention[0];
    std::vector<bool> wanted(step.tokens, false);
    for (int64_t i = 0; i < step.num_logits; ++i) wanted[step.logit_rows[i]] = true;
    kv_lens_.assign(all.kv_lens, all.kv_lens + all.num_rows);
    for (int request = 0; request < all.num_rows; ++request) {
      int first = all.q_starts[request], stop = all.q_starts[request + 1];
      if (stop - first > 1) {
        while (first < stop && !wanted[first]) ++first;
        while (first < stop && !wanted[stop - 1]) --stop, --kv_lens_[request];
      }
      for (; first < stop; ++first) {
        rows_[first] = count();
        tokens_.push_back(first);
      }
      starts_.push_back(static_cast<int32_t>(count()));
    }
  }

  LastTokens(const LastTokens&) = delete;
  LastTokens& operator=(const LastTokens&) = delete;

  int64_t count() const { return static_cast<int64_t>(tokens_.size()); }

  // The token of a row, in ascending order, and the row of a token.
  int64_t token(int64_t row) const { return tokens_[row]; }
  int64_t row(int64_t token) const { return rows_[token]; }

  // Their queries, with heads of this kind.
  AttentionBatch batch(int kind) const {
    AttentionBatch batch = *step_.attention[kind];
    batch.q_starts = starts_.data();
    batch.kv_lens = kv_lens_.data();
    return batch;
  }

 private:
  const DecoderStep& step_;
  std::vector<int64_t> tokens_, rows_;
  std::vector<int32_t> starts_, kv_lens_;
};

}  // namespace rhizome
