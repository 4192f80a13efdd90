// The attention kernel for any CPU: float32 arithmetic, on float32 or bfloat16 data.
#pragma once

#include "attention_kernel.h"
#include "kv_int8.h"
#include "vector.h"

namespace rhizome {

template <class Element>
class VectorKernel {
 public:
  VectorKernel(const AttentionBatch& batch, char* scratch)
      : k_dim_(batch.k_dim), v_dim_(batch.v_dim), k_width_(round_up(k_dim_, kPad)), v_width_(v_stride(batch)) {
    scores_ = reinterpret_cast<float*>(scratch);
    k_ = scores_ + kTile * kAttentionBlock;
    v_ = k_ + kAttentionBlock * k_width_;
  }

  static int v_stride(const AttentionBatch& batch) { return round_up(batch.v_dim, kPad); }

  static int64_t scratch_bytes(const AttentionBatch& batch) {
    const int64_t k_width = round_up(batch.k_dim, kPad);
    return 4 * (kTile * kAttentionBlock + kAttentionBlock * (k_width + v_stride(batch)));
  }

  static int64_t query_bytes(const AttentionBatch& batch) { return int64_t{4} * kTile * round_up(batch.k_dim, kPad); }

  // Hold the tokens [first, end), at most kAttentionBlock, for the next calls of `attend`.
  void set_block(const KeySource& source, int first, int end, int /*num_queries*/) {
    first_ = first;
    if (source.k_scales != nullptr) return set_int8_block(source, first, end - first);
    source.walk(first, end - first, [&](int i, const char* k, const char* v) {
      k_rows_[i] = row(k, k_ + i * k_width_, k_dim_, k_width_);
      v_rows_[i] = row(v, v_ + i * v_width_, v_dim_, v_width_);
    });
  }

  void expect(const KeySource& /*source*/, int /*first*/, int /*count*/) {}

  // Put queries into `memory` (query_bytes) as `attend` needs them.
  void set_queries(const Tile& tile, int /*num_queries*/, char* memory) const {
    auto* q = reinterpret_cast<float*>(memory);
    for (int i = 0; i < tile.count; ++i) widen(tile.q[i], q + i * k_width_, k_dim_, k_width_);
    // Queries are taken by fours: the last ones are repeated.
    for (int i = tile.count; i < round_up(tile.count, 4); ++i)
      std::memcpy(q + i * k_width_, q + (tile.count - 1) * k_width_, 4 * k_width_);
  }

  // The queries of `set_queries` see the part [begin, end) of the block, which holds all that any of them sees of it.
  void attend(const Tile& tile, const char* queries, int begin, int end, const Scores& how, const State& state) {
    begin -= first_;
    end -= first_;
    for (int i = 0; i < tile.count; i += 4) dot_rows(reinterpret_cast<const float*>(queries), i, begin, end);
    for (int i = 0; i < tile.count; ++i) {
      const int first = std::max(begin, tile.first[i] - first_), stop = std::min(end, tile.end[i] - first_);
      // Over whole vectors at fixed places, so that sums have the same order whatever else is in the tile.
      softmax(i, begin & ~15, round_up(end, 16), first, std::max(first, stop), how, state);
    }
    for (int i = tile.count; i < round_up(tile.count, 4); ++i)
      std::memset(scores_ + i * kAttentionBlock, 0, 4 * kAttentionBlock);
    for (int i = 0; i < tile.count; i += 4) {
      int column = 0;
      for (; column + 4 * kLanes <= v_width_; column += 4 * kLanes) add_values<4>(i, column, begin, end, state);
      for (; column < v_width_; column += kLanes) add_values<1>(i, column, begin, end, state);
    }
  }

  // As `attend`, and adds the result to `total`, which may be `empty`. `now` is free memory.
  void extend(const Tile& tile, const char* queries, int begin, int end, const Scores& how, const State& total,
              const State& now, bool empty) {
    attend(tile, queries, begin, end, how, empty ? total : now);
    if (!empty) add_block(total, now, tile.count, v_width_);
  }

