// The attention kernel for any CPU: float32 arithmetic, on float32 or bfloat16 data.
//
// With up to four queries, decodes of one row, numbers are widened in registers as they come from the pages, which are
// fetched ahead of their time: the processor's own prefetching ends at the end of every page of the cache. With more, K
// and V of a block are widened once.
#pragma once

#include <utility>

#include "attention_kernel.h"
#include "kv_int8.h"
#include "registers.h"
#include "vector.h"

namespace rhizome {

template <class Element>
class VectorKernel {
 public:
  VectorKernel(const AttentionBatch& batch, char* scratch)
      : k_dim_(batch.k_dim), v_dim_(batch.v_dim), k_width_(round_up(k_dim_, kPad)), v_width_(v_stride(batch)) {
    scores_ = reinterpret_cast<float*>(scratch);
    k_ = scores_ + kTile * kScoreStride;
    v_ = k_ + kAttentionBlock * k_width_;
  }

  static int v_stride(const AttentionBatch& batch) { return round_up(batch.v_dim, kPad); }

  static int64_t scratch_bytes(const AttentionBatch& batch) {
    const int64_t k_width = round_up(batch.k_dim, kPad);
    return 4 * (kTile * kScoreStride + kAttentionBlock * (k_width + v_stride(batch)));
  }

  static int64_t query_bytes(const AttentionBatch& batch) { return int64_t{4} * kTile * round_up(batch.k_dim, kPad); }

  // Hold the tokens [first, end), at most kAttentionBlock, for the next calls of `attend`, with `num_queries` in all.
  void set_block(const KeySource& source, int first, int end, int num_queries) {
    first_ = first;
    count_ = end - first;
    source.walk(first, count_, [&](int i, const char* k, const char* v) {
      rows_[i] = k;
      rows_[count_ + i] = v;
    });
    num_rows_ = 2 * count_;
    const bool whole = k_dim_ == k_width_ && v_dim_ == v_width_;
    in_place_ = source.k_scales == nullptr && whole && (num_queries <= kTogether || sizeof(Element) == 4);
    if (source.k_scales != nullptr) {
      source.walk_scales(first, count_, [&](int i, float k_scale, float v_scale) {
        fetch_row(std::min(i + kRowsAhead, count_ - 1), k_dim_);
        fetch_row(count_ + std::min(i + kRowsAhead, count_ - 1), v_dim_);
        widen_codes(rows_[i], k_scale, k_ + i * k_width_, k_dim_, k_width_);
        widen_codes(rows_[count_ + i], v_scale, v_ + i * v_width_, v_dim_, v_width_);
      });
    } else if (!in_place_) {
      for (int i = 0; i < count_; ++i) {
        widen(rows_[i], k_ + i * k_width_, k_dim_, k_width_);
        widen(rows_[count_ + i], v_ + i * v_width_, v_dim_, v_width_);
      }
    }
    if (!in_place_ || num_queries > kTogether) num_rows_ = 0;  // nothing is fetched any more: it will be in a cache
  }

  // The tokens first .. first + count - 1 of `source`, at most kAttentionBlock, come after this block.
  void expect(const KeySource& source, int first, int count) {
    if (num_rows_ == 0) return;
    source.walk(first, std::min(count, kRowsAhead), [&](int, const char* k, const char*) { rows_[num_rows_++] = k; });
  }

  // Put queries into `memory` (query_bytes) as `attend` needs them.
  void set_queries(const Tile& tile, int /*num_queries*/, char* memory) const {
    auto* q = reinterpret_cast<float*>(memory);
    for (int i = 0; i < tile.count; ++i) widen(tile.q[i], q + i * k_width_, k_dim_, k_width_);
  }

