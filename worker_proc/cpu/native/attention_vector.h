// The attention kernel for any CPU: float32 arithmetic, on float32 or bfloat16 data.
//
// With up to four queries, decodes of one row, numbers are widened in registers as they come from the pages, which are
// fetched ahead of their time: the processor's own prefetching ends at the end of every page of the cache. With more, K
// and V of a block are widened once.
#pragma once

#include <bit>
#include <utility>

#include "attention_kernel.h"
#include "kv_int8.h"
#include "lanes.h"
#include "registers.h"
#include "vector.h"

namespace rhizome {

// A unit are vectors of numbers that are loaded together: where vectors are narrow, two. Then those of bfloat16 come in another
// order, the first numbers of all pairs before the second ones, as they are widened without a shuffle.
inline constexpr int kUnit = kLanes < 16 ? 2 : 1, kUnitNumbers = kUnit * kLanes;

template <int kVectors>
inline void load_unit(const float* from, Floats (&to)[kVectors]) {
  for (int v = 0; v < kVectors; ++v) to[v] = load(from + v * kLanes);
}

inline void load_unit(const uint16_t* from, Floats (&to)[kUnit]) {
  if constexpr (kUnit == 1) {
    to[0] = load(from);
  } else {
    Words both;
    std::memcpy(&both, from, sizeof both);
    to[0] = (Floats)(both << 16), to[kUnit - 1] = (Floats)(both & 0xffff0000u);
  }
}

// Two vectors from the order of `load_unit` to the numbers' own, and the other way round.
template <int... kLane>
inline void put_in_order(Floats& a, Floats& b, std::integer_sequence<int, kLane...>) {
  const Floats low = lanes_of<(kLane % 2 * kLanes + kLane / 2)...>(a, b);
  b = lanes_of<(kLane % 2 * kLanes + (kLanes + kLane) / 2)...>(a, b);
  a = low;
}

template <int... kLane>
inline void put_by_pairs(Floats& a, Floats& b, std::integer_sequence<int, kLane...>) {
  const Floats first = lanes_of<2 * kLane...>(a, b);
  b = lanes_of<(2 * kLane + 1)...>(a, b);
  a = first;
}

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
    return 4 * (kTile * kScoreStride + kAttentionBlock * (k_width + v_stride(batch) + kGap));
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
    in_place_ = source.k_scales == nullptr && whole && num_queries <= kTogether;
    if (source.k_scales != nullptr) {
      source.walk_scales(first, count_, [&](int i, float k_scale, float v_scale) {
        fetch_row(std::min(i + kRowsAhead, count_ - 1), k_dim_);
        fetch_row(count_ + std::min(i + kRowsAhead, count_ - 1), v_dim_);
        widen_codes<true>(rows_[i], k_scale, k_ + i * k_width_, k_dim_, k_width_);
        widen_codes<false>(rows_[count_ + i], v_scale, v_ + i * v_step(), v_dim_, v_width_);
      });
    } else if (!in_place_) {
      for (int i = 0; i < count_; ++i) {
        widen<true>(rows_[i], k_ + i * k_width_, k_dim_, k_width_);
        widen<false>(rows_[count_ + i], v_ + i * v_step(), v_dim_, v_width_);
      }
    }
    if (!in_place_) num_rows_ = 0;  // nothing is fetched any more: it will be in a cache
  }

  // The tokens first .. first + count - 1 of `source`, at most kAttentionBlock, come after this block.
  void expect(const KeySource& source, int first, int count) {
    if (num_rows_ == 0) return;
    source.walk(first, std::min(count, kRowsAhead), [&](int, const char* k, const char*) { rows_[num_rows_++] = k; });
  }

  // Put queries into `memory` (query_bytes) as `attend` needs them.
  void set_queries(const Tile& tile, int /*num_queries*/, char* memory) const {
    auto* q = reinterpret_cast<float*>(memory);
    for (int i = 0; i < tile.count; ++i) widen<true>(tile.q[i], q + i * k_width_, k_dim_, k_width_);
  }

  // The queries of `set_queries` see the part [begin, end) of the block, which holds all that any of them sees of it.
  void attend(const Tile& tile, const char* queries, int begin, int end, const Scores& how, const State& state) {
    begin = (begin - first_) & ~15;
    end -= first_;
    const auto* q = reinterpret_cast<const float*>(queries);
    if (in_place_)
      with_count<kTogether>(tile.count, [&](auto count) { dot_rows<count(), true>(q, 0, begin, end); });
    else
      for (int t = begin; t < end; t += 16)  // which stay in the L1 cache
        by_most(tile.count, [&](int i, auto count) { dot_rows<count(), false>(q, i, t, std::min(t + 16, end)); });
    for (int i = 0; i < tile.count; ++i) {
      const int first = std::max(begin, tile.first[i] - first_), stop = std::min(end, tile.end[i] - first_);
      // Over whole vectors at fixed places, so that sums have the same order whatever else is in the tile.
      softmax(i, begin, round_up(end, 16), first, std::max(first, stop), how, state);
    }
    if (in_place_) {
      // a few tokens at a time, so that others are fetched all the while
      for (int t = begin; t < end; t += kRowsAhead)
        with_count<kTogether>(tile.count, [&](auto count) {
          add_values<count(), true>(0, 0, v_width_, t, std::min(t + kRowsAhead, end), t > begin, t + kRowsAhead >= end, state);
        });
    } else {
      const int columns = tile.count > kTogether ? kColumns : v_width_;  // a few stay in the L1 cache for many queries
      for (int column = 0; column < v_width_; column += columns)
        by_most(tile.count, [&](int i, auto count) {
          add_values<count(), false>(i, column, std::min(column + columns, v_width_), begin, end, false, true, state);
        });
    }
  }

  // As `attend`, and adds the result to `total`, which may be `empty`. `now` is free memory.
  void extend(const Tile& tile, const char* queries, int begin, int end, const Scores& how, const State& total,
              const State& now, bool empty) {
    attend(tile, queries, begin, end, how, empty ? total : now);
    if (!empty) add_block(total, now, tile.count, v_width_);
  }

 private:
  static constexpr int kPad = 16, kSize = sizeof(Element);
  static constexpr bool kTurned = kUnit == 2 && kSize == 2;  // numbers of a unit are in another order
  static constexpr int kTogether = 4;    // queries that go by K and V in pages together
  static constexpr int kMost = kMostSums > kHeldSums ? 6 : 4;  // the same, by what was widened before
  static constexpr int kColumns = kLanes * kMostSums / kMost;  // of V that so many queries go by
  static_assert(kLanes * kMostSums % kMost == 0 && kColumns % kLanes == 0);
  static constexpr int kGap = 16;        // rows a power of two apart would share few sets of the L1 cache
  static constexpr int kRowsAhead = 32;  // of K and V that are fetched ahead
  static constexpr int kRowsAgain = 8;   // after so many others, they are once more
  static constexpr int kScoreStride = kAttentionBlock + 16;  // rows a cache line apart from a power of two share no sets

  int v_step() const { return v_width_ + kGap; }  // numbers from row to row of V that was widened

  // How many vectors of sums a query has, of so many queries: a power of two.
  static constexpr int sums_of(int queries, bool in_place) {
    return static_cast<int>(std::bit_floor(static_cast<unsigned>((in_place ? kHeldSums : kMostSums) / queries)));
  }

  // Calls visit(i, count) for queries [i, i + count) of all `queries`; the second is a constant of at most kMost.
  template <class Visit>
  static void by_most(int queries, Visit&& visit) {
    for (int i = 0; i < queries; i += kMost)
      with_count<kMost>(std::min(kMost, queries - i), [&](auto count) { visit(i, count); });
  }

  // Codes as numbers, padded with zeros to `width`; with kUnits, in the order of `load_unit`.
  template <bool kUnits>
  static void widen_codes(const char* from, float scale, float* to, int dim, int width) {
    const auto* codes = reinterpret_cast<const int8_t*>(from);
    int i = 0;
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (kUnits && kTurned) {
      for (; i + kUnitNumbers <= dim; i += kUnitNumbers) {
        const auto both = (Ints)load(reinterpret_cast<const uint16_t*>(codes + i));  // two codes at the top of a word
        store(to + i, dequantized(both << 8 >> 24, scale));
        store(to + i + kLanes, dequantized(both >> 24, scale));
      }
    } else {
      for (; i + kLanes <= dim; i += kLanes) {
        const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i));
        store(to + i, dequantized((Ints)_mm256_cvtepi8_epi32(eight), scale));
      }
    }
