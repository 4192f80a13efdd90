#include "sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "bf16.h"
#include "parallel.h"

namespace rhizome {
namespace {

constexpr float kUnit = 0x1p34f;  // the weight of the likeliest token
constexpr float kNever = -40.0f;  // e to this rounds to no weight at all
constexpr int64_t kBlock = 128;   // tokens that are added up first
constexpr int64_t kCandidates = 256;  // among which a nucleus is looked for first
constexpr size_t kMostSorted = 4096;
constexpr uint32_t kNear = 1 << 20;   // an eighth of an octave
constexpr float kNothing = 25.0f;     // logits so many temperatures below the largest weigh nothing: e**-25 < 2**-36

typedef float Part __attribute__((vector_size(2 * kLanes), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(4 * kLanes)));

// Philox 4x32-10 (Salmon et al., SC 2011), as in worker_proc/random.py.
double uniform(uint64_t seed, uint64_t position) {
  uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round, key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u) {
    const uint64_t first = uint64_t{counter[0]} * 0xD2511F53u, second = uint64_t{counter[2]} * 0xCD9E8D57u;
    const uint32_t next[4] = {static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(second),
                              static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(first)};
    std::copy_n(next, 4, counter);
  }
  return static_cast<double>(uint64_t{counter[0]} << 21 | counter[1] >> 11) * 0x1p-53;
}

// To the nearest whole number, halves to even; NaN and less than 0 become 0.
inline floats rounded(floats x) {
  const floats small = (x + 0x1p23f) - 0x1p23f;
  return select(x > 0.0f, select(x < 0x1p23f, small, x), floats{});
}

inline floats weight(floats logits, float best, float temperature) {
  const floats scaled = (logits - best) / temperature;
  return rounded(exp(select(scaled > kNever, scaled, splat(kNever))) * kUnit);
}

// The weights of one row, in blocks of kBlock tokens whose largest and sum are known. Sums are of whole numbers below
// 2**53: exact in any order.
class Row {
 public:
  void fill(const float* logits, int64_t vocab, float best, float temperature) {
    vocab_ = vocab;
    blocks_ = (vocab + kBlock - 1) / kBlock;
    weights_.resize(blocks_ * kBlock);
    highest_.resize(blocks_);
    edge_ = 0.0f;
    const float least = best - kNothing * temperature;  // many blocks of a sure model have nothing above it
    for (int64_t block = 0; block < blocks_; ++block) {
      const int64_t begin = block * kBlock, end = std::min(vocab, begin + kBlock);
      float* const to = weights_.data() + begin;
      if (end - begin < kBlock) std::fill_n(to, kBlock, 0.0f);
      if (highest_of(logits + begin, end - begin) < least) {
        std::fill_n(to, kBlock, 0.0f);
        highest_[block] = 0.0f;
        continue;
      }
      const int64_t whole = (end - begin) / kLanes * kLanes;
      const int tail = static_cast<int>(end - begin - whole);
      floats top = {};
      for (int64_t i = 0; i < whole; i += kLanes) {
        const floats value = weight(load(logits + begin + i), best, temperature);
        top = select(value > top, value, top);
        store(to + i, value);
      }
      if (tail) {
        const floats value = weight(load_some(logits + end - tail, tail), best, temperature);
        store_some(to + whole, value, tail);
        for (int i = 0; i < tail; ++i) top[0] = std::max(top[0], value[i]);
      }
      highest_[block] = highest(top);
    }
  }

  const float* weights() const { return weights_.data(); }

  // Excludes all but the `count` largest weights, and those that are as large.
  void keep_largest(int64_t count) {
    find_candidates(count);
    if (static_cast<int64_t>(found_.size()) < count) return;  // others are 0
    std::nth_element(found_.begin(), found_.begin() + (count - 1), found_.end(), std::greater<>());
    raise(found_[count - 1]);
  }

