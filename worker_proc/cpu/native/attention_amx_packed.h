// One tile of queries against one block of packed K and V, with the vector units at work while the tiles multiply: the
// scores of 32 tokens become weights during the products of the next 32, and sums of values are merged with those of
// the blocks before during the products of the next 32 columns.
//
// That needs the shift of the softmax before all scores are known, so it is the score of the first token that a query
// sees of the block. Where others are so much higher that the sum of weights passes kHighestSum, the block is done
// again by `AmxKernel`, which then shifts by the maximum. All this depends on the query and the block alone.
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)

#include "attention_amx_tiles.h"
#include "attention_kernel.h"
#include "attention_vectors.h"

namespace rhizome {

constexpr float kHighestSum = 0x1p60f;

// Rows of K and V, `bytes` each, that are fetched into the L2 cache a few at a time beside other work: the processor's
// own prefetching ends at the end of every page of the cache, as the next one may be anywhere.
struct RowsAhead {
  const char* rows[2 * kAttentionBlock];
  int count = 0, done = 0, bytes = 0;

  void fetch_some() {
    for (const int stop = std::min(count, done + 2); done < stop; ++done)
      for (int i = 0; i < bytes; i += 64) _mm_prefetch(rows[done] + i, _MM_HINT_T1);
  }
};

// Queries [32][k_width], K and V packed as by `AmxKernel`, `first` the position of the block's first token. Steps, here
// and below, are 32 tokens.
struct PackedBlock {
  const uint16_t *q, *k, *v;
  int k_width, v_width, first;
};

// kTiles: 1 for up to 16 queries, 2 for up to 32.
template <int kTiles>
class PackedTile {
 public:
  // Memory for weights [32][weight_stride].
  PackedTile(const PackedBlock& block, const Tile& tile, const Scores& how, RowsAhead& ahead, uint16_t* weights,
             int weight_stride)
      : block_(block), tile_(tile), how_(how), ahead_(ahead), factor_(how.softcap > 0 ? 1.0f : how.scale),
        weights_(weights), weight_stride_(weight_stride) {
    seen_by_all_ = tile.first[0];
    seen_end_ = tile.end[0];
    for (int i = 1; i < tile.count; ++i) {
      seen_by_all_ = std::max(seen_by_all_, tile.first[i]);
      seen_end_ = std::min(seen_end_, tile.end[i]);
    }
    seen_by_all_ = std::max(0, seen_by_all_ - block.first);
    seen_end_ -= block.first;
  }

  // Adds the tokens [begin, end) of the block, whole steps, to `total`, or makes them `total` if that is empty. False if
  // it cannot be done: `total` is as it was then, unless it is empty.
  bool run(int begin, int end, const State& total, const State& now, bool empty) {
    std::fill_n(now.shift, kRows, -std::numeric_limits<float>::infinity());
    std::memset(sums_, 0, sizeof sums_);
    score(begin, [](int, int) {});
    for (int t = begin + 32; t < end; t += 32) {
      squash_step(t - 32);
      const bool all_begin = t - 32 == seen_by_all_ && t - 32 == begin;
      if ((t - 32 <= seen_by_all_ && !all_begin) || t > seen_end_)
        score(t, [&](int i, int stop) { for (; i < stop; ++i) weigh_seen(i, t - 32, now.shift); });
      else if (all_begin)
        score(t, [&](int i, int stop) { for (; i < stop; ++i) weigh<true>(i, t - 32, now.shift); });
      else
        score(t, [&](int i, int stop) { for (; i < stop; ++i) weigh<false>(i, t - 32, now.shift); });
    }
    squash_step(end - 32);
    if (end - 32 > seen_by_all_ && end <= seen_end_)
      for (int i = 0; i < kRows; ++i) weigh<false>(i, end - 32, now.shift);
    else
      for (int i = 0; i < kRows; ++i) weigh_seen(i, end - 32, now.shift);
    before_tiles();
    const State& to = empty ? total : now;
    add_values(0, begin, end, to, [](int, int) {});
    for (int i = 0; i < kRows; i += 16) _mm512_store_ps(to.sum + i, add_rows(sums_ + 16 * i));
    for (int i = 0; i < tile_.count; ++i)
      if (!(to.sum[i] <= kHighestSum)) return false;
    if (empty) {
      std::memcpy(total.shift, now.shift, 4 * kRows);
      for (int d = 32; d < block_.v_width; d += 32) add_values(d, begin, end, to, [](int, int) {});
      return true;
    }
    const Merge merge(total, now.shift, now.sum, tile_.count);
    for (int d = 32; d < block_.v_width; d += 32)
      add_values(d, begin, end, now, [&](int i, int stop) { add(d - 32, i, stop, total, now, merge); });
    add(block_.v_width - 32, 0, kRows, total, now, merge);
    return true;
  }

