// The attention kernel for bfloat16 with AVX512's dot products (VDPBF16PS).
//
// A score is one chain of fused sums over the pairs of numbers of a head, a value one over the pairs of tokens of a block,
// each in ascending order, whichever way K and V come:
// with many queries both are packed once (K: pairs of numbers of 32 tokens side by side, V: pairs of tokens of 32 numbers),
// and up to twelve queries go by together. With up to four queries, decodes of one row, both are turned over in registers
// (and made of their codes, where the cache is in int8), and K and V of the pages are fetched ahead of their time: the
// processor's own prefetching ends at the end of every page of the cache, as the next one may be anywhere.
#pragma once

#if defined(__AVX512BF16__)

#include <utility>

#include "attention_kernel.h"
#include "attention_vectors.h"
#include "dot_sums.h"

namespace rhizome {

// out[row * out_stride + 0 .. 31] = sums over `pairs` pairs of x[row][pair] . from[pair][32], for kRows rows.
template <int kRows>
__attribute__((noinline)) void pair_dots(const uint16_t* x, int64_t x_stride, const uint16_t* from, int pairs, float* out,
                                         int64_t out_stride) {
  DotSums<kRows> sums;
  for (; pairs > 0; --pairs, x += 2, from += 64)
    sums.add(x, x_stride, _mm512_load_si512(from), _mm512_load_si512(from + 32));
  sums.store(out, out_stride);
}

constexpr int kMostTogether = 12;  // rows, whose sums are 24 of the 32 registers

template <int... kCounts>
inline void pair_dots_of(int rows, const uint16_t* x, int64_t x_stride, const uint16_t* from, int pairs, float* out,
                         int64_t out_stride, std::integer_sequence<int, kCounts...>) {
  using Dots = void (*)(const uint16_t*, int64_t, const uint16_t*, int, float*, int64_t);
  static constexpr Dots kDots[] = {pair_dots<kCounts + 1>...};
  kDots[rows - 1](x, x_stride, from, pairs, out, out_stride);
}

// As `pair_dots`, for any number of rows, shared out evenly. The bits of a row do not depend on it.
inline void all_dots(int rows, const uint16_t* x, int64_t x_stride, const uint16_t* from, int pairs, float* out,
                     int64_t out_stride) {
  for (int passes = rows <= kMostTogether ? 1 : (rows + 7) / 8; passes > 0; --passes) {
    const int now = (rows + passes - 1) / passes;
    pair_dots_of(now, x, x_stride, from, pairs, out, out_stride, std::make_integer_sequence<int, kMostTogether>());
    x += now * x_stride, out += now * out_stride, rows -= now;
  }
}

class DotKernel {
 public:
  DotKernel(const AttentionBatch& batch, char* scratch)
      : k_dim_(batch.k_dim), v_dim_(batch.v_dim), k_width_(round_up(k_dim_, 32)), v_width_(v_stride(batch)),
        rows_per_step_((16 * 32 + k_width_ - 1) / k_width_) {
    k_ = reinterpret_cast<uint16_t*>(scratch);
    v_ = k_ + kAttentionBlock * k_width_;
    weights_ = v_ + kAttentionBlock * v_width_;
    scores_ = reinterpret_cast<float*>(weights_ + kTile * kWeightStride);
    widened_ = reinterpret_cast<uint16_t*>(scores_ + kTile * kScoreStride);
  }

  static int v_stride(const AttentionBatch& batch) { return round_up(batch.v_dim, 32); }

  static int64_t scratch_bytes(const AttentionBatch& batch) {
    const int64_t width = round_up(batch.k_dim, 32) + v_stride(batch), widened = batch.kv_int8 ? kAttentionBlock * width : 0;
    return 2 * (kAttentionBlock * width + kTile * kWeightStride + widened) + 4 * kTile * kScoreStride;
  }

  static int64_t query_bytes(const AttentionBatch& batch) { return int64_t{2} * kTile * round_up(batch.k_dim, 32); }

  // Hold the tokens [first, end), at most kAttentionBlock, for the next calls of `attend`, with `num_queries` in all.
  void set_block(const KeySource& source, int first, int end, int num_queries) {
    first_ = first;
    count_ = end - first;
    few_ = num_queries <= kFew;
    const char** const v_rows = rows_ + count_;
    source.walk(first, count_, [&](int i, const char* k, const char* v) {
      rows_[i] = k;
      v_rows[i] = v;
    });
    std::fill_n(rows_ + 2 * count_, kRowsAhead, v_rows[count_ - 1]);  // K is read in whole groups, beyond the block
    num_rows_ = 2 * count_;
    codes_ = source.k_scales != nullptr;
    line_bytes_ = (codes_ ? 1 : 2) * std::max(k_dim_, v_dim_);
    if (codes_) {
      source.walk_scales(first, count_, [&](int i, float k_scale, float v_scale) {
        scales_[i] = k_scale;
        scales_[count_ + i] = v_scale;
      });
      std::fill_n(scales_ + 2 * count_, 16, 0.0f);
    }
    if (few_) return;
    if (codes_) widen_codes();
    for (int t = 0; t < count_; t += 32) pack_keys(t, std::min(32, count_ - t));
    for (int t = 0; t < count_; t += 2) pack_values(t);
  }

