// The attention kernel for bfloat16 on AMX tiles.
//
// Scores come in one of two ways, with the same bits. With few queries, K stays where it is in the pages: 16 tokens are
// a tile's rows as they are, the queries are packed into the other operand, and the transposed scores are turned round.
// With many queries, K is packed once (pairs of numbers of 16 tokens side by side), and the queries are the rows.
// V is packed (pairs of tokens side by side), with zeros for tokens that are outside of the block: their memory may hold
// NaN. For up to four queries it is not packed, see attention_amx_few.h; attention_amx_packed.h has the case of many.
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)

#include "attention_amx_few.h"
#include "attention_amx_packed.h"
#include "attention_amx_tiles.h"
#include "attention_kernel.h"
#include "attention_vectors.h"

namespace rhizome {

class AmxKernel {
 public:
  AmxKernel(const AttentionBatch& batch, char* scratch)
      : k_dim_(batch.k_dim), v_dim_(batch.v_dim), k_width_(round_up(k_dim_, 32)), v_width_(v_stride(batch)),
        in_place_((batch.kv_int8 || batch.page_size % 16 == 0) && k_dim_ % 32 == 0) {
    k_ = reinterpret_cast<uint16_t*>(scratch);
    v_ = k_ + kAttentionBlock * k_width_;
    weights_ = v_ + kAttentionBlock * v_width_;
    scores_ = reinterpret_cast<float*>(weights_ + kTile * kWeightStride);
    widened_ = reinterpret_cast<uint16_t*>(scores_ + kTile * kScoreStride);
  }

  ~AmxKernel() { _tile_release(); }

  AmxKernel(const AmxKernel&) = delete;
  AmxKernel& operator=(const AmxKernel&) = delete;

  static int v_stride(const AttentionBatch& batch) { return round_up(batch.v_dim, 32); }

  static int64_t scratch_bytes(const AttentionBatch& batch) {
    const int64_t k_width = round_up(batch.k_dim, 32), v_width = v_stride(batch);
    const int64_t widened = batch.kv_int8 ? kAttentionBlock * (k_width + v_width) : 0;
    return 2 * (kAttentionBlock * (k_width + v_width) + kTile * kWeightStride + widened) + 4 * kTile * kScoreStride;
  }

  static int64_t query_bytes(const AttentionBatch& batch) { return int64_t{2} * kTile * round_up(batch.k_dim, 32); }

  // Hold the tokens [first, end), at most kAttentionBlock, for the next calls of `attend`, with `num_queries` in all.
  void set_block(const KeySource& source, int first, int end, int num_queries) {
    first_ = first;
    count_ = end - first;
    packed_ = packs(num_queries);
    few_ = packed_ ? 0 : few_of(num_queries);
    ahead_.count = 0;
    k_token_ = source.k_token;
    v_token_ = source.v_token;
    const bool widens = source.k_scales != nullptr;
    if (few_ == 0 || widens) {
      source.walk(first, count_, [&](int i, const char* k, const char* v) {
        k_rows_[i] = k;
        v_rows_[i] = v;
      });
    }
    if (widens) widen_codes(source, first, count_, v_rows_);
    if (few_ > 0) return set_groups(source, widens);
    // Rows are read in full groups of 16 (K, the rest is masked then) and ahead of their time.
    std::fill_n(v_rows_ + count_, kTokensAhead, v_rows_[count_ - 1]);
    std::fill_n(k_rows_ + count_, round_up(count_, 32) - count_, k_rows_[0]);
    if (packed_) {
      std::copy_n(v_rows_, 16, k_rows_ + round_up(count_, 16));
      for (int group = 0; group < count_; group += 16) pack_keys(group, std::min(16, count_ - group));
    }
    for (int step = 0; step < count_; step += 32) {
      if (count_ - step >= 32 && v_dim_ % 32 == 0)
        pack_full_values(v_rows_ + step, step);
      else
        pack_values(v_rows_, step, std::min(32, count_ - step));
    }
  }

