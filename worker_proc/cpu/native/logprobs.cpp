#include "logprobs.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "bf16.h"
#include "parallel.h"

namespace rhizome {
namespace {

constexpr int64_t kBlock = 128;          // tokens whose largest logit is kept
constexpr int64_t kPiece = 32 * kBlock;  // tokens that lie in the L1 cache while they are added up
constexpr int kChains = 4;               // of additions, for the sake of latency

struct Entry {
  float logit;
  int64_t id;
};

inline bool comes_first(const Entry& a, const Entry& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

inline floats load_tail(const float* from, int count) {
  float part[kLanes];
  std::fill_n(part, kLanes, -__builtin_inff());
  std::copy_n(from, count, part);
  return load(part);
}

// The sum of e**(x - shift), NaN with a NaN among them.
float sum_of_powers(const float* from, int64_t count, float shift) {
  floats sums[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= count; i += kChains * kLanes)
    for (int j = 0; j < kChains; ++j) sums[j] += exp(load(from + i + j * kLanes) - shift);
  for (; i < count; i += kLanes)
    sums[0] += exp(load_tail(from + i, static_cast<int>(std::min<int64_t>(kLanes, count - i))) - shift);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

int64_t count_above(const float* from, int64_t count, float limit) {
  ints found = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) found -= (ints)(load(from + i) > limit);
  int64_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += found[lane];
  for (; i < count; ++i) total += from[i] > limit;
  return total;
}

// A row of logits, read from memory once: by pieces whose powers are added up in the L1 cache, relative to the largest
// logit so far. What else is asked for is in few blocks, which their largest logits tell.
class Row {
 public:
  void read(const float* logits, int64_t vocab) {
    logits_ = logits;
    vocab_ = vocab;
    blocks_ = (vocab + kBlock - 1) / kBlock;
    highest_.resize(blocks_);
    best_ = -__builtin_inff();
    double total = 0.0;
    for (int64_t begin = 0; begin < vocab; begin += kPiece) {
      const int64_t end = std::min(vocab, begin + kPiece);
      const float before = best_;
      for (int64_t block = begin / kBlock; block * kBlock < end; ++block) {
        highest_[block] = highest_of(logits + block * kBlock, length(block));
        best_ = std::max(best_, highest_[block]);
      }
      if (best_ != before) total *= std::exp(double{before} - double{best_});
      total += sum_of_powers(logits + begin, end - begin, std::isinf(best_) ? 0.0f : best_);
    }
    is_distribution_ = !std::isinf(best_) && !std::isnan(total);
    log_sum_ = std::log(total);
  }

  bool is_distribution() const { return is_distribution_; }

  float logprob(float logit) const { return static_cast<float>(double{logit} - best_ - log_sum_); }

  int64_t rank(float logit) const {
    int64_t above = 0;
    for (int64_t block = 0; block < blocks_; ++block)
      if (highest_[block] > logit) above += count_above(logits_ + block * kBlock, length(block), logit);
    return above + 1;
  }

  // The `count` likeliest tokens, the first of equal ones first. As many blocks have a logit that reaches the
  // `count`-th of the blocks' largest.
  const Entry* likeliest(int64_t count) {
    float least = -__builtin_inff();
    if (count < blocks_) {
      order_ = highest_;
      std::nth_element(order_.begin(), order_.begin() + (count - 1), order_.end(), std::greater<>());
      least = order_[count - 1];
    }
    found_.clear();
    for (int64_t block = 0; block < blocks_; ++block) {
      if (highest_[block] < least) continue;
      for (int64_t id = block * kBlock; id < block * kBlock + length(block); ++id)
        if (logits_[id] >= least) found_.push_back({logits_[id], id});
    }
    std::partial_sort(found_.begin(), found_.begin() + count, found_.end(), comes_first);
    return found_.data();
  }

 private:
  int64_t length(int64_t block) const { return std::min(kBlock, vocab_ - block * kBlock); }

  const float* logits_ = nullptr;
  int64_t vocab_ = 0, blocks_ = 0;
  bool is_distribution_ = false;
  float best_ = 0.0f;
  double log_sum_ = 0.0;  // of e**(logit - best)
  std::vector<float> highest_, order_;
  std::vector<Entry> found_;
};

void score_one(const ScoreBatch& batch, int64_t r) {
  static thread_local Row row;
  const float* const logits = batch.logits + r * batch.logits_stride;
  int64_t* const ids = batch.top_ids + r * batch.most;
  float* const values = batch.top_values + r * batch.most;
  row.read(logits, batch.vocab);
  if (!row.is_distribution()) {
    batch.own[r] = __builtin_nanf("");
    batch.ranks[r] = 1;
    for (int64_t i = 0; i < batch.most; ++i) ids[i] = i, values[i] = __builtin_nanf("");
    return;
  }
  const float own = logits[batch.tokens[r]];
  batch.own[r] = row.logprob(own);
  batch.ranks[r] = row.rank(own);
  if (!batch.most) return;
  const Entry* const best = row.likeliest(batch.most);
  for (int64_t i = 0; i < batch.most; ++i) ids[i] = best[i].id, values[i] = row.logprob(best[i].logit);
}

}  // namespace
}  // namespace rhizome

using namespace rhizome;

void rhizome_score(const ScoreBatch* batch) {
  parallel_for(batch->rows, [&](int64_t r, int) { score_one(*batch, r); });
}