  // Excludes what is not in the smallest set of largest weights that add up to `share` of all that are left.
  void keep_share(double share) {
    const double wanted = share * sum_from(edge_);
    if (kCandidates < blocks_) {
      find_candidates(kCandidates);
      if (std::accumulate(found_.begin(), found_.end(), 0.0) >= wanted && found_.size() <= kMostSorted)
        return raise(border(0.0, wanted));
    }
    // Many are needed: enough from `low` on, not from `high` on, nearer and nearer.
    uint32_t low = std::bit_cast<uint32_t>(std::max(edge_, 1.0f)), high = std::bit_cast<uint32_t>(kUnit) + 1;
    while (high - low > kNear) {
      const uint32_t middle = low + (high - low) / 2;
      (sum_from(std::bit_cast<float>(middle)) >= wanted ? low : high) = middle;
    }
    const float beyond = std::bit_cast<float>(high);
    find(std::bit_cast<float>(low), beyond);
    raise(border(sum_from(beyond), wanted));
  }

  // Excludes weights below `least`.
  void raise(float least) { edge_ = std::max(edge_, least); }

  // The token at `number` in [0, 1) of the cumulative distribution, `otherwise` if there is none.
  int64_t draw(double number, int64_t otherwise) {
    sums_.resize(blocks_);
    double total = 0.0;
    for (int64_t block = 0; block < blocks_; ++block) sums_[block] = total += sum_of(block, edge_);
    const double target = number * total;
    const int64_t block = std::upper_bound(sums_.begin(), sums_.end(), target) - sums_.begin();
    if (block == blocks_) return otherwise;
    double left = target - (block ? sums_[block - 1] : 0.0);
    for (int64_t token = block * kBlock; token < std::min(vocab_, (block + 1) * kBlock); ++token) {
      const float one = weights_[token] >= edge_ ? weights_[token] : 0.0f;
      if (left < one) return token;
      left -= one;  // exact: whole numbers, and a fraction that float64 holds beside them
    }
    return otherwise;
  }

 private:
  // What a block has at or above `edge`, which is not below 0.
  double sum_of(int64_t block, float edge) const {
    if (highest_[block] < edge || highest_[block] == 0.0f) return 0.0;
    Doubles sums[2] = {};
    const double least = edge;
    const float* const from = weights_.data() + block * kBlock;
    for (int64_t i = 0; i < kBlock; i += kLanes)
      for (int half = 0; half < 2; ++half) {
        const Part part = *reinterpret_cast<const Part*>(from + i + half * kLanes / 2);
        const Doubles some = __builtin_convertvector(part, Doubles);
        sums[half] += some >= least ? some : Doubles{};
      }
    double total = 0.0;
    for (int i = 0; i < kLanes / 2; ++i) total += sums[0][i] + sums[1][i];
    return total;
  }

  double sum_from(float edge) const {
    double total = 0.0;
    for (int64_t block = 0; block < blocks_; ++block) total += sum_of(block, edge);
    return total;
  }

  // Weights above 0 and not excluded, the `count` largest among them. That many blocks have one at or above the
  // `count`-th of the blocks' largest.
  void find_candidates(int64_t count) {
    float least = std::max(edge_, 1.0f);
    if (count < blocks_) {
      order_ = highest_;
      std::nth_element(order_.begin(), order_.begin() + (count - 1), order_.end(), std::greater<>());
      least = std::max(least, order_[count - 1]);
    }
    find(least, __builtin_inff());
  }

  // Weights in [least, high).
  void find(float least, float high) {
    found_.clear();
    for (int64_t block = 0; block < blocks_; ++block) {
      if (highest_[block] < least) continue;
      for (int64_t i = block * kBlock; i < (block + 1) * kBlock; ++i)
        if (weights_[i] >= least && weights_[i] < high) found_.push_back(weights_[i]);
    }
  }