#endif
    const int turned = i / kUnitNumbers * kUnitNumbers;
    for (; i < dim; ++i) to[i] = rhizome::dequantized<Element>(codes[i], scale);
    for (; i < width; ++i) to[i] = 0;
    if constexpr (kUnits) turn(to, turned, width);
  }

  static Floats dequantized(Ints codes, float scale) {
    const Floats numbers = __builtin_convertvector(codes, Floats) * scale;
    if constexpr (kSize == 4) return numbers;
    const auto bits = (Words)numbers;
    return (Floats)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
  }

  // Numbers [begin, end), whole units, to the order of `load_unit`.
  static void turn(float* numbers, int begin, int end) {
    if constexpr (kTurned)
      for (float* at = numbers + begin; at < numbers + end; at += kUnitNumbers) {
        Floats a = load(at), b = load(at + kLanes);
        put_by_pairs(a, b, std::make_integer_sequence<int, kLanes>());
        store(at, a), store(at + kLanes, b);
      }
  }

  // `from` as floats, padded with zeros to `width`; with kUnits, in the order of `load_unit`.
  template <bool kUnits>
  static void widen(const char* from, float* to, int dim, int width) {
    const auto* numbers = reinterpret_cast<const Element*>(from);
    int i = 0;
    if constexpr (kUnits) {
      for (; i + kUnitNumbers <= dim; i += kUnitNumbers) {
        Floats unit[kUnit];
        load_unit(numbers + i, unit);
        for (int v = 0; v < kUnit; ++v) store(to + i + v * kLanes, unit[v]);
      }
    }
    const int turned = i;
    for (; i + kLanes <= dim; i += kLanes) store(to + i, load(numbers + i));
    for (; i < dim; ++i) {
      if constexpr (sizeof(Element) == 4)
        to[i] = numbers[i];
      else
        to[i] = to_float(numbers[i]);
    }
    for (; i < width; ++i) to[i] = 0;
    if constexpr (kUnits) turn(to, turned, width);
  }

  // Row `i` of K, V and what is expected, in the order of their use, and once more an earlier one, as LinesAhead does. Always
  // inlined: g++ 12 takes a function that only fetches for one without effects, and leaves out its calls.
  __attribute__((always_inline)) void fetch_row(int i, int bytes) const {
    if (i < num_rows_) fetch_lines(rows_[i], bytes);
    if (i >= kRowsAgain && i - kRowsAgain < num_rows_) fetch_lines(rows_[i - kRowsAgain], bytes);
  }

  __attribute__((always_inline)) static void fetch_lines(const char* row, int bytes) {
#pragma GCC unroll 4
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
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
      return static_cast<const float*>(v_ + t * v_step());
  }

  // Scores of queries [i, i + kQueries): a few tokens at a time, so that many sums are under way, and all of these are
  // added up over their lanes together. What is behind `end`, up to the next 16 tokens, becomes anything.
  template <int kQueries, bool kInPlace>
  void dot_rows(const float* queries, int i, int begin, int end) {
    constexpr int kTokens = sums_of(kQueries, kInPlace), kSums = (kQueries * kTokens + kLanes - 1) / kLanes * kLanes;
    const float* const q = queries + i * k_width_;
    for (int t = begin; t < end; t += kTokens) {
      decltype(key<kInPlace>(0)) k[kTokens];
      for (int n = 0; n < kTokens; ++n) k[n] = key<kInPlace>(std::min(t + n, count_ - 1));
      if constexpr (kInPlace)
        for (int n = 0; n < kTokens; ++n) fetch_row(t + n + kRowsAhead, k_dim_ * kSize);
      Floats sums[kSums] = {};
      constexpr int kVectors = kInPlace ? kUnit : 1;  // fewer registers where there are many sums
      for (int d = 0; d < k_width_; d += kVectors * kLanes) {
        Floats numbers[kTokens][kVectors];
        for (int n = 0; n < kTokens; ++n) load_unit(k[n] + d, numbers[n]);
        for (int v = 0; v < kVectors; ++v)
          for (int j = 0; j < kQueries; ++j) {
            Floats query = load(q + j * k_width_ + d + v * kLanes);
            query = held(query);
            for (int n = 0; n < kTokens; ++n) sums[j * kTokens + n] += query * numbers[n][v];
          }
      }
      float scores[kSums];
      for (int n = 0; n < kSums; n += kLanes) store(scores + n, reduce_each(sums + n));
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

  // Results of queries [i, i + kQueries) in the columns [column, stop), of the tokens [begin, end); `adding` to those of the
  // tokens before. They are in order after the `last` ones.
  template <int kQueries, bool kInPlace, int kVectors = std::min(sums_of(kQueries, kInPlace), 8)>
  void add_values(int i, int column, int stop, int begin, int end, bool adding, bool last, const State& state) {
    constexpr int kWide = kInPlace ? kUnit : 1, kUnits = kVectors / kWide;
    for (; column + kVectors * kLanes <= stop; column += kVectors * kLanes) {
      Floats sums[kQueries][kUnits][kWide] = {};
      float* const out = state.out + i * v_width_ + column;
      if (adding)
        for (int j = 0; j < kQueries; ++j)
          for (int n = 0; n < kVectors; ++n) sums[j][n / kWide][n % kWide] = load(out + j * v_width_ + n * kLanes);
      const float* const weights = scores_ + i * kScoreStride;
      for (int t = begin; t < end; ++t) {
        if constexpr (kInPlace)
          if (column == 0) fetch_row(count_ + t + kRowsAhead, v_dim_ * kSize);
        const auto* const v = value<kInPlace>(t) + column;
        Floats numbers[kUnits][kWide];
        for (int n = 0; n < kUnits; ++n) load_unit(v + n * kWide * kLanes, numbers[n]);
        for (int j = 0; j < kQueries; ++j) {
          Floats weight = broadcast(weights[j * kScoreStride + t]);
          weight = held(weight);
          for (int n = 0; n < kUnits; ++n)
            for (int u = 0; u < kWide; ++u) sums[j][n][u] += weight * numbers[n][u];
        }
      }
      for (int j = 0; j < kQueries; ++j)
        for (int n = 0; n < kUnits; ++n) {
          if constexpr (kInPlace && kTurned)
            if (last) put_in_order(sums[j][n][0], sums[j][n][1], std::make_integer_sequence<int, kLanes>());
          for (int u = 0; u < kWide; ++u) store(out + j * v_width_ + (n * kWide + u) * kLanes, sums[j][n][u]);
        }
    }
    if constexpr (kUnits > 1)
      add_values<kQueries, kInPlace, kVectors / 2>(i, column, stop, begin, end, adding, last, state);
  }

  const int k_dim_, v_dim_, k_width_, v_width_;
  bool in_place_ = false;  // K and V are read where they are
  int first_ = 0, count_ = 0, num_rows_ = 0;
  float *scores_, *k_, *v_;
  const char* rows_[2 * kAttentionBlock + kRowsAhead];  // K, then V, then what is expected
};

}  // namespace rhizome