 private:
  static constexpr int kPad = 16;

  void set_int8_block(const KeySource& source, int first, int count) {
    source.walk(first, count, [&](int i, const char* k, const char* v) {
      k_rows_[i] = reinterpret_cast<const float*>(k);  // codes until they are widened
      v_rows_[i] = reinterpret_cast<const float*>(v);
    });
    source.walk_scales(first, count, [&](int i, float k_scale, float v_scale) {
      k_rows_[i] = widen_codes(k_rows_[i], k_scale, k_ + i * k_width_, k_dim_, k_width_);
      v_rows_[i] = widen_codes(v_rows_[i], v_scale, v_ + i * v_width_, v_dim_, v_width_);
    });
  }

  static const float* widen_codes(const void* from, float scale, float* to, int dim, int width) {
    const auto* codes = static_cast<const int8_t*>(from);
    for (int d = 0; d < dim; ++d) to[d] = dequantized<Element>(codes[d], scale);
    for (int d = dim; d < width; ++d) to[d] = 0;
    return to;
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

  static const float* row(const char* from, float* copy, int dim, int width) {
    if (sizeof(Element) == 4 && dim == width) return reinterpret_cast<const float*>(from);
    widen(from, copy, dim, width);
    return copy;
  }

  void dot_rows(const float* queries, int i, int begin, int end) {
    const float* q = queries + i * k_width_;
    float* scores = scores_ + i * kAttentionBlock;
    for (int t = begin; t < end; ++t) {
      const float* k = k_rows_[t];
      Floats sums[4] = {};
      for (int d = 0; d < k_width_; d += kLanes) {
        const Floats key = load(k + d);
        for (int j = 0; j < 4; ++j) sums[j] += load(q + j * k_width_ + d) * key;
      }
      for (int j = 0; j < 4; ++j) scores[j * kAttentionBlock + t] = reduce_add(sums[j]);
    }
  }

  // Scores of a row become weights; those outside of [first, stop) become 0.
  void softmax(int i, int begin, int end, int first, int stop, const Scores& how, const State& state) {
    float* scores = scores_ + i * kAttentionBlock;
    const float infinity = std::numeric_limits<float>::infinity();
    for (int t = begin; t < first; ++t) scores[t] = -infinity;
    for (int t = stop; t < end; ++t) scores[t] = -infinity;
    float highest = -infinity;
    for (int t = first; t < stop; ++t) {
      float score = scores[t] * how.scale;
      if (how.softcap > 0) score = how.softcap * std::tanh(score / how.softcap) * kLog2E;
      scores[t] = score;
      highest = std::max(highest, score);
    }
    state.shift[i] = highest;
    const float shift = finite(highest);
    Floats sums = {};
    for (int t = begin; t < end; t += kLanes) {
      const Floats weights = exp2(load(scores + t) - shift);
      store(scores + t, weights);
      sums += weights;
    }
    state.sum[i] = reduce_add(sums);
  }

  template <int kVectors>
  void add_values(int i, int column, int begin, int end, const State& state) {
    Floats sums[4][kVectors] = {};
    float* out = state.out + i * v_width_ + column;
    const float* weights = scores_ + i * kAttentionBlock;
    for (int t = begin; t < end; ++t) {
      const float* v = v_rows_[t] + column;
      for (int n = 0; n < kVectors; ++n) {
        const Floats value = load(v + n * kLanes);
        for (int j = 0; j < 4; ++j) sums[j][n] += weights[j * kAttentionBlock + t] * value;
      }
    }
    for (int j = 0; j < 4; ++j)
      for (int n = 0; n < kVectors; ++n) store(out + j * v_width_ + n * kLanes, sums[j][n]);
  }

  const int k_dim_, v_dim_, k_width_, v_width_;
  int first_ = 0;
  float *scores_, *k_, *v_;
  const float *k_rows_[kAttentionBlock], *v_rows_[kAttentionBlock];
};

}  // namespace rhizome
