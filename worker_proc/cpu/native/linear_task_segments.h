// The products of a task with rows in int8 (segment_rows.h) and weights in groups, as bytes (segment_sums.h). A
// segment's sum of codes times x is exact, in any order; then it is scaled, by what the group's weights and the segment's x
// count, and added in float32. Weights are not rounded to anything, and the results are the same for any number of rows.
//
// In 4 bits, of eight inputs of 16 outputs, four share a vector of bytes with the other four: [16 outputs][4], one in the lower
// halves of bytes and one in the upper halves. In 8 bits they are two such vectors.
#pragma once

#include <utility>

#include "linear_panels.h"
#include "linear_task_pieces.h"
#include "segment_rows.h"
#include "segment_sums.h"

#if defined(RHIZOME_SEGMENTS)

namespace rhizome {

inline constexpr int kMostSegmentRows = kByteRuns == 1 ? 9 : kMostByteRows;  // with sums of 10, codes lack registers

// Rows of x from a block of inputs on, and the sums of a panel, [rows][32].
struct ByteSegments {
  const int8_t* x;
  int64_t x_stride;
  float* sums;
  bool adding;
};

inline Bytes lower_halves(Bytes bytes) { return (Bytes)((words)bytes & 0x0f0f0f0fu); }
inline Bytes upper_halves(Bytes bytes) { return lower_halves((Bytes)((words)bytes >> 4)); }
inline Bytes all_of(int32_t number) { return (Bytes)(ints{} + number); }
#if defined(__AVX512F__)
inline Bytes looked_up(__m128i table, Bytes codes) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes); }
#else
inline Bytes looked_up(__m128i table, Bytes codes) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes); }
#endif

// Codes of two vectors of outputs, eight inputs after eight, as they lie in memory. FP4's become its numbers, kMostFloat4 more.
template <Format kFormat>
class CodesOfEight {
 public:
  static constexpr bool kNibbles = in_nibbles(kFormat);
  static constexpr int kMiddle = middle_number(kFormat);
  static constexpr int kMost = is_float4(kFormat) ? 2 * kMostFloat4 : kNibbles ? 15 : 255;
  static constexpr int64_t kTileCodes = kNibbles ? kTileElements / 2 : kTileElements;
  static constexpr int kInTurn = kNibbles ? kNibblesInTurn : kBytesInTurn;

  explicit CodesOfEight(const uint8_t* codes) : at_(codes) {}

  // Of four inputs and vector v of outputs.
  template <bool kOthers>
  Bytes four(int v) const {
    const uint8_t* const from = at_ + v * kApart;
    Bytes codes = load_bytes(!kNibbles && kOthers ? from + 64 : from);
    if constexpr (kNibbles) codes = kOthers ? upper_halves(codes) : lower_halves(codes);
    if constexpr (is_float4(kFormat)) codes = looked_up(numbers(), codes);
    return codes;
  }
  void next_eight() { at_ += kNibbles ? 64 : 128; }
  void next_block() { at_ += kTileCodes; }  // over the other tile

 private:
  static constexpr int64_t kApart = kByteRuns == 1 ? kTileCodes : 32;

  static __m128i numbers() {
    const __m128i signed_numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kFloat4Numbers));
    return _mm_add_epi8(signed_numbers, _mm_set1_epi8(kMostFloat4));
  }

  const uint8_t* at_;
};

// Those of 4 bits, a byte each, in the order in which they are used.
template <Format kFormat>
class WideNibbles {
 public:
  static constexpr int kMiddle = CodesOfEight<kFormat>::kMiddle, kMost = CodesOfEight<kFormat>::kMost, kInTurn = 0;

  explicit WideNibbles(const uint8_t* codes) : at_(codes) {}

  template <bool kOthers>
  Bytes four(int v) const {
    return load_bytes(at_ + (2 * kOthers + v) * sizeof(Bytes));
  }
  void next_eight() { at_ += 4 * sizeof(Bytes); }
  void next_block() {}

