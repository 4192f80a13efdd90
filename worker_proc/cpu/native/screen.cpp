#include "screen.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "fixed_point.h"
#include "linear_quantized.h"
#include "parallel.h"
#include "room.h"
#include "rows.h"

#if defined(RHIZOME_SEGMENTS)
#include "segment_rows.h"
#endif

namespace rhizome {
namespace {

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

RowNorms norms_of([[maybe_unused]] const PackedMatrix& codes, const bf16* x, int64_t inputs) {
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

struct Largest {
  float value;
  int64_t index;

  void take(const Largest& other) {
    if (other.value > value || (other.value == value && other.index < index)) *this = other;
  }
};

// Of the sums of a row of a panel; NaN counts as nothing.
inline Largest largest_of(const float* sums, int64_t panel, int64_t outputs) {
  Largest found{-__builtin_inff(), panel * kPanel};
  const int64_t columns = std::min<int64_t>(kPanel, outputs - panel * kPanel);
  for (int64_t i = 0; i < columns; ++i)
    if (sums[i] > found.value) found = {sums[i], panel * kPanel + i};
  return found;
}

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

// A row and a panel in which its largest output can be.
struct Candidate {
  int64_t panel, row;
  Largest found;
};

class Screening {
 public:
  Screening(const PackedMatrix& weights, const HeadScreen& screen, const bf16* x, int64_t x_stride, int64_t rows)
      : weights_(weights), screen_(screen), x_(x), stride_(x_stride), rows_(rows), panels_(panels(weights.outputs)),
        most_(std::max<int64_t>(panels_ / kFewPanels, 1)), found_(rows), left_(rows) {
    static thread_local std::vector<float> memory;
    rounded_ = room_in(memory, rows * panels_);
  }

  // How many rows take all panels after all.
  int64_t run(int64_t* index, float* best) {
    const auto take = [](void* context, int64_t panel, int64_t row, int count, const float* sums) {
      auto& self = *static_cast<Screening*>(context);
      const int64_t columns = std::min<int64_t>(kPanel, self.weights_.outputs - panel * kPanel);
      for (int i = 0; i < count; ++i) self.rounded_[(row + i) * self.panels_ + panel] = largest_rounded(sums + i * kPanel, columns);
    };
    linear_panels(screen_.codes, x_, stride_, rows_, take, this);
    parallel_for(rows_, [&](int64_t row, int) { choose(row); });
    verify();
    for (int64_t row = 0; row < rows_; ++row) best[row] = found_[row].value, index[row] = found_[row].index;
    return take_all(index, best);
  }

 private:
  // The panel that seems best is multiplied, and others that can be better are left.
  void choose(int64_t row) {
    const float* const rounded = rounded_ + row * panels_;
    const int64_t first = std::max_element(rounded, rounded + panels_) - rounded;
    found_[row] = multiply(first, &row, 1)[0];
    const Bounds bounds(screen_, norms_of(screen_.codes, x_ + row * stride_, weights_.inputs), weights_.inputs);
    std::vector<int64_t>& left = left_[row];
    for (int64_t panel = 0; panel < panels_; ++panel) {
      if (rounded[panel] + bounds.at(panel) < found_[row].value || panel == first) continue;  // NaN is left
      left.push_back(panel);
      if (hard(row)) return;
    }
  }

  // Panels that are left, each once for all rows that it is left for.
  void verify() {
    std::vector<Candidate> all;
    for (int64_t row = 0; row < rows_; ++row) {
      if (hard(row)) continue;
      for (const int64_t panel : left_[row]) all.push_back({panel, row, {}});
    }
    std::sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) {
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
      const Largest* const largest = multiply(all[begin].panel, rows, static_cast<int64_t>(end - begin));
      for (size_t i = begin; i < end; ++i) all[i].found = largest[i - begin];
    });
    for (const Candidate& one : all) found_[one.row].take(one.found);
  }

  // The largest outputs of rows in a panel, until the next ones of the same thread.
  const Largest* multiply(int64_t panel, const int64_t* rows, int64_t count) const {
    static thread_local std::vector<bf16> gathered;
    alignas(64) static thread_local float sums[kMostScreened * kPanel];
    static thread_local Largest largest[kMostScreened];
    const bf16* x = x_ + rows[0] * stride_;
    if (count > 1) x = gather(rows, count, gathered);
    const PackedMatrix one = panel_of(weights_, panel);
    linear(one, x, stride_, count, sums, kPanel, Finish::kStoreFloat);
    for (int64_t i = 0; i < count; ++i) largest[i] = largest_of(sums + i * kPanel, panel, weights_.outputs);
    return largest;
  }

