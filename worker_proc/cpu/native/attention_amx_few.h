// Attention of up to four queries on AMX: decodes of one row. K and V are used as they lie in the pages, and fetched
// ahead of their time: the processor's own prefetching ends at the end of every page of the cache, as the next one may
// be anywhere.
//
// Packing V would take longer than the sums do, so these are made with vectors, in the very order of TDPBF16PS: one
// chain of fused sums for the even tokens of 32, one for the odd ones, and denormals are 0.
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)

#include "amx_vectors.h"
#include "attention_kernel.h"

namespace rhizome {

constexpr int kTokensAhead = 32;

// Rows of `count` tokens: of K up to a multiple of 32 (the last may be anything), and of V `kTokensAhead` more, which are
// fetched but not used.
struct FewBlock {
  const char* const* k_rows;
  const char* const* v_rows;
  int64_t k_token;  // bytes from one token of a page to the next
  int k_width, v_dim, v_width, count;
};

// Scores of queries, packed by `AmxKernel::set_queries`, over K as it lies in the pages. Tiles have only the columns
// that are used. Rows of scores are `stride` apart.
template <int kColumns>
inline void score_few(const FewBlock& block, const uint16_t* q, int begin, int end, float* scores, int stride) {
  for (int t = begin; t < end; t += 32) {
    const char *k0 = block.k_rows[t], *k1 = block.k_rows[t + 16];
    _tile_zero(0);
    _tile_zero(1);
    // K of the next tokens, and after the last of them the first values.
    const char* const* const next = t + 32 < end ? block.k_rows + t + 32 : block.v_rows + begin;
    for (int d = 0; d < block.k_width; d += 64) {
      _tile_loadd(6, q + d * kColumns, 4 * kColumns);
      _tile_loadd(4, k0 + 2 * d, block.k_token);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, k1 + 2 * d, block.k_token);
      _tile_dpbf16ps(1, 5, 6);
      for (int i = 0; i < 32; ++i) _mm_prefetch(next[i] + 2 * d, _MM_HINT_T0);
      if (d + 32 == block.k_width) break;
      _tile_loadd(7, q + (d + 32) * kColumns, 4 * kColumns);
      _tile_loadd(2, k0 + 2 * d + 64, block.k_token);
      _tile_dpbf16ps(0, 2, 7);
      _tile_loadd(3, k1 + 2 * d + 64, block.k_token);
      _tile_dpbf16ps(1, 3, 7);
      for (int i = 0; i < 32; ++i) _mm_prefetch(next[i] + 2 * d + 64, _MM_HINT_T0);
    }
    if constexpr (kColumns == 1) {
      _tile_stored(0, scores + t, 4);
      _tile_stored(1, scores + t + 16, 4);
    } else {
      alignas(64) float turned[32 * kColumns];
      _tile_stored(0, turned, 4 * kColumns);
      _tile_stored(1, turned + 16 * kColumns, 4 * kColumns);
      turn<kColumns>(turned, scores + t, stride);
      turn<kColumns>(turned + 16 * kColumns, scores + t + 16, stride);
    }
  }
}

// 16 weights as float32.
inline __m512 widen(const uint16_t* weights) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights));
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

template <int kChain, int kQueries, int kLines>
inline void add_token(const FewBlock& block, const float weights[][kAttentionBlock], int token, int d,
                      __m512 sums[2][kQueries][kLines][2]) {
  for (int line = 0; line < kLines; ++line) {
    _mm_prefetch(block.v_rows[token + kTokensAhead] + 2 * d + 64 * line, _MM_HINT_T0);
    const __m512i both = load_numbers(block.v_rows[token], d + 32 * line, block.v_dim);
    const __m512 even = (__m512)_mm512_slli_epi32(both, 16);
    const __m512 odd = (__m512)_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
    for (int i = 0; i < kQueries; ++i) {
      const __m512 weight = _mm512_set1_ps(weights[i][token]);
      sums[kChain][i][line][0] = _mm512_fmadd_ps(weight, even, sums[kChain][i][line][0]);
      sums[kChain][i][line][1] = _mm512_fmadd_ps(weight, odd, sums[kChain][i][line][1]);
    }
  }
}

constexpr uint32_t kDenormalsAreZero = 0x8040;  // of MXCSR, as operands and as results

// Sums of `kQueries` rows of weights, `stride` apart at `from`, of which `count` are real, over V as it lies in the
// pages.
template <int kQueries>
inline void add_values_few(const FewBlock& block, const uint16_t* from, int stride, int count, int begin, int end,
                           const State& state) {
  constexpr int kLines = kQueries <= 2 ? 2 : 1;  // of 32 numbers at once: what fits in the registers
  const uint32_t control = _mm_getcsr();
  _mm_setcsr(control | kDenormalsAreZero);
  end = std::min(end, block.count);
  alignas(64) float weights[kQueries][kAttentionBlock];
  for (int i = 0; i < kQueries; ++i)
    for (int t = begin; t < end; t += 16)
      _mm512_store_ps(weights[i] + t, i < count ? widen(from + i * stride + t) : __m512{});
  for (int i = 0; i < count; ++i) std::memset(state.out + i * block.v_width, 0, 4 * block.v_width);
  for (int t = begin; t < end; t += 32) {
    const int stop = std::min(end, t + 32);
    for (int d = 0; d < block.v_width; d += 32 * kLines) {
      // [chain of tokens][query][line][even or odd numbers]
      __m512 sums[2][kQueries][kLines][2] = {};
      for (int token = t; token < stop; token += 2) {
        add_token<0, kQueries, kLines>(block, weights, token, d, sums);
        if (token + 1 < stop) add_token<1, kQueries, kLines>(block, weights, token + 1, d, sums);
      }
      for (int i = 0; i < count; ++i)
        for (int line = 0; line < kLines && d + 32 * line < block.v_width; ++line) {
          float* out = state.out + i * block.v_width + d + 32 * line;
          for (int odd = 0; odd < 2; ++odd)
            _mm512_storeu_ps(out + 16 * odd, _mm512_add_ps(_mm512_loadu_ps(out + 16 * odd),
                                                          sums[0][i][line][odd] + sums[1][i][line][odd]));
        }
    }
  }
  // Even and odd numbers apart become numbers in order.
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (float* out = state.out; out < state.out + count * block.v_width; out += 32) {
    const __m512 even = _mm512_loadu_ps(out), odd = _mm512_loadu_ps(out + 16);
    _mm512_storeu_ps(out, _mm512_permutex2var_ps(even, low, odd));
    _mm512_storeu_ps(out + 16, _mm512_permutex2var_ps(even, high, odd));
  }
  _mm_setcsr(control);
}

}  // namespace rhizome

#endif