 private:
  const uint8_t* at_;
};

// Where a pass works: blocks [step, step + now) of a panel, and vectors of outputs from `output` on.
struct SegmentPlace {
  const PackedMatrix& weights;
  int64_t panel, step, now;
  int output;
};

// kShort: segments are of one block.
template <int kRows, Format kFormat, bool kZeros, bool kShort, class Codes>
__attribute__((noinline)) void segment_pass(const SegmentPlace& place, const ByteSegments& rows, Codes codes, LinesAhead& outside) {
  LinesAhead ahead = outside;  // in registers
  const PackedMatrix& weights = place.weights;
  const int64_t all = blocks(weights.inputs), of_segment = segment_steps(weights), segments = (all + of_segment - 1) / of_segment;
  const int64_t end = place.step + place.now, all_groups = groups(weights);
  const int8_t* x = rows.x;
  int64_t x_stride = rows.x_stride;
  float* const to = rows.sums + place.output;
  if (!rows.adding) clear_sums<kRows, 2>(to);
  const int8_t* const behind = x + 32 * (all - place.step);  // the numbers of a row
  for (int64_t step = place.step; step < end;) {
    const int64_t segment = step / of_segment, stop = std::min(end, (segment + 1) * of_segment);
    const auto sum_of = [&](int row) {
      int32_t sum;
      std::memcpy(&sum, behind + row * x_stride + 4 * (segments + segment), sizeof sum);
      return sum;
    };
    const auto first_of = [&](int row) { return all_of(kZeros ? 0 : -Codes::kMiddle * sum_of(row)); };
    Bytes sums[kRows][2];
    x_stride = held_stride(x_stride);
    const int64_t group = step * 32 / weights.group;
    sum_segment<kShort>(sums, first_of, stop - step, x, x_stride, codes, ahead);
    x += 32 * (stop - step), step = stop;
    const bool less = kZeros && has_below(weights);
    GroupScales scales[2];
    for (int v = 0; v < 2; ++v) {
      const int output = place.output + v * kLanes;
      if constexpr (is_float4(kFormat))
        scales[v] = {load_scales(scales_of<kFormat>(weights) + (place.panel * all_groups + group) * kPanel + output), splat(0)};
      else
        scales[v] = scales_at(weights, place.panel, all_groups, group, output);
    }
#pragma GCC unroll 9
    for (int row = 0; row < kRows; ++row) {
      float unit;
      std::memcpy(&unit, behind + row * x_stride + 4 * segment, sizeof unit);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        float* const at = to + row * kPanel + v * kLanes;
        floats sum = __builtin_convertvector((ints)sums[row][v], floats);
        floats scale = scales[v].scale;
        if constexpr (kZeros) {
          if (less) {
            sum *= scale, scale = splat(1);
            sum = held(sum);  // is rounded
          }
          sum = fused_sum(scales[v].zero, splat(-static_cast<float>(sum_of(row))), sum);
        }
        store(at, fused_sum(sum, scale * splat(unit), load(at)));
      }
    }
  }
  outside = ahead;
}

template <Format kFormat, bool kZeros, bool kShort, class Codes, int... kCounts>
inline void segment_pass_of(int count, const SegmentPlace& place, const ByteSegments& rows, Codes codes, LinesAhead& ahead,
                           std::integer_sequence<int, kCounts...>) {
  using Pass = void (*)(const SegmentPlace&, const ByteSegments&, Codes, LinesAhead&);
  static constexpr Pass kPasses[] = {segment_pass<kCounts + 1, kFormat, kZeros, kShort, Codes>...};
  kPasses[count - 1](place, rows, codes, ahead);
}

// One piece, for one pass of rows after the other.
template <Format kFormat>
class SegmentPiece {
  using Codes = CodesOfEight<kFormat>;