  // The first of the found weights, from the largest on, with which they add up to `wanted`, beside `sum`.
  float border(double sum, double wanted) {
    std::sort(found_.begin(), found_.end(), std::greater<>());
    for (const float one : found_)
      if ((sum += one) >= wanted) return one;
    return 0.0f;
  }

  int64_t vocab_ = 0, blocks_ = 0;
  float edge_ = 0.0f;  // what is below is excluded
  std::vector<float> weights_, highest_, order_, found_;
  std::vector<double> sums_;
};

Row& row_of_thread() {
  static thread_local Row row;
  return row;
}

void draw_one(const DrawBatch& batch, int64_t r) {
  const int64_t row = batch.index[r], slot = batch.index[batch.index_stride + r];
  const uint64_t position = static_cast<uint64_t>(batch.index[2 * batch.index_stride + r]);
  const RowFilters filters = filters_of(batch.params + slot, batch.params_stride);
  Row& weights = row_of_thread();
  weights.fill(batch.logits + row * batch.logits_stride, batch.vocab, batch.best[row], filters.temperature);
  if (filters.top_k > 0 && filters.top_k < batch.vocab) weights.keep_largest(filters.top_k);
  if (filters.top_p < 1.0) weights.keep_share(filters.top_p);
  if (filters.min_p > 0.0) weights.raise(static_cast<float>(filters.min_p * static_cast<double>(kUnit)));
  batch.tokens[row] = weights.draw(uniform(static_cast<uint64_t>(batch.seeds[slot]), position), batch.tokens[row]);
}

void best_of(const float* logits, int64_t vocab, float* best, int64_t* index) {
  constexpr int64_t kPiece = 4096;
  *best = -__builtin_inff();
  int64_t piece = 0;
  for (int64_t at = 0; at < vocab; at += kPiece) {
    const float highest = highest_of(logits + at, std::min(kPiece, vocab - at));
    if (highest > *best) *best = highest, piece = at;
  }
  *index = piece;
  for (int64_t i = piece; i < std::min(vocab, piece + kPiece); ++i)
    if (logits[i] == *best) {
      *index = i;
      return;
    }
}

}  // namespace

float least_kept(const RowFilters& filters, float last, float low, float high) {
  if (!(filters.temperature > 0)) return low;
  const double temperature = filters.temperature, unit = kUnit;
  // For what rounding does to differences of logits, and to their powers.
  const double slack = 0x1p-21 * (std::abs(low) + std::abs(high) + std::abs(last)) + 0x1p-16 * temperature;
  double least = low - kNothing * temperature;
  if (filters.top_k > 0) {
    // Weights that are rounded to the same number as the last one's are kept with it.
    const double weight = unit * std::exp((static_cast<double>(last) - high) / temperature);
    least = std::max(least, last - temperature * (weight > 4 ? 2 / weight : 1.2));
  }
  if (filters.min_p > 0 && filters.top_p >= 1) {
    const double weight = filters.min_p * unit - 1;  // which is rounded to less
    if (weight > 0.25) least = std::max(least, low + temperature * std::log(weight / unit));
  }
  return static_cast<float>(least - slack);
}

}  // namespace rhizome

using namespace rhizome;

void rhizome_best(const float* logits, int64_t stride, int64_t rows, int64_t vocab, float* best, int64_t* index) {
  parallel_for(rows, [&](int64_t row, int) { best_of(logits + row * stride, vocab, best + row, index + row); });
}

void rhizome_draw(const DrawBatch* batch) {
  parallel_for(batch->rows, [&](int64_t r, int) { draw_one(*batch, r); });
}

void rhizome_draw_weights(const float* logits, int64_t vocab, float best, float temperature, float* weights) {
  Row& row = row_of_thread();
  row.fill(logits, vocab, best, temperature);
  std::copy_n(row.weights(), vocab, weights);
}

double rhizome_draw_uniform(int64_t seed, int64_t position) {
  return uniform(static_cast<uint64_t>(seed), static_cast<uint64_t>(position));
}
