// The products of a task with rows in int8 (segment_rows.h) and weights of 4 bits, by dot products of bytes (VPDPBUSD). A
// segment's sum of codes times x is exact, in any order; then it is scaled, by what the group's weights and the segment's x
// count, and added in float32. Weights are not rounded to anything, and the results are the same for any number of rows.
//
// Of eight inputs of 16 outputs, four share a vector of bytes with the other four: [16 outputs][4], one in the lower halves of
// bytes and one in the upper halves.
#pragma once

#include "linear_task_int8.h"
#include "segment_rows.h"

#if defined(RHIZOME_INT8_DOTS)

namespace rhizome {

inline constexpr int kMostNibbleRows = kByteRuns == 1 ? 9 : kMostByteRows;  // with sums of 10, codes lack registers
inline constexpr int kNibbleTurns = 4;  // calls of `ahead` per block, one for each eight inputs
inline constexpr int64_t kTileNibbles = kTileElements / 2;  // bytes
inline constexpr int64_t kApartNibbles = kByteRuns == 1 ? kTileNibbles : 32;

// Rows of x from a block of inputs on, and the sums of a panel, [rows][32].
struct NibbleRows {
  const int8_t* x;
  int64_t x_stride;
  float* sums;
  bool adding;
};

#if defined(__AVX512F__)
inline Bytes lower_halves(Bytes bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
inline Bytes upper_halves(Bytes bytes) { return lower_halves(_mm512_srli_epi16(bytes, 4)); }
inline Bytes all_of(int32_t number) { return _mm512_set1_epi32(number); }
inline floats fused_sum(floats a, floats b, floats c) { return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#else
inline Bytes lower_halves(Bytes bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
inline Bytes upper_halves(Bytes bytes) { return lower_halves(_mm256_srli_epi16(bytes, 4)); }
inline Bytes all_of(int32_t number) { return _mm256_set1_epi32(number); }
inline floats fused_sum(floats a, floats b, floats c) { return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#endif

// Codes of two vectors of outputs, eight inputs after eight, as they lie in memory.
class NibblesInPassing {
 public:
  explicit NibblesInPassing(const uint8_t* codes) : at_(codes) {}

  void next(Bytes (&first)[2], Bytes (&second)[2]) {
    for (int v = 0; v < 2; ++v) {
      const Bytes both = load_bytes(at_ + v * kApartNibbles);
      first[v] = lower_halves(both), second[v] = upper_halves(both);
    }
    at_ += 64;
  }
  void next_block() { at_ += kTileNibbles; }  // over the other tile

 private:
  const uint8_t* at_;
};

// The same, a byte each, as they are used.
class WideNibbles {
 public:
  explicit WideNibbles(const uint8_t* codes) : at_(codes) {}

  void next(Bytes (&first)[2], Bytes (&second)[2]) {
    for (int v = 0; v < 2; ++v)
      first[v] = load_bytes(at_ + v * sizeof(Bytes)), second[v] = load_bytes(at_ + (2 + v) * sizeof(Bytes));
    at_ += 4 * sizeof(Bytes);
  }
  void next_block() {}

 private:
  const uint8_t* at_;
};

// Where a pass works: blocks [step, step + now) of a panel, and vectors of outputs from `output` on.
struct NibblePlace {
  const PackedMatrix& weights;
  int64_t panel, step, now;
  int output;
};

template <int kRows, bool kZeros, class Codes>
__attribute__((noinline)) void nibble_pass(const NibblePlace& place, const NibbleRows& rows, Codes codes, LinesAhead& outside) {
  LinesAhead ahead = outside;  // in registers
  const PackedMatrix& weights = place.weights;
  const int64_t all = blocks(weights.inputs), of_segment = segment_steps(weights), segments = (all + of_segment - 1) / of_segment;
  const int64_t end = place.step + place.now;
  const int8_t* x = rows.x;
  const int8_t* const behind = x + 32 * (all - place.step);  // the numbers of a row
  for (int64_t step = place.step; step < end;) {
    const int64_t segment = step / of_segment, stop = std::min(end, (segment + 1) * of_segment);
    const auto sum_of = [&](int row) {
      int32_t sum;
      std::memcpy(&sum, behind + row * rows.x_stride + 4 * (segments + segment), sizeof sum);
      return sum;
    };
    Bytes sums[kRows][2];
#pragma GCC unroll 9
    for (int row = 0; row < kRows; ++row) sums[row][0] = sums[row][1] = all_of(kZeros ? 0 : -8 * sum_of(row));
    const bool adding = rows.adding || step > place.step;
    const int64_t at = (place.panel * groups(weights) + step * 32 / weights.group) * kPanel + place.output;
    for (; step < stop; ++step, codes.next_block())
      for (int turn = 0; turn < kNibbleTurns; ++turn, x += 8) {
        ahead();
        Bytes first[2], second[2];
        codes.next(first, second);
#pragma GCC unroll 9
        for (int row = 0; row < kRows; ++row) {
          int32_t four;
          std::memcpy(&four, x + row * rows.x_stride, sizeof four);
          sums[row][0] = byte_dots(sums[row][0], first[0], four);
          sums[row][1] = byte_dots(sums[row][1], first[1], four);
        }
#pragma GCC unroll 9
        for (int row = 0; row < kRows; ++row) {
          int32_t four;
          std::memcpy(&four, x + row * rows.x_stride + 4, sizeof four);
          sums[row][0] = byte_dots(sums[row][0], second[0], four);
          sums[row][1] = byte_dots(sums[row][1], second[1], four);
        }
      }
    const floats scales[2] = {load(weights.scales + at), load(weights.scales + at + kLanes)};
#pragma GCC unroll 9
    for (int row = 0; row < kRows; ++row) {
      float unit;
      std::memcpy(&unit, behind + row * rows.x_stride + 4 * segment, sizeof unit);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        float* const to = rows.sums + row * kPanel + place.output + v * kLanes;
        floats sum = __builtin_convertvector((ints)sums[row][v], floats);
        if constexpr (kZeros)
          sum = fused_sum(load(weights.zeros + at + v * kLanes), splat(-static_cast<float>(sum_of(row))), sum);
        store(to, fused_sum(sum, scales[v] * splat(unit), adding ? load(to) : splat(0)));
      }
    }
  }
  outside = ahead;
}

template <bool kZeros, class Codes, int... kCounts>
inline void nibble_pass_of(int count, const NibblePlace& place, const NibbleRows& rows, Codes codes, LinesAhead& ahead,
                           std::integer_sequence<int, kCounts...>) {
  using Pass = void (*)(const NibblePlace&, const NibbleRows&, Codes, LinesAhead&);
  static constexpr Pass kPasses[] = {nibble_pass<kCounts + 1, kZeros, Codes>...};
  kPasses[count - 1](place, rows, codes, ahead);
}

// One piece, for one pass of rows after the other.
class NibblePiece {
 public:
  static int64_t most_steps(const PackedMatrix& /*weights*/, int64_t rows) { return passes(rows) == 1 ? 4 * kSteps : kSteps; }

  // `following` is the block with which the thread goes on after this piece.
  NibblePiece(const PackedMatrix& weights, const Piece& piece, int64_t following, int64_t rows)
      : weights_(weights), piece_(piece), codes_(codes_at(weights, piece.panel, piece.step)),
        ahead_(piece_ahead(weights, following, piece.now, piece.now * kNibbleTurns * kByteRuns * passes(rows))) {
    if (passes(rows) == 1) return;
    alignas(64) static thread_local uint8_t room[kSteps * kBlockWeights];
    wide_ = room;
    for (int run = 0; run < kByteRuns; ++run) {
      NibblesInPassing codes(codes_ + run * kTileNibbles);
      uint8_t* to = room + run * piece.now * kTileElements;
      for (int64_t step = 0; step < piece.now; ++step, codes.next_block())
        for (int turn = 0; turn < kNibbleTurns; ++turn, to += 4 * sizeof(Bytes)) {
          Bytes first[2], second[2];
          codes.next(first, second);
          for (int v = 0; v < 2; ++v)
            store_bytes(to + v * sizeof(Bytes), first[v]), store_bytes(to + (2 + v) * sizeof(Bytes), second[v]);
        }
    }
  }

  // At most kBlockRows rows.
  void multiply(int count, const NibbleRows& rows) {
    for (int done = 0, left = passes(count); done < count; --left) {
      const int now = (count - done + left - 1) / left;
      const NibbleRows some{rows.x + done * rows.x_stride, rows.x_stride, rows.sums + done * kPanel, rows.adding};
      for (int run = 0; run < kByteRuns; ++run) {
        const NibblePlace place{weights_, piece_.panel, piece_.step, piece_.now, run * kTile};
        if (wide_ != nullptr)
          pass(now, place, some, WideNibbles(wide_ + run * piece_.now * kTileElements));
        else
          pass(now, place, some, NibblesInPassing(codes_ + run * kTileNibbles));
      }
      done += now;
    }
  }

 private:
  static int passes(int64_t rows) { return rows <= kMostNibbleRows ? 1 : static_cast<int>((rows + kByteRows - 1) / kByteRows); }

  template <class Codes>
  void pass(int count, const NibblePlace& place, const NibbleRows& rows, Codes codes) {
    constexpr auto kCounts = std::make_integer_sequence<int, kMostNibbleRows>();
    if (weights_.zeros != nullptr)
      nibble_pass_of<true>(count, place, rows, codes, ahead_, kCounts);
    else
      nibble_pass_of<false>(count, place, rows, codes, ahead_, kCounts);
  }

  const PackedMatrix& weights_;
  const Piece& piece_;
  const uint8_t* const codes_;
  const uint8_t* wide_ = nullptr;  // a byte each, where there are several passes
  LinesAhead ahead_;
};

template <class Before, class Then>
void multiply_nibbles(const PackedMatrix& weights, const int8_t* x, int64_t x_stride, const Range& range, Before& before, Then& then) {
  multiply_pieces<NibblePiece, NibbleRows>(weights, x, x_stride, range, before, then);
}

}  // namespace rhizome

#endif