 public:
  // Pieces are of 16 KiB where one pass takes all rows: in shorter ones, what is fetched ahead would come too late.
  static int64_t most_steps(const PackedMatrix& /*weights*/, int64_t rows) {
    return passes(rows) == 1 ? (Codes::kNibbles ? 4 : 2) * kSteps : kSteps;
  }

  // `following` is the block with which the thread goes on after this piece.
  SegmentPiece(const PackedMatrix& weights, const Piece& piece, int64_t following, int64_t rows)
      : weights_(passes(rows) > 1 ? opened(weights, piece.panel, piece.step, piece.now) : weights), piece_(piece),
        codes_(codes_at(weights, piece.panel, piece.step)),
        ahead_(Codes::kInTurn > 0 && found_ahead(rows)
                   ? LinesAhead()
                   : piece_ahead(weights, following, piece.now, piece.now * kSegmentTurns * kByteRuns * passes(rows))) {
    if (!Codes::kNibbles || passes(rows) == 1) return;
    alignas(64) static thread_local uint8_t room[kSteps * kBlockWeights];
    wide_ = room;
    for (int run = 0; run < kByteRuns; ++run) widen(run, room + run * piece.now * kTileElements);
  }

  // At most kBlockRows rows.
  void multiply(int count, const ByteSegments& rows) {
    for (int done = 0, left = passes(count); done < count; --left) {
      const int now = (count - done + left - 1) / left;
      const ByteSegments some{rows.x + done * rows.x_stride, rows.x_stride, rows.sums + done * kPanel, rows.adding};
      for (int run = 0; run < kByteRuns; ++run) {
        const SegmentPlace place{weights_, piece_.panel, piece_.step, piece_.now, run * kTile};
        if constexpr (Codes::kNibbles)
          if (wide_ != nullptr) {
            pass(now, place, some, WideNibbles<kFormat>(wide_ + run * piece_.now * kTileElements));
            continue;
          }
        pass(now, place, some, Codes(codes_ + run * Codes::kTileCodes));
      }
      done += now;
    }
  }

 private:
  static int passes(int64_t rows) { return rows <= kMostSegmentRows ? 1 : static_cast<int>((rows + kByteRows - 1) / kByteRows); }

  void widen(int run, uint8_t* to) const {
    Codes codes(codes_ + run * Codes::kTileCodes);
    for (int64_t step = 0; step < piece_.now; ++step, codes.next_block())
      for (int eight = 0; eight < 4; ++eight, to += 4 * sizeof(Bytes), codes.next_eight()) {
        for (int v = 0; v < 2; ++v) {
          store_bytes(to + v * sizeof(Bytes), codes.template four<false>(v));
          store_bytes(to + (2 + v) * sizeof(Bytes), codes.template four<true>(v));
        }
      }
  }

  template <class Some>
  void pass(int count, const SegmentPlace& place, const ByteSegments& rows, Some codes) {
    constexpr auto kCounts = std::make_integer_sequence<int, kMostSegmentRows>();
    const auto of = [&]<bool kZeros>(std::bool_constant<kZeros>) {
#if !defined(RHIZOME_INT8_DOTS)
      if (segment_steps(weights_) == 1) return segment_pass_of<kFormat, kZeros, true>(count, place, rows, codes, ahead_, kCounts);
#endif
      segment_pass_of<kFormat, kZeros, false>(count, place, rows, codes, ahead_, kCounts);
    };
    if constexpr (!is_float4(kFormat))
      if (weights_.zeros != nullptr) return of(std::true_type());
    of(std::false_type());
  }

  const PackedMatrix weights_;
  const Piece& piece_;
  const uint8_t* const codes_;
  const uint8_t* wide_ = nullptr;  // a byte each, where there are several passes
  LinesAhead ahead_;
};

void multiply_segments(const PackedMatrix& weights, const int8_t* x, int64_t x_stride, const Range& range, BeforePanel before,
                       PanelSums then);

}  // namespace rhizome

#endif
