// The first look of `screen.h`: all products of some rows in int8, and how far they can be from the outputs proper.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "fixed_point.h"
#include "linear_quantized.h"
#include "parallel.h"
#include "room.h"
#include "screen.h"

#if defined(RHIZOME_SEGMENTS)
#include "segment_rows.h"
#endif

namespace rhizome {

constexpr int64_t kMostScreened = 256;  // rows at once: their products in int8 are all kept
constexpr int64_t kFewPanels = 16;      // a row with more than one of so many panels left takes all of them
constexpr int32_t kLongestRest = 64;
constexpr float kRoundedUp = 1.001f;    // for what is rounded while norms and bounds are computed

// A vector of `floats`: squares of float32 can be below and beyond its numbers.
typedef double doubles __attribute__((vector_size(8 * kLanes)));
inline doubles squared(floats x) {
  const doubles wide = __builtin_convertvector(x, doubles);
  return wide * wide;
}
inline double squared(float x) { return static_cast<double>(x) * x; }

// |x - x'| and |x'| of a row, not finite if it is not.
struct RowNorms {
  float error, rounded;
};

inline RowNorms norms_of([[maybe_unused]] const PackedMatrix& codes, const bf16* x, int64_t inputs) {
  double squares = 0;
#if defined(RHIZOME_SEGMENTS)
  if (codes.format == Format::kInt8Segments) {
    double errors = 0;
    const int64_t segment = 32 * segment_steps(codes);
    for (int64_t begin = 0; begin < inputs; begin += segment) {
      const int64_t end = std::min(inputs, begin + segment);
      const FixedPoint point(largest_bits(x + begin, end - begin), true);
      for (int64_t i = begin; i < end; ++i) {
        const float rounded = __builtin_nearbyintf(to_float(x[i]) * point.factor) * point.unit;
        const float error = to_float(x[i]) - rounded;
        squares += squared(rounded), errors += squared(error);
      }
    }
    return {static_cast<float>(std::sqrt(errors)), static_cast<float>(std::sqrt(squares))};
  }
#endif
  // 16 bits: no number is off by more than a unit, see plane_rows.h and linear_integers.h
  const FixedPoint point(largest_bits(x, inputs), false);
  for (int64_t i = 0; i < inputs; ++i) squares += squared(to_float(x[i]));
  const float error = point.unit * std::sqrt(static_cast<float>(inputs));
  return {error, static_cast<float>(std::sqrt(squares)) + error};
}

// How far outputs of a panel can be from its products in int8, for one row.
class Bounds {
 public:
  Bounds(const HeadScreen& screen, const RowNorms& row, int64_t inputs)
      : screen_(screen), size_(row.rounded + row.error), least_(static_cast<float>(inputs) * 1e-37f) {
    // Sums in float32 are rounded once for each input, by 2^-24 of them; four times as much is reckoned with for both products.
    const float rounding = (2 * static_cast<float>(inputs) + 64) * 0x1p-23f * size_;
    of_norm_ = kRoundedUp * (row.error + rounding), of_error_ = kRoundedUp * (row.rounded + rounding);
  }

  float at(int64_t panel) const {
    const bool bounded = size_ * screen_.norms[panel] < 1e37f;  // beyond, sums may be infinite
    return bounded ? of_norm_ * screen_.norms[panel] + of_error_ * screen_.errors[panel] + least_ : __builtin_inff();
  }

 private:
  const HeadScreen& screen_;
  float size_, of_norm_, of_error_;
  float least_;  // below it, products may count as 0
};

// The largest product in int8; one that is not a number counts as nothing, and there are no bounds then.
inline float largest_rounded(const float* sums, int64_t columns) {
  floats most = splat(-__builtin_inff());
  ints lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
  for (int i = 0; i < kPanel; i += kLanes) {
    const floats value = load(sums + i);
    most = select((value > most) & (lanes + i < static_cast<int32_t>(columns)), value, most);
  }
  float found[kLanes];
  store(found, most);
  return *std::max_element(found, found + kLanes);
}

// A row and a panel of it that is to be multiplied.
struct RowPanel {
  int64_t panel, row;
};

class Look {
 public:
  // `rows` are at most kMostScreened.
  Look(const PackedMatrix& weights, const HeadScreen& screen, const bf16* x, int64_t x_stride, int64_t rows)
      : weights_(weights), screen_(screen), x_(x), stride_(x_stride), rows_(rows), panels_(rhizome::panels(weights.outputs)) {
    static thread_local std::vector<float> memory;
    rounded_ = room_in(memory, rows * panels_);
    linear_panels(screen_.codes, x_, stride_, rows_, [&](int64_t panel, int64_t row, int count, const float* sums) {
      for (int i = 0; i < count; ++i) rounded_[(row + i) * panels_ + panel] = largest_rounded(sums + i * kPanel, columns(panel));
    });
  }