  // The tokens first .. first + count - 1 of `source`, at most kAttentionBlock, come after this block.
  void expect(const KeySource& source, int first, int count) {
    ahead_.done = ahead_.count = 0;
    ahead_.bytes = (source.k_scales != nullptr ? 1 : 2) * std::max(k_dim_, v_dim_);
    if (packed_) {
      source.walk(first, count, [&](int, const char* k, const char* v) {
        ahead_.rows[ahead_.count++] = k;
        ahead_.rows[ahead_.count++] = v;
      });
    }
    if (few_ == 0) return;
    const int groups = std::min(kMoreGroups, (count + kGroup - 1) / kGroup);
    const char** const more = groups_ + 2 * few_block().num_groups();
    source.walk_groups(first, groups, kGroup, [&](int i, const char* k, const char*) { more[i] = k; });
  }

  // Put queries into `memory` (query_bytes) as `attend` needs them for blocks set with the same `num_queries`.
  void set_queries(const Tile& tile, int num_queries, char* memory) const {
    auto* q = reinterpret_cast<uint16_t*>(memory);
    if (packs(num_queries)) {
      for (int i = 0; i < tile.count; ++i)
        for (int d = 0; d < k_width_; d += 32)
          _mm512_store_si512(q + i * k_width_ + d, load_numbers(tile.q[i], d, k_dim_));
      return;
    }
    if (const int few = few_of(num_queries); few > 0) {
      if (few == 2 && tile.count == 2) {
        const __m512i low = first_pairs_of_both(), high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
        for (int d = 0; d < k_width_; d += 32) {
          const __m512i a = _mm512_loadu_si512(tile.q[0] + 2 * d), b = _mm512_loadu_si512(tile.q[1] + 2 * d);
          _mm512_store_si512(q + 2 * d, _mm512_permutex2var_epi32(a, low, b));
          _mm512_store_si512(q + 2 * d + 32, _mm512_permutex2var_epi32(a, high, b));
        }
        return;
      }
      for (int j = 0; j < tile.count; ++j) {
        for (int d = 0; d < k_width_; d += 2) std::memcpy(q + d * few + 2 * j, tile.q[j] + 2 * d, 4);
      }
      return;
    }
    for (int i = 0; i < tile.count; i += 16) {
      for (int d = 0; d < k_width_; d += 32) {
        __m512i rows[16];
        for (int j = 0; j < 16; ++j)
          rows[j] = i + j < tile.count ? load_numbers(tile.q[i + j], d, k_dim_) : _mm512_setzero_si512();
        transpose(rows);
        for (int j = 0; j < 16; ++j) _mm512_store_si512(q + i * k_width_ + d * 16 + 32 * j, rows[j]);
      }
    }
  }

  // The queries of `set_queries` see the part [begin, end) of the block, which holds all that any of them sees of it.
  void attend(const Tile& tile, const char* queries, int begin, int end, const Scores& how, const State& state) {
    const auto* q = reinterpret_cast<const uint16_t*>(queries);
    begin = (begin - first_) & ~31;
    end = round_up(end - first_, 32);
    if (config_ != few_) _tile_loadconfig(&kTileConfigs[config_ = few_]);
    before_tiles();
    if (few_ == 1)
      score_few<1>(few_block(), q, begin, end, scores_, kScoreStride);
    else if (few_ == 2)
      score_few<2>(few_block(), q, begin, end, scores_, kScoreStride);
    else if (few_ == 4)
      score_few<4>(few_block(), q, begin, end, scores_, kScoreStride);
    else if (packed_)
      score_packed(q, tile.count, begin, end);
    else
      score_in_place(q, tile.count, begin, end);
    for (int i = 0; i < tile.count; ++i) {
      const int first = std::max(begin, tile.first[i] - first_), stop = std::min(end, tile.end[i] - first_);
      if (how.softcap > 0)
        squash(scores_ + i * kScoreStride + begin, end - begin, how.scale / how.softcap, how.softcap * kLog2E);
      softmax(i, begin, end, first, stop, how, state);
    }
    before_tiles();
    if (few_ == 1)
      add_values_few<1>(few_block(), weights_, kWeightStride, tile.count, begin, end, state);
    else if (few_ == 2)
      add_values_few<2>(few_block(), weights_, kWeightStride, tile.count, begin, end, state);
    else if (few_ == 4)
      add_values_few<4>(few_block(), weights_, kWeightStride, tile.count, begin, end, state);
    else if (tile.count > 16)
      add_values<2>(begin, end, state);
    else
      add_values<1>(begin, end, state);
  }

