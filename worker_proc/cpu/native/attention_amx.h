// The attention kernel for bfloat16 on AMX tiles.
//
// Scores come in one of two ways, with the same bits. With few queries, K stays where it is in the pages: 16 tokens are
// a tile's rows as they are, the queries are packed into the other operand, and the transposed scores are turned round.
// With many queries, K is packed once (pairs of numbers of 16 tokens side by side), and the queries are the rows.
// V is always packed (pairs of tokens side by side), with zeros for tokens that are outside of the block: their memory
// may hold NaN.
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's own headers do it on purpose
#endif
#include <immintrin.h>

#include "attention_kernel.h"

namespace rhizome {

// 16 rows of 16 words become columns.
inline void transpose(__m512i rows[16]) {
  __m512i a[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
  }
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

class AmxKernel {
 public:
  AmxKernel(const AttentionBatch& batch, char* scratch)
      : k_dim_(batch.k_dim), v_dim_(batch.v_dim), k_width_(round_up(k_dim_, 32)), v_width_(v_stride(batch)),
        in_place_(batch.page_size % 16 == 0 && k_dim_ % 32 == 0) {
    k_ = reinterpret_cast<uint16_t*>(scratch);
    v_ = k_ + kAttentionBlock * k_width_;
    weights_ = v_ + kAttentionBlock * v_width_;
    scores_ = reinterpret_cast<float*>(weights_ + kTile * kWeightStride);
    // Static, as the compiler does not know that all of it is read.
    static constexpr TileConfig config;
    _tile_loadconfig(&config);
  }

  ~AmxKernel() { _tile_release(); }

  AmxKernel(const AmxKernel&) = delete;
  AmxKernel& operator=(const AmxKernel&) = delete;

  static int v_stride(const AttentionBatch& batch) { return round_up(batch.v_dim, 32); }

  static int64_t scratch_bytes(const AttentionBatch& batch) {
    const int64_t k_width = round_up(batch.k_dim, 32), v_width = v_stride(batch);
    return 2 * (kAttentionBlock * (k_width + v_width) + kTile * kWeightStride) + 4 * kTile * kScoreStride;
  }

  static int64_t query_bytes(const AttentionBatch& batch) { return int64_t{2} * kTile * round_up(batch.k_dim, 32); }

  // Hold the tokens [first, end), at most kAttentionBlock, for the next calls of `attend`.
  void set_block(const KeySource& source, int first, int end, bool many_tiles) {
    first_ = first;
    const int count = end - first;
    const char* v_rows[kAttentionBlock];
    source.walk(first, count, [&](int i, const char* k, const char* v) {
      k_rows_[i] = k;
      v_rows[i] = v;
    });
    if (count % 32 && count % 32 <= 16) k_rows_[round_up(count, 16)] = k_rows_[0];  // read with the last 16, then masked
    k_token_ = source.k_token;
    packed_ = many_tiles || !in_place_;
    if (packed_) {
      for (int group = 0; group < count; group += 16) pack_keys(group, std::min(16, count - group));
    }
    for (int i = 0; i < std::min(count, kAhead); ++i) prefetch(v_rows[i], v_dim_);
    for (int step = 0; step < count; step += 32) {
      for (int i = step; i < std::min(count, step + 32); ++i) {
        if (!packed_) prefetch(k_rows_[i], k_dim_);
        if (i + kAhead < count) prefetch(v_rows[i + kAhead], v_dim_);
      }
      pack_values(v_rows, step, std::min(32, count - step));
    }
  }

  // Put queries into `memory` (query_bytes) as `attend` needs them for blocks set with the same `many_tiles`.
  void set_queries(const Tile& tile, bool many_tiles, char* memory) const {
    auto* q = reinterpret_cast<uint16_t*>(memory);
    if (many_tiles || !in_place_) {
      for (int i = 0; i < tile.count; ++i)
        for (int d = 0; d < k_width_; d += 32)
          _mm512_store_si512(q + i * k_width_ + d, load_numbers(tile.q[i], d, k_dim_));
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
  void attend(const Tile& tile, const char* queries, int begin, int end, const Scores& how, State& state) {
    const auto* q = reinterpret_cast<const uint16_t*>(queries);
    begin = (begin - first_) & ~31;
    end = round_up(end - first_, 32);
    if (packed_)
      score_packed(q, tile.count, begin, end);
    else
      score_in_place(q, tile.count, begin, end);
    for (int i = 0; i < tile.count; ++i) {
      const int first = std::max(begin, tile.first[i] - first_), stop = std::min(end, tile.end[i] - first_);
      if (how.softcap > 0) squash(i, begin, end, how);
      if (first == begin && stop == end)
        softmax<false>(i, begin, end, first, stop, how, state);
      else
        softmax<true>(i, begin, end, first, stop, how, state);
    }
    if (tile.count > 16)
      add_values<2>(begin, end, state);
    else
      add_values<1>(begin, end, state);
    state.empty = false;
  }

 private:
  // Rows of score and weight matrices are a cache line apart from a power of two, so that they share no cache sets.
  static constexpr int kScoreStride = kAttentionBlock + 16, kWeightStride = kAttentionBlock + 32;

  // The processor's own prefetching ends at every page of the cache, as they are anywhere in memory.
  static constexpr int kAhead = 32;  // tokens

  static void prefetch(const char* head, int dim) {
    for (int at = 0; at < 2 * dim; at += 64) _mm_prefetch(head + at, _MM_HINT_T1);
  }

  // 32 numbers from `d` on of a head of `dim`, with zeros behind it.
  static __m512i load_numbers(const char* head, int d, int dim) {
    const char* from = head + 2 * d;
    if (d + 32 <= dim) return _mm512_loadu_si512(from);
    const int left = std::max(0, dim - d);
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << left) - 1), from);
  }

  // Tokens group .. group + 15 of K, word by word: [16 pairs of numbers][16 tokens][2] for every 32 numbers.
  void pack_keys(int group, int count) {
    for (int d = 0; d < k_width_; d += 32) {
      __m512i rows[16];
      for (int j = 0; j < 16; ++j)
        rows[j] = j < count ? load_numbers(k_rows_[group + j], d, k_dim_) : _mm512_setzero_si512();
      transpose(rows);
      uint16_t* to = k_ + group * k_width_ + d * 16;
      for (int j = 0; j < 16; ++j) _mm512_store_si512(to + 32 * j, rows[j]);
    }
  }

  // Tokens step .. step + 31 of V: [16 pairs of tokens][16 numbers][2] for every 16 numbers.
  void pack_values(const char* const* rows, int step, int count) {
    alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
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

  // tanh(x) = 1 - 2 / (e^2x + 1), in base 2.
  void squash(int i, int begin, int end, const Scores& how) {
    float* scores = scores_ + i * kScoreStride;
    const __m512 scale = _mm512_set1_ps(2 * kLog2E * how.scale / how.softcap), one = _mm512_set1_ps(1.0f);
    const __m512 cap = _mm512_set1_ps(how.softcap * kLog2E), minus = _mm512_set1_ps(-2 * how.softcap * kLog2E);
    for (int t = begin; t < end; t += 16) {
      const __m512 x = _mm512_mul_ps(_mm512_load_ps(scores + t), scale);
      const __m512 bounded = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-40.0f)), _mm512_set1_ps(40.0f));
      const __m512 e = _mm512_add_ps(exp2_accurate(bounded), one);
      _mm512_store_ps(scores + t, _mm512_add_ps(_mm512_div_ps(minus, e), cap));
    }
  }

  // 2^x, relative error 3e-6.
  static __m512 exp2_accurate(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_set1_ps(0x1.bb7cd2p-7f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.aa13f2p-5f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ee798ap-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62d166p-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.00002cp+0f));
    return _mm512_scalef_ps(p, x);
  }

  // 2^x, relative error 8e-5: what is left of it in bfloat16 is its rounding.
  static __m512 exp2_short(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_set1_ps(0x1.3f96a2p-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.cefc4ep-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.64444cp-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.fff632p-1f));
    return _mm512_scalef_ps(p, x);
  }

  // The lanes of tokens t .. t + 15 that are in [first, stop).
  static __mmask16 lanes(int t, int first, int stop) {
    const uint32_t below = stop <= t ? 0 : stop - t >= 16 ? 0xffff : (1u << (stop - t)) - 1;
    const uint32_t above = first <= t ? 0 : first - t >= 16 ? 0xffff : (1u << (first - t)) - 1;
    return static_cast<__mmask16>(below & ~above);
  }

  // Scores of a row become weights in bfloat16; those outside of [first, stop) become 0.
  template <bool kMasked>
  void softmax(int i, int begin, int end, int first, int stop, const Scores& how, State& state) {
    const float* scores = scores_ + i * kScoreStride;
    uint16_t* weights = weights_ + i * kWeightStride;
    const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    const auto read = [&](int t) {
      if constexpr (kMasked)
        return _mm512_mask_load_ps(nothing, lanes(t, first, stop), scores + t);
      else
        return _mm512_load_ps(scores + t);
    };
    __m512 high0 = nothing, high1 = nothing;
    for (int t = begin; t < end; t += 32) {
      high0 = _mm512_max_ps(high0, read(t));
      high1 = _mm512_max_ps(high1, read(t + 16));
    }
    const float factor = how.softcap > 0 ? 1.0f : how.scale;
    const Rescale rescale(state.max[i], _mm512_reduce_max_ps(_mm512_max_ps(high0, high1)) * factor, state.empty);
    const __m512 shift = _mm512_set1_ps(rescale.shift()), scale = _mm512_set1_ps(factor);
    __m512 sum0 = _mm512_setzero_ps(), sum1 = sum0;
    for (int t = begin; t < end; t += 32) {
      const __m512 low = exp2_short(_mm512_fmsub_ps(read(t), scale, shift));
      const __m512 high = exp2_short(_mm512_fmsub_ps(read(t + 16), scale, shift));
      sum0 = _mm512_add_ps(sum0, low);
      sum1 = _mm512_add_ps(sum1, high);
      _mm512_store_si512(weights + t, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    const float sum = _mm512_reduce_add_ps(_mm512_add_ps(sum0, sum1));
    state.max[i] = rescale.max;
    state.sum[i] = state.empty ? sum : state.sum[i] * rescale.old_factor + sum;
    if (!state.empty && rescale.old_factor != 1) {
      const __m512 by = _mm512_set1_ps(rescale.old_factor);
      float* out = state.out + i * v_width_;
      for (int d = 0; d < v_width_; d += 16) _mm512_store_ps(out + d, _mm512_mul_ps(_mm512_load_ps(out + d), by));
    }
  }

  template <int kTiles>
  void add_values(int begin, int end, State& state) {
    const int out_bytes = 4 * v_width_;
    for (int d = 0; d < v_width_; d += 32) {
      float *out0 = state.out + d, *out1 = out0 + 16 * v_width_;
      if (state.empty) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      } else {
        _tile_loadd(0, out0, out_bytes);
        _tile_loadd(1, out0 + 16, out_bytes);
        if constexpr (kTiles == 2) {
          _tile_loadd(2, out1, out_bytes);
          _tile_loadd(3, out1 + 16, out_bytes);
        }
      }
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

  const int k_dim_, v_dim_, k_width_, v_width_;
  const bool in_place_;
  bool packed_ = false;
  int first_ = 0;
  int64_t k_token_ = 0;
  uint16_t *k_, *v_, *weights_;
  float* scores_;
  const char* k_rows_[kAttentionBlock];
};

}  // namespace rhizome

#endif