  int64_t rows() const { return rows_; }
  int64_t panels() const { return panels_; }
  int64_t columns(int64_t panel) const { return std::min<int64_t>(kPanel, weights_.outputs - panel * kPanel); }

  // A row for which more panels are left takes all of them.
  size_t most() const { return static_cast<size_t>(std::max<int64_t>(panels_ / kFewPanels, 1)); }
  bool hard(const std::vector<int64_t>& left) const { return left.size() > most(); }

  // The largest product in int8 of each panel.
  const float* rounded(int64_t row) const { return rounded_ + row * panels_; }

  Bounds bounds(int64_t row) const {
    return Bounds(screen_, norms_of(screen_.codes, x_ + row * stride_, weights_.inputs), weights_.inputs);
  }

  // The outputs [count, kPanel] of rows in a panel, until the next ones of the same thread.
  const float* multiply(int64_t panel, const int64_t* rows, int64_t count) const {
    static thread_local std::vector<bf16> gathered;
    alignas(64) static thread_local float sums[kMostScreened * kPanel];
    const bf16* x = x_ + rows[0] * stride_;
    if (count > 1) x = gather(rows, count, gathered);
    linear(panel_of(weights_, panel), x, stride_, count, sums, kPanel, Finish::kStoreFloat);
    return sums;
  }

  // Multiplies the panels that are left for rows that are not hard, each once for all of these: `take(one, sums)` gets the
  // kPanel outputs of each RowPanel, on any thread. Returns those.
  template <typename One, typename Take>
  std::vector<One> multiply_left(const std::vector<std::vector<int64_t>>& left, const Take& take) const {
    std::vector<One> all;
    for (int64_t row = 0; row < rows_; ++row) {
      if (hard(left[row])) continue;
      for (const int64_t panel : left[row]) {
        One one{};
        one.panel = panel, one.row = row;
        all.push_back(one);
      }
    }
    std::sort(all.begin(), all.end(), [](const One& a, const One& b) {
      return a.panel != b.panel ? a.panel < b.panel : a.row < b.row;
    });
    std::vector<size_t> starts;
    for (size_t i = 0; i < all.size(); ++i)
      if (i == 0 || all[i].panel != all[i - 1].panel) starts.push_back(i);
    starts.push_back(all.size());
    parallel_for(static_cast<int64_t>(starts.size()) - 1, [&](int64_t task, int) {
      const size_t begin = starts[task], end = starts[task + 1];
      int64_t rows[kMostScreened];
      for (size_t i = begin; i < end; ++i) rows[i - begin] = all[i].row;
      const float* const sums = multiply(all[begin].panel, rows, static_cast<int64_t>(end - begin));
      for (size_t i = begin; i < end; ++i) take(all[i], sums + (i - begin) * kPanel);
    });
    return all;
  }

  const bf16* gather(const int64_t* rows, int64_t count, std::vector<bf16>& memory) const {
    bf16* const to = room_in(memory, count * stride_);
    const int64_t width = 32 * blocks(weights_.inputs);
    for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * stride_, x_ + rows[i] * stride_, width * sizeof(bf16));
    return to;
  }

 private:
  const PackedMatrix& weights_;
  const HeadScreen& screen_;
  const bf16* const x_;
  const int64_t stride_, rows_, panels_;
  float* rounded_;  // [rows, panels]
};

// Where a look did not pay, the next calls do without, for longer and longer. `rest` are two numbers: how many calls still do,
// and how many when it does not pay the next time.
inline bool rests(int32_t* rest) { return rest[0] > 0 && rest[0]--; }
inline void learn(int32_t* rest, bool pays) {
  if (!pays) rest[0] = rest[1];
  rest[1] = pays ? 1 : std::min(2 * rest[1], kLongestRest);
}

}  // namespace rhizome