  // As `attend`, and adds the result to `total`, which may be `empty`. `now` is free memory.
  void extend(const Tile& tile, const char* queries, int begin, int end, const Scores& how, const State& total,
              const State& now, bool empty) {
    if (packed_) {
      if (config_ != few_) _tile_loadconfig(&kTileConfigs[config_ = few_]);
      const auto* q = reinterpret_cast<const uint16_t*>(queries);
      before_tiles();
      const PackedBlock block{q, k_, v_, k_width_, v_width_, first_};
      const int from = (begin - first_) & ~31, to = round_up(end - first_, 32);
      if (tile.count > 16
              ? PackedTile<2>(block, tile, how, ahead_, weights_, kWeightStride).run(from, to, total, now, empty)
              : PackedTile<1>(block, tile, how, ahead_, weights_, kWeightStride).run(from, to, total, now, empty))
        return;
    }
    attend(tile, queries, begin, end, how, empty ? total : now);
    if (!empty) add_block(total, now, tile.count, v_width_);
  }

 private:
  static constexpr int kTokensAhead = 32;  // that is how far V, and codes, are fetched ahead of what is packed
  // Rows of score and weight matrices are a cache line apart from a power of two, so that they share no cache sets.
  static constexpr int kScoreStride = kAttentionBlock + 16, kWeightStride = kAttentionBlock + 32;

  // The block as few queries read it; what was widened lies side by side.
  void set_groups(const KeySource& source, bool widened) {
    const int groups = few_block().num_groups();
    const auto put = [&](int i, const char* k, const char* v) {
      groups_[i] = k;
      groups_[groups + i] = v;
    };
    if (widened)
      for (int i = 0; i < groups; ++i) put(i, k_rows_[i * kGroup], v_rows_[i * kGroup]);
    else
      source.walk_groups(first_, groups, kGroup, put);
    std::fill_n(groups_ + 2 * groups, kMoreGroups, groups_[2 * groups - 1]);
  }

  // Codes become rows of bfloat16, which stand in for those of the pages from here on.
  void widen_codes(const KeySource& source, int first, int count, const char** v_rows) {
    uint16_t* const v_widened = widened_ + kAttentionBlock * k_width_;
    source.walk_scales(first, count, [&](int i, float k_scale, float v_scale) {
      const int ahead = std::min(i + kTokensAhead, count - 1);
      for (int d = 0; d < k_dim_; d += 64) _mm_prefetch(k_rows_[ahead] + d, _MM_HINT_T0);
      for (int d = 0; d < v_dim_; d += 64) _mm_prefetch(v_rows[ahead] + d, _MM_HINT_T0);
      uint16_t *const k_to = widened_ + i * k_width_, *const v_to = v_widened + i * v_width_;
      for (int d = 0; d < k_width_; d += 32) _mm512_store_si512(k_to + d, widen_numbers(k_rows_[i], d, k_dim_, k_scale));
      for (int d = 0; d < v_width_; d += 32) _mm512_store_si512(v_to + d, widen_numbers(v_rows[i], d, v_dim_, v_scale));
      k_rows_[i] = reinterpret_cast<const char*>(k_to);
      v_rows[i] = reinterpret_cast<const char*>(v_to);
    });
    k_token_ = 2 * k_width_;
    v_token_ = 2 * v_width_;
  }

  // Tokens group .. group + 15 of K, word by word: [16 pairs of numbers][16 tokens][2] for every 32 numbers.
  void pack_keys(int group, int count) {
    for (int d = 0; d < k_width_; d += 32) {
      __m512i rows[16];
      for (int j = 0; j < 16; ++j) {
        rows[j] = j < count ? load_numbers(k_rows_[group + j], d, k_dim_) : _mm512_setzero_si512();
        _mm_prefetch(k_rows_[group + 16 + j] + 2 * d, _MM_HINT_T0);
      }
      transpose(rows);
      uint16_t* to = k_ + group * k_width_ + d * 16;
      for (int j = 0; j < 16; ++j) _mm512_store_si512(to + 32 * j, rows[j]);
    }
  }

