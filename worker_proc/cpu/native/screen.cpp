#include "screen.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "rows.h"
#include "screening.h"

namespace rhizome {
namespace {

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

// A panel in which a row's largest output can be.
struct Candidate : RowPanel {
  Largest found = {};
};

class Screening {
 public:
  Screening(const PackedMatrix& weights, const HeadScreen& screen, const bf16* x, int64_t x_stride, int64_t rows)
      : weights_(weights), stride_(x_stride), look_(weights, screen, x, x_stride, rows), found_(rows), left_(rows) {}

  // How many rows take all panels after all.
  int64_t run(int64_t* index, float* best) {
    parallel_for(look_.rows(), [&](int64_t row, int) { choose(row); });
    verify();
    for (int64_t row = 0; row < look_.rows(); ++row) best[row] = found_[row].value, index[row] = found_[row].index;
    return take_all(index, best);
  }

 private:
  // The panel that seems best is multiplied, and others that can be better are left.
  void choose(int64_t row) {
    const float* const rounded = look_.rounded(row);
    const int64_t first = std::max_element(rounded, rounded + look_.panels()) - rounded;
    found_[row] = largest_of(look_.multiply(first, &row, 1), first, weights_.outputs);
    const Bounds bounds = look_.bounds(row);
    std::vector<int64_t>& left = left_[row];
    for (int64_t panel = 0; panel < look_.panels(); ++panel) {
      if (rounded[panel] + bounds.at(panel) < found_[row].value || panel == first) continue;  // NaN is left
      left.push_back(panel);
      if (look_.hard(left)) return;
    }
  }

  // Panels that are left.
  void verify() {
    const auto take = [&](Candidate& one, const float* sums) { one.found = largest_of(sums, one.panel, weights_.outputs); };
    for (const Candidate& one : look_.multiply_left<Candidate>(left_, take)) found_[one.row].take(one.found);
  }

  int64_t take_all(int64_t* index, float* best) const {
    std::vector<int64_t> rows;
    for (int64_t row = 0; row < look_.rows(); ++row)
      if (look_.hard(left_[row])) rows.push_back(row);
    if (rows.empty()) return 0;
    const int64_t count = static_cast<int64_t>(rows.size());
    std::vector<bf16> gathered;
    std::vector<int64_t> at(count);
    std::vector<float> values(count);
    linear_argmax(weights_, look_.gather(rows.data(), count, gathered), stride_, count, at.data(), values.data());
    for (int64_t i = 0; i < count; ++i) index[rows[i]] = at[i], best[rows[i]] = values[i];
    return count;
  }

  const PackedMatrix& weights_;
  const int64_t stride_;
  const Look look_;
  std::vector<Largest> found_;
  std::vector<std::vector<int64_t>> left_;
};

}  // namespace

void find_largest(const PackedMatrix& weights, const HeadScreen* screen, const bf16* x, int64_t x_stride, int64_t rows,
                  int64_t* index, float* best) {
  if (screen == nullptr || rests(screen->rest)) return linear_argmax(weights, x, x_stride, rows, index, best);
  int64_t hard = 0;
  for (int64_t first = 0; first < rows; first += kMostScreened) {
    Screening part(weights, *screen, x + first * x_stride, x_stride, std::min(kMostScreened, rows - first));
    hard += part.run(index + first, best + first);
  }
  learn(screen->rest, 4 * hard <= rows);  // those were multiplied twice
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