  int64_t take_all(int64_t* index, float* best) const {
    std::vector<int64_t> rows;
    for (int64_t row = 0; row < rows_; ++row)
      if (hard(row)) rows.push_back(row);
    if (rows.empty()) return 0;
    const int64_t count = static_cast<int64_t>(rows.size());
    std::vector<bf16> gathered;
    std::vector<int64_t> at(count);
    std::vector<float> values(count);
    linear_argmax(weights_, gather(rows.data(), count, gathered), stride_, count, at.data(), values.data());
    for (int64_t i = 0; i < count; ++i) index[rows[i]] = at[i], best[rows[i]] = values[i];
    return count;
  }

  // Whether so many panels are left for it that it takes all of them.
  bool hard(int64_t row) const { return static_cast<int64_t>(left_[row].size()) > most_; }

  const bf16* gather(const int64_t* rows, int64_t count, std::vector<bf16>& memory) const {
    bf16* const to = room_in(memory, count * stride_);
    const int64_t width = 32 * blocks(weights_.inputs);
    for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * stride_, x_ + rows[i] * stride_, width * sizeof(bf16));
    return to;
  }

  const PackedMatrix& weights_;
  const HeadScreen& screen_;
  const bf16* const x_;
  const int64_t stride_, rows_, panels_, most_;
  float* rounded_;  // [rows, panels]: the largest product in int8
  std::vector<Largest> found_;
  std::vector<std::vector<int64_t>> left_;
};

}  // namespace

void find_largest(const PackedMatrix& weights, const HeadScreen* screen, const bf16* x, int64_t x_stride, int64_t rows,
                  int64_t* index, float* best) {
  if (screen == nullptr) return linear_argmax(weights, x, x_stride, rows, index, best);
  int32_t& rest = screen->rest[0];
  int32_t& next_rest = screen->rest[1];
  if (rest > 0) {
    --rest;
    return linear_argmax(weights, x, x_stride, rows, index, best);
  }
  int64_t hard = 0;
  for (int64_t first = 0; first < rows; first += kMostScreened) {
    Screening part(weights, *screen, x + first * x_stride, x_stride, std::min(kMostScreened, rows - first));
    hard += part.run(index + first, best + first);
  }
  // Rows that take all panels were multiplied twice: where they are many, for longer and longer without a look.
  const bool pays = 4 * hard <= rows;
  if (!pays) rest = next_rest;
  next_rest = pays ? 1 : std::min(2 * next_rest, kLongestRest);
}

}  // namespace rhizome

using namespace rhizome;

void rhizome_find_largest(const PackedMatrix* weights, const HeadScreen* screen, const bf16* x, int64_t x_stride, int64_t rows,
                          int64_t* index, float* best) {
  find_largest(*weights, screen, x, x_stride, rows, index, best);
}

void rhizome_code_errors(const bf16* source, int64_t stride, int64_t rows, int64_t inputs, int64_t group, const uint8_t* codes,
                         const float* scales, float* norms, float* errors) {
  const int64_t groups = (inputs + group - 1) / group;
  for_rows(rows, inputs, [&](int64_t row) {
    const bf16* const from = source + row * stride;
    const uint8_t* const coded = codes + row * inputs;
    doubles squares = {}, off = {};
    double last_squares = 0, last_off = 0;
    for (int64_t begin = 0, at = row * groups; begin < inputs; begin += group, ++at) {
      const int64_t end = std::min(inputs, begin + group);
      int64_t i = begin;
      for (; i + kLanes <= end; i += kLanes) {
        const floats weight = load(from + i), error = weight - (load_bytes_as_floats(coded + i) - splat(128)) * splat(scales[at]);
        squares += squared(weight), off += squared(error);
      }
      for (; i < end; ++i) {
        const float weight = to_float(from[i]), error = weight - (static_cast<float>(coded[i]) - 128) * scales[at];
        last_squares += squared(weight), last_off += squared(error);
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) last_squares += squares[lane], last_off += off[lane];
    norms[row] = kRoundedUp * static_cast<float>(std::sqrt(last_squares));
    errors[row] = kRoundedUp * static_cast<float>(std::sqrt(last_off));
  });
}