  // As `pack_values` for 32 tokens and a head size that is a multiple of 32.
  void pack_full_values(const char* const* rows, int step) {
    const __m512i low = first_of_both(), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const char* const* k_rows = k_rows_ + step;
    for (int d = 0; d < v_width_; d += 32) {
      uint16_t* to = v_ + step * v_width_ + d * 32;
      for (int t = 0; t < 32; t += 2, to += 32) {
        for (int i = t; i < t + 2; ++i) {
          _mm_prefetch(rows[i + kTokensAhead] + 2 * d, _MM_HINT_T0);
          if (!packed_ && d < k_dim_) _mm_prefetch(k_rows[i] + 2 * d, _MM_HINT_T1);
        }
        const __m512i even = _mm512_loadu_si512(rows[t] + 2 * d), odd = _mm512_loadu_si512(rows[t + 1] + 2 * d);
        _mm512_store_si512(to, _mm512_permutex2var_epi16(even, low, odd));
        _mm512_store_si512(to + 512, _mm512_permutex2var_epi16(even, high, odd));
      }
    }
  }

  // Tokens step .. step + 31 of V: [16 pairs of tokens][16 numbers][2] for every 16 numbers.
  void pack_values(const char* const* rows, int step, int count) {
    const __m512i low = first_of_both(), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    uint16_t* to = v_ + step * v_width_;
    for (int t = 0; t < 32; t += 2) {
      for (int d = 0; d < v_width_; d += 32) {
        const __m512i even = t < count ? load_numbers(rows[step + t], d, v_dim_) : _mm512_setzero_si512();
        const __m512i odd = t + 1 < count ? load_numbers(rows[step + t + 1], d, v_dim_) : _mm512_setzero_si512();
        uint16_t* pair = to + 16 * t + d * 32;
        _mm512_store_si512(pair, _mm512_permutex2var_epi16(even, low, odd));
        _mm512_store_si512(pair + 512, _mm512_permutex2var_epi16(even, high, odd));
      }
    }
  }