  // The tokens first .. first + count - 1 of `source`, at most kAttentionBlock, come after this block.
  void expect(const KeySource& source, int first, int count) {
    if (!few_) return;
    source.walk(first, std::min(count, kRowsAhead), [&](int, const char* k, const char*) { rows_[num_rows_++] = k; });
  }

  // Put queries into `memory` (query_bytes) as `attend` needs them.
  void set_queries(const Tile& tile, int /*num_queries*/, char* memory) const {
    auto* q = reinterpret_cast<uint16_t*>(memory);
    for (int i = 0; i < tile.count; ++i, q += k_width_)
      for (int d = 0; d < k_width_; d += 32) _mm512_storeu_si512(q + d, load_numbers(tile.q[i], d, k_dim_));
  }

  // The queries of `set_queries` see the part [begin, end) of the block, which holds all that any of them sees of it.
  void attend(const Tile& tile, const char* queries, int begin, int end, const Scores& how, const State& state) {
    const auto* q = reinterpret_cast<const uint16_t*>(queries);
    begin = (begin - first_) & ~31;
    end = round_up(end - first_, 32);
    if (few_)
      with_count(tile.count, [&](auto count) {
        if (k_dim_ % 32 != 0)
          codes_ ? score_few<count(), false, true>(q, begin, end) : score_few<count(), false, false>(q, begin, end);
        else
          codes_ ? score_few<count(), true, true>(q, begin, end) : score_few<count(), true, false>(q, begin, end);
      });
    else
      for (int t = begin; t < end; t += 32)
        all_dots(tile.count, q, k_width_, k_ + t * k_width_, k_width_ / 2, scores_ + t, kScoreStride);
    for (int i = 0; i < tile.count; ++i) {
      const int first = std::max(begin, tile.first[i] - first_), stop = std::min(end, tile.end[i] - first_);
      if (how.softcap > 0)
        squash(scores_ + i * kScoreStride + begin, end - begin, how.scale / how.softcap, how.softcap * kLog2E);
      softmax(i, begin, end, first, stop, how.softcap > 0 ? 1.0f : how.scale, state);
    }
    end = std::min(end, count_);
    if (few_)
      with_count(tile.count, [&](auto count) {
        codes_ ? add_values<count(), true>(begin, end, state) : add_values<count(), false>(begin, end, state);
      });
    else
      for (int d = 0; d < v_width_; d += 32)
        all_dots(tile.count, weights_ + begin, kWeightStride, v_ + d * kAttentionBlock + begin * 32,
                 (end - begin + 1) / 2, state.out + d, v_width_);
  }

  // As `attend`, and adds the result to `total`, which may be `empty`. `now` is free memory.
  void extend(const Tile& tile, const char* queries, int begin, int end, const Scores& how, const State& total,
              const State& now, bool empty) {
    attend(tile, queries, begin, end, how, empty ? total : now);
    if (!empty) add_block(total, now, tile.count, v_width_);
  }

 private:
  static constexpr int kFew = 4;
  static constexpr int kRowsAhead = 32;  // of K and V that are fetched ahead
  static constexpr int kRowsAgain = 8;   // after so many others, they are once more
  // Rows of score and weight matrices are a cache line apart from a power of two, so that they share no cache sets.
  static constexpr int kScoreStride = kAttentionBlock + 16, kWeightStride = kAttentionBlock + 32;

  // Row `i` of K, V and what is expected, in the order of their use, into the L2 cache, and once more an earlier one, as
  // LinesAhead does. Always inlined: g++ 12 takes a function that only fetches for one without effects, and leaves out its calls.
  __attribute__((always_inline)) void fetch_row(int i) const {
    if (i < num_rows_) fetch_lines(rows_[i]);
    if (i >= kRowsAgain && i - kRowsAgain < num_rows_) fetch_lines(rows_[i - kRowsAgain]);
  }

  __attribute__((always_inline)) void fetch_lines(const char* row) const {
    _mm_prefetch(row, _MM_HINT_T1);
    if (line_bytes_ == 256) {  // the most frequent size
      _mm_prefetch(row + 64, _MM_HINT_T1);
      _mm_prefetch(row + 128, _MM_HINT_T1);
      _mm_prefetch(row + 192, _MM_HINT_T1);
      return;
    }
    for (int at = 64; at < line_bytes_; at += 64) _mm_prefetch(row + at, _MM_HINT_T1);
  }