  // The queries of `set_queries` see the part [begin, end) of the block, which holds all that any of them sees of it.
  void attend(const Tile& tile, const char* queries, int begin, int end, const Scores& how, const State& state) {
    begin = (begin - first_) & ~15;
    end -= first_;
    const auto* q = reinterpret_cast<const float*>(queries);
    by_fours(tile.count, [&](int i, auto count) {
      if (in_place_)
        dot_rows<count(), true>(q, i, begin, end);
      else
        dot_rows<count(), false>(q, i, begin, end);
    });
    for (int i = 0; i < tile.count; ++i) {
      const int first = std::max(begin, tile.first[i] - first_), stop = std::min(end, tile.end[i] - first_);
      // Over whole vectors at fixed places, so that sums have the same order whatever else is in the tile.
      softmax(i, begin, round_up(end, 16), first, std::max(first, stop), how, state);
    }
    by_fours(tile.count, [&](int i, auto count) {
      constexpr int kMost = kHeldSums / (count() == 3 ? 4 : count());
      if (in_place_)
        add_values<count(), std::min(kMost, 8), true>(i, 0, begin, end, state);
      else
        add_values<count(), std::min(kMost, 8), false>(i, 0, begin, end, state);
    });
  }

  // As `attend`, and adds the result to `total`, which may be `empty`. `now` is free memory.
  void extend(const Tile& tile, const char* queries, int begin, int end, const Scores& how, const State& total,
              const State& now, bool empty) {
    attend(tile, queries, begin, end, how, empty ? total : now);
    if (!empty) add_block(total, now, tile.count, v_width_);
  }

 private:
  static constexpr int kPad = 16, kSize = sizeof(Element);
  static constexpr int kTogether = 4;    // queries that go by together
  static constexpr int kRowsAhead = 32;  // of K and V that are fetched ahead
  static constexpr int kScoreStride = kAttentionBlock + 16;  // rows a cache line apart from a power of two share no sets

  // Calls visit(i, count) for queries [i, i + count) of all `queries`; the second is a constant of at most kTogether.
  template <class Visit>
  static void by_fours(int queries, Visit&& visit) {
    for (int i = 0; i < queries; i += kTogether)
      with_count(std::min(kTogether, queries - i), [&](auto count) { visit(i, count); });
  }

  static void widen_codes(const char* from, float scale, float* to, int dim, int width) {
    const auto* codes = reinterpret_cast<const int8_t*>(from);
    for (int d = 0; d < dim; ++d) to[d] = dequantized<Element>(codes[d], scale);
    for (int d = dim; d < width; ++d) to[d] = 0;
  }

  // `from` as floats, padded with zeros to `width`.
  static void widen(const char* from, float* to, int dim, int width) {
    const auto* numbers = reinterpret_cast<const Element*>(from);
    int i = 0;
    for (; i + kLanes <= dim; i += kLanes) store(to + i, load(numbers + i));
    for (; i < dim; ++i) {
      if constexpr (sizeof(Element) == 4)
        to[i] = numbers[i];
      else
        to[i] = to_float(numbers[i]);
    }
    for (; i < width; ++i) to[i] = 0;
  }

  // Row `i` of K, V and what is expected, in the order of their use. Always inlined: g++ 12 takes a function that only
  // fetches for one without effects, and leaves out its calls.
  __attribute__((always_inline)) void fetch_row(int i, int bytes) const {
    if (i >= num_rows_) return;
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(rows_[i] + at, 0, 2);
  }

  // K or V of a token of the block.
  template <bool kInPlace>
  auto key(int t) const {
    if constexpr (kInPlace)
      return reinterpret_cast<const Element*>(rows_[t]);
    else
      return static_cast<const float*>(k_ + t * k_width_);
  }
  template <bool kInPlace>
  auto value(int t) const {
    if constexpr (kInPlace)
      return reinterpret_cast<const Element*>(rows_[count_ + t]);
    else
      return static_cast<const float*>(v_ + t * v_width_);
  }