  void score_packed(const uint16_t* queries, int count, int begin, int end) {
    for (int i = 0; i < count; i += 32) {
      const bool both = i + 16 < count;
      for (int t = begin; t < end; t += 32) {
        const uint16_t *q0 = queries + i * k_width_, *q1 = q0 + 16 * k_width_;
        const uint16_t *k0 = k_ + t * k_width_, *k1 = k0 + 16 * k_width_;
        float *to0 = scores_ + i * kScoreStride + t, *to1 = to0 + 16 * kScoreStride;
        _tile_zero(0);
        _tile_zero(1);
        if (both) {
          _tile_zero(2);
          _tile_zero(3);
          for (int d = 0; d < k_width_; d += 32) {
            _tile_loadd(4, q0 + d, 2 * k_width_);
            _tile_loadd(6, k0 + 16 * d, 64);
            _tile_loadd(7, k1 + 16 * d, 64);
            _tile_loadd(5, q1 + d, 2 * k_width_);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
          }
          _tile_stored(2, to1, 4 * kScoreStride);
          _tile_stored(3, to1 + 16, 4 * kScoreStride);
        } else {
          for (int d = 0; d < k_width_; d += 32) {
            _tile_loadd(4, q0 + d, 2 * k_width_);
            _tile_loadd(6, k0 + 16 * d, 64);
            _tile_loadd(7, k1 + 16 * d, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
          }
        }
        _tile_stored(0, to0, 4 * kScoreStride);
        _tile_stored(1, to0 + 16, 4 * kScoreStride);
      }
    }
  }

  void score_in_place(const uint16_t* queries, int count, int begin, int end) {
    for (int i = 0; i < count; i += 16) {
      const uint16_t* q = queries + i * k_width_;
      const int rows = std::min(16, count - i);
      for (int t = begin; t < end; t += 32) {
        const char *k0 = k_rows_[t], *k1 = k_rows_[t + 16];
        _tile_zero(0);
        _tile_zero(1);
        for (int d = 0; d < k_width_; d += 32) {
          _tile_loadd(4, k0 + 2 * d, k_token_);
          _tile_loadd(5, k1 + 2 * d, k_token_);
          _tile_loadd(6, q + 16 * d, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 5, 6);
        }
        alignas(64) float turned[512];
        _tile_stored(0, turned, 64);
        _tile_stored(1, turned + 256, 64);
        for (int half = 0; half < 32; half += 16) {
          __m512i lines[16];
          for (int j = 0; j < 16; ++j) lines[j] = _mm512_load_si512(turned + 16 * half + 16 * j);
          transpose(lines);
          for (int j = 0; j < rows; ++j) _mm512_store_si512(scores_ + (i + j) * kScoreStride + t + half, lines[j]);
        }
      }
    }
  }

  // Scores of a row become weights in bfloat16; those outside of [first, stop) become 0. See attention_amx_packed.h for
  // the shift.
  void softmax(int i, int begin, int end, int first, int stop, const Scores& how, const State& state) {
    const float* scores = scores_ + i * kScoreStride;
    const float factor = how.softcap > 0 ? 1.0f : how.scale;
    if (first >= stop) {
      state.shift[i] = -std::numeric_limits<float>::infinity();
      state.sum[i] = 0;
      std::memset(weights_ + i * kWeightStride + begin, 0, 2 * (end - begin));
      return;
    }
    state.shift[i] = factor * scores[first];
    state.sum[i] = weigh(i, begin, end, first, stop, factor, state.shift[i]);
    if (state.sum[i] <= kHighestSum) return;
    const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 highest = nothing;
    for (int t = begin; t < end; t += 32) {
      const __mmask32 seen = lanes(t, first, stop);
      const auto low = static_cast<__mmask16>(seen), high = static_cast<__mmask16>(seen >> 16);
      highest = _mm512_max_ps(highest, _mm512_mask_load_ps(nothing, low, scores + t));
      highest = _mm512_max_ps(highest, _mm512_mask_load_ps(nothing, high, scores + t + 16));
    }
    state.shift[i] = factor * _mm512_reduce_max_ps(highest);
    state.sum[i] = weigh(i, begin, end, first, stop, factor, state.shift[i]);
  }

  // Returns the sum of the weights.
  float weigh(int i, int begin, int end, int first, int stop, float factor, float shift) {
    const float* scores = scores_ + i * kScoreStride;
    uint16_t* weights = weights_ + i * kWeightStride;
    __m512 sum = _mm512_setzero_ps();
    for (int t = begin; t < end; t += 32) {
      if (t >= first && t + 32 <= stop)
        sum = Weights(scores + t, factor, shift).put(weights + t, sum);
      else
        sum = Weights(scores + t, factor, shift, lanes(t, first, stop)).put(weights + t, sum);
    }
    return add_lanes(sum);
  }

  template <int kTiles>
  void add_values(int begin, int end, const State& state) {
    const int out_bytes = 4 * v_width_;
    for (int d = 0; d < v_width_; d += 32) {
      float *out0 = state.out + d, *out1 = out0 + 16 * v_width_;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int t = begin; t < end; t += 32) {
        const uint16_t* v = v_ + t * v_width_ + d * 32;
        _tile_loadd(4, weights_ + t, 2 * kWeightStride);
        _tile_loadd(6, v, 64);
        _tile_loadd(7, v + 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (kTiles == 2) {
          _tile_loadd(5, weights_ + 16 * kWeightStride + t, 2 * kWeightStride);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, out0, out_bytes);
      _tile_stored(1, out0 + 16, out_bytes);
      if constexpr (kTiles == 2) {
        _tile_stored(2, out1, out_bytes);
        _tile_stored(3, out1 + 16, out_bytes);
      }
    }
  }

  FewBlock few_block() const { return {groups_, k_token_, v_token_, k_width_, v_dim_, v_width_, count_}; }

  // Whether K is packed for so many queries in all.
  bool packs(int num_queries) const { return num_queries > 2 * kTile || !in_place_; }

  // How many queries the tiles for few of them are made for; 0 is for many.
  static int few_of(int count) { return count > 4 ? 0 : count == 3 ? 4 : count; }

  const int k_dim_, v_dim_, k_width_, v_width_;
  const bool in_place_;
  bool packed_ = false;
  int config_ = -1;
  int first_ = 0;
  int64_t k_token_ = 0, v_token_ = 0;
  int count_ = 0, few_ = 0;
  uint16_t *k_, *v_, *weights_, *widened_;
  float* scores_;
  RowsAhead ahead_;
  const char* k_rows_[kAttentionBlock + 16];
  const char* v_rows_[kAttentionBlock + kTokensAhead];
  const char* groups_[2 * kAttentionBlock / kGroup + kMoreGroups];
};

}  // namespace rhizome

#endif