 private:
  static constexpr int kRows = 16 * kTiles;

  // Scores of the step at t; calls beside(row, stop) in between for all rows.
  template <class Beside>
  void score(int t, Beside&& beside) {
    const int width = block_.k_width, bytes = 2 * width;
    const int rows = (32 * kRows + width - 1) / width;
    const uint16_t *q0 = block_.q, *q1 = q0 + 16 * width;
    const uint16_t *k0 = block_.k + t * width, *k1 = k0 + 16 * width;
    float* const to = scores_[t / 32 % 2];
    int row = 0;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTiles == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int d = 0; d < width; d += 32) {
      _tile_loadd(4, q0 + d, bytes);
      _tile_loadd(6, k0 + 16 * d, 64);
      _tile_loadd(7, k1 + 16 * d, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kTiles == 2) {
        _tile_loadd(5, q1 + d, bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      ahead_.fetch_some();
      const int stop = std::min(kRows, row + rows);
      beside(row, stop);
      row = stop;
    }
    _tile_stored(0, to, 128);
    _tile_stored(1, to + 16, 128);
    if constexpr (kTiles == 2) {
      _tile_stored(2, to + 512, 128);
      _tile_stored(3, to + 528, 128);
    }
  }

  void squash_step(int t) {
    if (how_.softcap > 0) squash(scores_[t / 32 % 2], 32 * kRows, how_.scale / how_.softcap, how_.softcap * kLog2E);
  }

  // Scores of a row and step become weights.
  template <bool kFirst>
  void weigh(int i, int t, float* shifts) {
    const float* const from = scores_[t / 32 % 2] + 32 * i;
    if constexpr (kFirst) shifts[i] = from[0] * factor_;
    put(i, t, Weights(from, factor_, shifts[i]));
  }

  // The same where not every query sees every token.
  void weigh_seen(int i, int t, float* shifts) {
    if (i >= tile_.count) return;
    const float* const from = scores_[t / 32 % 2] + 32 * i;
    const int first = std::max(tile_.first[i] - block_.first, 0), stop = tile_.end[i] - block_.first;
    if (first >= t && first < std::min(t + 32, stop)) shifts[i] = from[first - t] * factor_;
    put(i, t, Weights(from, factor_, shifts[i], lanes(t, first, stop)));
  }

  void put(int i, int t, const Weights& weights) {
    float* const sums = sums_ + 16 * i;
    _mm512_store_ps(sums, weights.put(weights_ + i * weight_stride_ + t, _mm512_load_ps(sums)));
  }

  // The sums of 32 columns of values; calls beside(row, stop) in between for all rows.
  template <class Beside>
  void add_values(int d, int begin, int end, const State& to, Beside&& beside) {
    const int rows = (32 * kRows + (end - begin) - 1) / (end - begin), bytes = 2 * weight_stride_;
    int row = 0;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTiles == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int t = begin; t < end; t += 32) {
      const uint16_t* const v = block_.v + t * block_.v_width + d * 32;
      _tile_loadd(4, weights_ + t, bytes);
      _tile_loadd(6, v, 64);
      _tile_loadd(7, v + 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kTiles == 2) {
        _tile_loadd(5, weights_ + 16 * weight_stride_ + t, bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      ahead_.fetch_some();
      const int stop = std::min(kRows, row + rows);
      beside(row, stop);
      row = stop;
    }
    float* const out = to.out + d;
    const int out_bytes = 4 * block_.v_width;
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + 16, out_bytes);
    if constexpr (kTiles == 2) {
      _tile_stored(2, out + 16 * block_.v_width, out_bytes);
      _tile_stored(3, out + 16 * block_.v_width + 16, out_bytes);
    }
  }

  void add(int d, int i, int stop, const State& total, const State& now, const Merge& merge) const {
    for (; i < stop; ++i) {
      const int at = i * block_.v_width + d;
      merge.add(i, 32, now.out + at, total.out + at);
    }
  }

  const PackedBlock& block_;
  const Tile& tile_;
  const Scores& how_;
  RowsAhead& ahead_;
  const float factor_;
  uint16_t* const weights_;
  const int weight_stride_;
  int seen_by_all_, seen_end_;  // tokens of the block that every query sees
  alignas(64) float scores_[2][32 * kRows];
  alignas(64) float sums_[16 * kRows];
};

}  // namespace rhizome

#endif
