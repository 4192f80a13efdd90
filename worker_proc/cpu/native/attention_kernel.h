// What the two attention kernels (attention_vector.h, attention_amx.h) are given and give back.
//
// A kernel holds one block of K and V of one KV head and lets tiles of queries attend to it. Arithmetic is per query:
// which queries share a tile changes no bit of any of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention.h"
#include "vector.h"

namespace rhizome {

constexpr int kTile = 32;  // queries that a kernel takes at once
constexpr float kLog2E = 1.44269504088896340736f;

// Calls function(count) with a constant, 1 to kMost.
template <int kMost = 4, class Function>
inline void with_count(int count, Function&& function) {
  if constexpr (kMost > 1)
    if (count < kMost) return with_count<kMost - 1>(count, function);
  return function(std::integral_constant<int, kMost>());
}

inline int round_up(int value, int step) { return (value + step - 1) / step * step; }

// Where K and V of one KV head of one row are. Pointers to the first number of a token's head.
struct KeySource {
  const char* k;  // page 0, token 0 of this head
  const char* v;
  int64_t k_page, k_token, v_page, v_token;  // strides in bytes
  const int32_t* pages;
  int page_size;
  const float* k_scales;  // page 0, token 0 of this head; null where nothing is quantized
  const float* v_scales;
  int64_t scale_page;     // stride in numbers

  // Calls visit(i, k, v) for the tokens first + i, i in 0 .. count - 1.
  template <class Visit>
  void walk(int first, int count, Visit&& visit) const {
    int page = first / page_size, offset = first % page_size;
    for (int i = 0; i < count; ++page, offset = 0) {
      const char* k_at = k + pages[page] * k_page + offset * k_token;
      const char* v_at = v + pages[page] * v_page + offset * v_token;
      for (const int stop = std::min(count, i + page_size - offset); i < stop; ++i, k_at += k_token, v_at += v_token)
        visit(i, k_at, v_at);
    }
  }

  // Calls visit(i, k, v) for the groups of `size` tokens, of which a page has whole ones, from token `first` on, which
  // one begins with: k and v of the first token of group i.
  template <class Visit>
  void walk_groups(int first, int count, int size, Visit&& visit) const {
    for (int i = 0; i < count; ++i, first += size) {
      const int page = pages[first / page_size], offset = first % page_size;
      visit(i, k + page * k_page + offset * k_token, v + page * v_page + offset * v_token);
    }
  }

  // Calls visit(i, scale of k, scale of v) as `walk` does.
  template <class Visit>
  void walk_scales(int first, int count, Visit&& visit) const {
    int page = first / page_size, offset = first % page_size;
    for (int i = 0; i < count; ++page, offset = 0) {
      int64_t at = pages[page] * scale_page + offset;
      for (const int stop = std::min(count, i + page_size - offset); i < stop; ++i, ++at)
        visit(i, k_scales[at], v_scales[at]);
    }
  }
};

// Queries: where they are, and which positions [first, end) of the context they see.
struct Tile {
  int count = 0;
  const char* q[kTile];
  int first[kTile];
  int end[kTile];
};

// Softmax over a part of the context, in base 2: sum = sum of 2^(score - shift), out = the same sum weighted by v.
struct State {
  float* out;    // [kTile, v_stride]; rows beyond the tile's count hold anything
  float* shift;  // [kTile]: a score at or below the highest; -inf where a query sees nothing of the part
  float* sum;    // [kTile]
};

struct Scores {
  float scale;  // to base 2, soft cap excepted
  float softcap;

  Scores(float factor, float cap) : scale(factor * (cap > 0 ? 1.0f : kLog2E)), softcap(cap) {}
};

// What is subtracted from scores: anything where there are none.
inline float finite(float shift) { return shift == -std::numeric_limits<float>::infinity() ? 0.0f : shift; }

// Adds the results of a block to those of the blocks before it. The same code for all callers, and so the same bits.
class Merge {
 public:
  Merge() = default;

  // Brings shifts and sums of `total` up to date, so that every row of `out` must be added afterwards.
  __attribute__((noinline)) Merge(const State& total, const float* shift, const float* sum, int count) {
    for (int i = 0; i < count; ++i) {
      const float highest = std::max(total.shift[i], shift[i]);
      old_factors_[i] = total.shift[i] - finite(highest);
      factors_[i] = shift[i] - finite(highest);
      total.shift[i] = highest;
    }
    for (int i = 0; i < count; i += kLanes) {
      store(old_factors_ + i, exp2(load(old_factors_ + i)));
      store(factors_ + i, exp2(load(factors_ + i)));
    }
    for (int i = 0; i < count; ++i) total.sum[i] = total.sum[i] * old_factors_[i] + sum[i] * factors_[i];
  }

  // `count` numbers, whole vectors, of row i.
  void add(int i, int count, const float* from, float* to) const {
    for (int d = 0; d < count; d += kLanes)
      store(to + d, multiply_add(load(to + d), broadcast(old_factors_[i]), load(from + d) * factors_[i]));
  }

 private:
  alignas(64) float old_factors_[kTile] = {}, factors_[kTile] = {};
};

// Adds the results of a block to those of the blocks before it, `count` rows of `width` numbers.
inline void add_block(const State& total, const State& block, int count, int width) {
  const Merge merge(total, block.shift, block.sum, count);
  for (int i = 0; i < count; ++i) merge.add(i, width, block.out + i * width, total.out + i * width);
}

}  // namespace rhizome