  // Codes become rows of bfloat16, which stand in for those of the pages from here on.
  void widen_codes() {
    uint16_t* const v_widened = widened_ + kAttentionBlock * k_width_;
    for (int i = 0; i < count_; ++i) {
      fetch_row(std::min(i + kRowsAhead, count_ - 1));
      fetch_row(count_ + std::min(i + kRowsAhead, count_ - 1));
      uint16_t *const k_to = widened_ + i * k_width_, *const v_to = v_widened + i * v_width_;
      for (int d = 0; d < k_width_; d += 32) _mm512_storeu_si512(k_to + d, numbers<false, true>(i, d, k_dim_));
      for (int d = 0; d < v_width_; d += 32) _mm512_storeu_si512(v_to + d, numbers<false, true>(count_ + i, d, v_dim_));
      rows_[i] = reinterpret_cast<const char*>(k_to);
      rows_[count_ + i] = reinterpret_cast<const char*>(v_to);
    }
    num_rows_ = 0;  // nothing is fetched any more
  }

  // 32 numbers from `d` on of a row of K or V, a head of `dim`, all of which are there if kWhole.
  template <bool kWhole, bool kCodes>
  __attribute__((always_inline)) __m512i numbers(int row, int d, int dim) const {
    if constexpr (kCodes) return widen_numbers(rows_[row], d, kWhole ? d + 32 : dim, scales_[row]);
    return kWhole ? _mm512_loadu_si512(rows_[row] + 2 * d) : load_numbers(rows_[row], d, dim);
  }

  // The numbers d .. d + 31 of 16 tokens of K from `token` on become 16 pairs of numbers of all tokens. What is behind the
  // block is anything.
  template <bool kWhole, bool kCodes>
  void turn_keys(int token, int d, __m512i pairs[16]) const {
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) pairs[j] = numbers<kWhole, kCodes>(token + j, d, k_dim_);
    transpose(pairs);
  }

  // Tokens t .. t + 31 of K: [pairs of numbers][32 tokens][2].
  void pack_keys(int t, int count) {
    for (int half = 0; half < count; half += 16) {
      for (int j = 0; j < 16; ++j) fetch_row(t + half + kRowsAhead + j);
      for (int d = 0; d < k_width_; d += 32) {
        __m512i pairs[16];
        turn_keys<false, false>(t + half, d, pairs);
        uint16_t* to = k_ + t * k_width_ + d * 32 + half * 2;
        for (int j = 0; j < 16; ++j) _mm512_store_si512(to + 64 * j, pairs[j]);
      }
    }
  }

  // The numbers d .. d + 31 of tokens t and t + 1 of V (nothing, if that one is behind the block), side by side. kWhole: all
  // numbers and both tokens are there.
  template <bool kWhole, bool kCodes>
  void pair_values(int t, int d, __m512bh pairs[2]) const {
    const __m512i low = first_of_both(), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i even = numbers<kWhole, kCodes>(count_ + t, d, v_dim_);
    const bool both = kWhole || t + 1 < count_;
    const __m512i odd = both ? numbers<kWhole, kCodes>(count_ + t + 1, d, v_dim_) : _mm512_setzero_si512();
    pairs[0] = (__m512bh)_mm512_permutex2var_epi16(even, low, odd);
    pairs[1] = (__m512bh)_mm512_permutex2var_epi16(even, high, odd);
  }

  // Tokens t and t + 1 of V: [pairs of tokens][32 numbers][2] for every 32 numbers.
  void pack_values(int t) {
    fetch_row(count_ + t + kRowsAhead);
    fetch_row(count_ + t + kRowsAhead + 1);
    for (int d = 0; d < v_width_; d += 32) {
      __m512bh pairs[2];
      pair_values<false, false>(t, d, pairs);
      uint16_t* const to = v_ + d * kAttentionBlock + t * 32;
      _mm512_store_si512(to, (__m512i)pairs[0]);
      _mm512_store_si512(to + 32, (__m512i)pairs[1]);
    }
  }

  template <int kQueries, bool kWhole, bool kCodes>
  void score_few(const uint16_t* q, int begin, int end) {
    for (int t = begin; t < std::min(end, count_); t += 16) {
      __m512 sums[kQueries] = {};
      int ahead = t + kRowsAhead;
      for (int d = 0; d < k_width_; d += 32) {
        // a few rows at a time: many at once keep main memory from what is wanted sooner
        for (int i = 0; i < rows_per_step_; ++i) fetch_row(ahead++);
        __m512i pairs[16];
        turn_keys<kWhole, kCodes>(t, d, pairs);
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j)
#pragma GCC unroll 4
          for (int i = 0; i < kQueries; ++i)
            sums[i] = _mm512_dpbf16_ps(sums[i], pair_of(q + i * k_width_ + d + 2 * j), (__m512bh)pairs[j]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kQueries; ++i) _mm512_store_ps(scores_ + i * kScoreStride + t, sums[i]);
    }
  }