  // Scores of queries [i, i + kQueries): a few tokens at a time, so that many sums are under way, and all of these are
  // added up over their lanes together. What is behind `end`, up to the next 16 tokens, becomes anything.
  template <int kQueries, bool kInPlace>
  void dot_rows(const float* queries, int i, int begin, int end) {
    constexpr int kTokens = kHeldSums / (kQueries == 3 ? 4 : kQueries);
    const float* const q = queries + i * k_width_;
    for (int t = begin; t < end; t += kTokens) {
      decltype(key<kInPlace>(0)) k[kTokens];
      for (int n = 0; n < kTokens; ++n) k[n] = key<kInPlace>(std::min(t + n, count_ - 1));
      if constexpr (kInPlace)
        for (int n = 0; n < kTokens; ++n) fetch_row(t + n + kRowsAhead, k_dim_ * kSize);
      Floats sums[kHeldSums] = {};
      for (int d = 0; d < k_width_; d += kLanes)
        for (int n = 0; n < kTokens; ++n) {
          const Floats numbers = load(k[n] + d);
          for (int j = 0; j < kQueries; ++j) sums[j * kTokens + n] += load(q + j * k_width_ + d) * numbers;
        }
      float scores[kHeldSums];
      for (int n = 0; n < kHeldSums; n += kLanes) store(scores + n, reduce_each(sums + n));
      for (int j = 0; j < kQueries; ++j)
        std::memcpy(scores_ + (i + j) * kScoreStride + t, scores + j * kTokens, kTokens * sizeof(float));
    }
  }

  // Scores of a row become weights; those outside of [first, stop) become 0.
  void softmax(int i, int begin, int end, int first, int stop, const Scores& how, const State& state) {
    float* const scores = scores_ + i * kScoreStride;
    const float infinity = std::numeric_limits<float>::infinity();
    for (int t = begin; t < end; t += kLanes) {
      Floats score = load(scores + t) * how.scale;
      if (how.softcap > 0) score = how.softcap * tanh(score / how.softcap) * kLog2E;
      store(scores + t, score);
    }
    for (int t = begin; t < first; ++t) scores[t] = -infinity;
    for (int t = stop; t < end; ++t) scores[t] = -infinity;
    Floats highest = broadcast(-infinity), sums = {};
    for (int t = begin; t < end; t += kLanes) highest = max(load(scores + t), highest);
    state.shift[i] = reduce_max(highest);
    const float shift = finite(state.shift[i]);
    for (int t = begin; t < end; t += kLanes) {
      const Floats weights = exp2(load(scores + t) - shift);
      store(scores + t, weights);
      sums += weights;
    }
    state.sum[i] = reduce_add(sums);
  }

  // Results of queries [i, i + kQueries) from `column` on, kVectors vectors at a time.
  template <int kQueries, int kVectors, bool kInPlace>
  void add_values(int i, int column, int begin, int end, const State& state) {
    for (; column + kVectors * kLanes <= v_width_; column += kVectors * kLanes) {
      Floats sums[kQueries][kVectors] = {};
      const float* const weights = scores_ + i * kScoreStride;
      for (int t = begin; t < end; ++t) {
        if constexpr (kInPlace)
          if (column == 0) fetch_row(count_ + t + kRowsAhead, v_dim_ * kSize);
        const auto* const v = value<kInPlace>(t) + column;
        for (int n = 0; n < kVectors; ++n) {
          const Floats numbers = load(v + n * kLanes);
          for (int j = 0; j < kQueries; ++j) sums[j][n] += weights[j * kScoreStride + t] * numbers;
        }
      }
      for (int j = 0; j < kQueries; ++j)
        for (int n = 0; n < kVectors; ++n) store(state.out + (i + j) * v_width_ + column + n * kLanes, sums[j][n]);
    }
    if constexpr (kVectors > 1) add_values<kQueries, kVectors / 2, kInPlace>(i, column, begin, end, state);
  }

  const int k_dim_, v_dim_, k_width_, v_width_;
  bool in_place_ = false;  // K and V are read where they are
  int first_ = 0, count_ = 0, num_rows_ = 0;
  float *scores_, *k_, *v_;
  const char* rows_[2 * kAttentionBlock + kRowsAhead];  // K, then V, then what is expected
};

}  // namespace rhizome
