// Attention of up to four queries on AMX: decodes of one row. K and V are used as they lie in the pages, 16 tokens of a
// page at a time, and fetched ahead of their time: the processor's own prefetching ends at the end of every page of the
// cache, as the next one may be anywhere.
//
// Packing V would take longer than the sums do, so these are made with vectors, in the very order of TDPBF16PS: one
// chain of fused sums for the even tokens of 32, one for the odd ones, and denormals are 0.
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)

#include "attention_amx_tiles.h"
#include "attention_kernel.h"
#include "attention_vectors.h"

namespace rhizome {

constexpr int kGroup = 16;       // tokens; a page has whole groups of them
constexpr int kGroupsAhead = 2;  // that is how far what is fetched is ahead of what is used
constexpr int kMoreGroups = kGroupsAhead + 2;

// One block. `groups` are in the order in which they are wanted: K of the block, V of the block, and `kMoreGroups` that
// are only fetched. What is behind `count` in the last group may be anything.
struct FewBlock {
  const char* const* groups;
  int64_t k_token, v_token;  // bytes from one token of a group to the next
  int k_width, v_dim, v_width, count;

  int num_groups() const { return (count + kGroup - 1) / kGroup; }
};

// Fetches groups line by line, in the order of addresses, which is what main memory likes best, and into the L2 cache
// only: 32 tokens of K, V and the next K are too much for the L1 cache beside what is in use.
class Fetch {
 public:
  Fetch(const char* const* groups, int64_t token_bytes) : groups_(groups), bytes_(kGroup * token_bytes) {}

  template <int kLines>
  void next() {
    for (int i = 0; i < kLines; ++i) _mm_prefetch(groups_[0] + at_ + 64 * i, _MM_HINT_T1);
    at_ += 64 * kLines;
    if (at_ < bytes_) return;
    at_ = 0;
    ++groups_;
  }

 private:
  const char* const* groups_;
  const int64_t bytes_;
  int64_t at_ = 0;
};

// Scores of queries, packed by `AmxKernel::set_queries`, over K as it lies in the pages. Tiles have only the columns
// that are used. Rows of scores are `stride` apart.
template <int kColumns>
inline void score_few(const FewBlock& block, const uint16_t* q, int begin, int end, float* scores, int stride) {
  const int groups = block.num_groups();
  for (int t = begin; t < end; t += 2 * kGroup) {
    const char* const* const group = block.groups + t / kGroup;
    const char *k0 = group[0], *k1 = group[t / kGroup + 1 < groups ? 1 : 0];
    _tile_zero(0);
    _tile_zero(1);
    Fetch ahead(group + kGroupsAhead, block.k_token);
    for (int d = 0; d < block.k_width; d += 64) {
      _tile_loadd(6, q + d * kColumns, 4 * kColumns);
      _tile_loadd(4, k0 + 2 * d, block.k_token);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, k1 + 2 * d, block.k_token);
      _tile_dpbf16ps(1, 5, 6);
      ahead.next<16>();
      ahead.next<16>();
      if (d + 32 == block.k_width) break;
      _tile_loadd(7, q + (d + 32) * kColumns, 4 * kColumns);
      _tile_loadd(2, k0 + 2 * d + 64, block.k_token);
      _tile_dpbf16ps(0, 2, 7);
      _tile_loadd(3, k1 + 2 * d + 64, block.k_token);
      _tile_dpbf16ps(1, 3, 7);
      ahead.next<16>();
      ahead.next<16>();
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

// One token of the chain: the numbers `d` .. d + 32 * kLines - 1 of `v`, of which those from `dim` on are 0.
template <bool kWhole, int kQueries, int kLines>
inline void add_token(const char* v, int d, int dim, const float weights[][kAttentionBlock], int token,
                      __m512 sums[kQueries][kLines][2]) {
  for (int line = 0; line < kLines; ++line) {
    const __m512i both = kWhole ? _mm512_loadu_si512(v + 2 * d + 64 * line) : load_numbers(v, d + 32 * line, dim);
    const __m512 even = (__m512)_mm512_slli_epi32(both, 16);
    const __m512 odd = (__m512)_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
    for (int i = 0; i < kQueries; ++i) {
      const __m512 weight = _mm512_set1_ps(weights[i][token]);
      sums[i][line][0] = _mm512_fmadd_ps(weight, even, sums[i][line][0]);
      sums[i][line][1] = _mm512_fmadd_ps(weight, odd, sums[i][line][1]);
    }
  }
}

constexpr uint32_t kDenormalsAreZero = 0x8040;  // of MXCSR, as operands and as results

// Sums of `kQueries` rows of weights, `stride` apart at `from`, of which `count` are real, over V as it lies in the
// pages. kWhole: the numbers of a head are read in whole pieces of 32 * kLines.
template <int kQueries, int kLines, bool kWhole>
inline void add_values(const FewBlock& block, const uint16_t* from, int stride, int count, int begin, int end,
                           const State& state) {
  const uint32_t control = _mm_getcsr();
  _mm_setcsr(control | kDenormalsAreZero);
  end = std::min(end, block.count);
  alignas(64) float weights[kQueries][kAttentionBlock];
  for (int i = 0; i < kQueries; ++i)
    for (int t = begin; t < end; t += 16)
      _mm512_store_ps(weights[i] + t, i < count ? widen(from + i * stride + t) : __m512{});
  for (int i = 0; i < count; ++i) std::memset(state.out + i * block.v_width, 0, 4 * block.v_width);
  const char* const* const groups = block.groups + block.num_groups();
  for (int t = begin; t < end; t += 2 * kGroup) {
    Fetch ahead(groups + t / kGroup + kGroupsAhead, block.v_token);
    for (int d = 0; d < block.v_width; d += 32 * kLines) {
      // [chain of tokens][query][line][even or odd numbers]
      __m512 sums[2][kQueries][kLines][2] = {};
      for (int first = t; first < std::min(end, t + 2 * kGroup); first += kGroup) {
        const char* v = groups[first / kGroup];
        const int stop = std::min(end, first + kGroup);
        for (int token = first; token < stop; token += 2, v += 2 * block.v_token) {
          ahead.next<2 * kLines>();
          add_token<kWhole, kQueries, kLines>(v, d, block.v_dim, weights, token, sums[0]);
          if (token + 1 < stop)
            add_token<kWhole, kQueries, kLines>(v + block.v_token, d, block.v_dim, weights, token + 1, sums[1]);
        }
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
  const __m512i low = first_pairs_of_both();
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (float* out = state.out; out < state.out + count * block.v_width; out += 32) {
    const __m512 even = _mm512_loadu_ps(out), odd = _mm512_loadu_ps(out + 16);
    _mm512_storeu_ps(out, _mm512_permutex2var_ps(even, low, odd));
    _mm512_storeu_ps(out + 16, _mm512_permutex2var_ps(even, high, odd));
  }
  _mm_setcsr(control);
}

template <int kQueries>
inline void add_values_few(const FewBlock& block, const uint16_t* from, int stride, int count, int begin, int end,
                           const State& state) {
  constexpr int kLines = kQueries <= 2 ? 2 : 1;  // of 32 numbers at once: what fits in the registers
  if (block.v_dim % (32 * kLines) == 0)
    add_values<kQueries, kLines, true>(block, from, stride, count, begin, end, state);
  else
    add_values<kQueries, kLines, false>(block, from, stride, count, begin, end, state);
}

}  // namespace rhizome

#endif