  // From number `d` on, kLines times 32 numbers at once where all are there: with four queries, four would not fit in the
  // registers.
  template <int kQueries, bool kCodes, int kLines = kQueries <= 2 ? 4 : 2>
  void add_values(int begin, int end, const State& state, int d = 0) {
    if (v_dim_ % 32 == 0)
      for (; d + 32 * kLines <= v_width_; d += 32 * kLines) add_lines<kQueries, kLines, true, kCodes>(d, begin, end, state);
    if constexpr (kLines > 1) return add_values<kQueries, kCodes, kLines / 2>(begin, end, state, d);
    for (; d < v_width_; d += 32) add_lines<kQueries, 1, false, kCodes>(d, begin, end, state);
  }

  template <int kQueries, int kLines, bool kWhole, bool kCodes>
  void add_lines(int d, int begin, int end, const State& state) {
    __m512 sums[kQueries][2 * kLines] = {};
    const int whole = kWhole ? begin + (end - begin) / 2 * 2 : begin;
    for (int t = begin; t < whole; t += 2) {
      if (d == 0) {
        fetch_row(count_ + t + kRowsAhead);
        fetch_row(count_ + t + kRowsAhead + 1);
      }
      add_pair<kQueries, kLines, true, kCodes>(t, d, sums);
    }
    for (int t = whole; t < end; t += 2) add_pair<kQueries, kLines, false, kCodes>(t, d, sums);
#pragma GCC unroll 4
    for (int i = 0; i < kQueries; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < 2 * kLines; ++v) _mm512_storeu_ps(state.out + i * v_width_ + d + 16 * v, sums[i][v]);
  }

  // Adds tokens t and t + 1.
  template <int kQueries, int kLines, bool kWhole, bool kCodes>
  __attribute__((always_inline)) void add_pair(int t, int d, __m512 sums[kQueries][2 * kLines]) const {
#pragma GCC unroll 4
    for (int line = 0; line < kLines; ++line) {
      __m512bh pairs[2];
      pair_values<kWhole, kCodes>(t, d + 32 * line, pairs);
#pragma GCC unroll 4
      for (int i = 0; i < kQueries; ++i) {
        const __m512bh weights = pair_of(weights_ + i * kWeightStride + t);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half)
          sums[i][2 * line + half] = _mm512_dpbf16_ps(sums[i][2 * line + half], weights, pairs[half]);
      }
    }
  }

  // Scores of a row become weights in bfloat16; those outside of [first, stop) become 0.
  void softmax(int i, int begin, int end, int first, int stop, float factor, const State& state) {
    const float* const scores = scores_ + i * kScoreStride;
    uint16_t* const weights = weights_ + i * kWeightStride;
    const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 highest = nothing, sum = _mm512_setzero_ps();
    const auto whole = [&](int t) { return t >= first && t + 32 <= stop; };
    for (int t = begin; t < end; t += 32) {
      if (whole(t)) {
        highest = _mm512_max_ps(highest, _mm512_max_ps(_mm512_load_ps(scores + t), _mm512_load_ps(scores + t + 16)));
      } else {
        const __mmask32 seen = lanes(t, first, stop);
        const auto low = static_cast<__mmask16>(seen), high = static_cast<__mmask16>(seen >> 16);
        highest = _mm512_mask_max_ps(highest, low, highest, _mm512_load_ps(scores + t));
        highest = _mm512_mask_max_ps(highest, high, highest, _mm512_load_ps(scores + t + 16));
      }
    }
    const float shift = factor * _mm512_reduce_max_ps(highest);
    for (int t = begin; t < end; t += 32) {
      if (whole(t))
        sum = Weights(scores + t, factor, shift).put(weights + t, sum);
      else
        sum = Weights(scores + t, factor, shift, lanes(t, first, stop)).put(weights + t, sum);
    }
    state.shift[i] = shift;
    state.sum[i] = add_lanes(sum);
  }

  const int k_dim_, v_dim_, k_width_, v_width_;
  const int rows_per_step_;  // of what is fetched ahead with every 32 numbers of 16 tokens of K
  bool few_ = false, codes_ = false;
  int first_ = 0, count_ = 0, num_rows_ = 0, line_bytes_ = 0;
  uint16_t *k_, *v_, *weights_, *widened_;
  float* scores_;
  const char* rows_[2 * kAttentionBlock + kRowsAhead];  // K, then V, then what is expected
  float scales_[2 * kAttentionBlock + 16];              // of codes, in the same order
};

}  // namespace rhizome

#endif
