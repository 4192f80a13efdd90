#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "parallel.h"
#include "sampling.h"
#include "screening.h"

namespace rhizome {
namespace {

// The logits of some rows that draws can keep. The panels that seem to hold as many of the largest as a row's filters keep are
// multiplied first: the smallest of these bounds from below what can be drawn.
class Filtering {
 public:
  Filtering(const PackedMatrix& weights, const HeadScreen& screen, const bf16* x, int64_t x_stride, int64_t rows,
            const RowFilters* filters, bool part, float* out, int64_t out_stride)
      : weights_(weights), x_(x), stride_(x_stride), out_stride_(out_stride), filters_(filters), part_(part), out_(out),
        look_(weights, screen, x, x_stride, rows), left_(rows) {}

  // How many panels were multiplied, each as often as rows asked for it.
  int64_t run() {
    parallel_for(look_.rows(), [&](int64_t row, int) { choose_first(row); });
    int64_t multiplied = multiply();
    parallel_for(look_.rows(), [&](int64_t row, int) { choose_others(row); });
    multiplied += multiply();
    return multiplied + take_all();
  }

 private:
  // As many panels as the row keeps outputs: those that seem best.
  void choose_first(int64_t row) {
    const int64_t count = std::min(filters_[row].count(), look_.panels());
    std::fill_n(out_ + row * out_stride_, weights_.outputs, -__builtin_inff());
    std::vector<int64_t>& first = left_[row];
    if (count > static_cast<int64_t>(look_.most())) return first.resize(look_.most() + 1);  // it is hard
    const float* const rounded = look_.rounded(row);
    static thread_local std::vector<int64_t> order;
    order.resize(look_.panels());
    for (int64_t panel = 0; panel < look_.panels(); ++panel) order[panel] = panel;
    std::nth_element(order.begin(), order.begin() + (count - 1), order.end(),
                     [&](int64_t a, int64_t b) { return rounded[a] > rounded[b]; });
    first.assign(order.begin(), order.begin() + count);
  }

  // Of the others, those that may hold what is kept.
  void choose_others(int64_t row) {
    std::vector<int64_t>& left = left_[row];
    if (look_.hard(left)) return;
    static thread_local std::vector<float> values;
    values.clear();
    const float* const out = out_ + row * out_stride_;
    for (const int64_t panel : left)
      for (int64_t i = 0; i < look_.columns(panel); ++i) {
        const float value = out[panel * kPanel + i];
        values.push_back(value == value ? value : -__builtin_inff());
      }
    const auto last = values.begin() + (std::min<int64_t>(filters_[row].count(), values.size()) - 1);
    std::nth_element(values.begin(), last, values.end(), std::greater<>());
    const float last_kept = *last, largest = *std::max_element(values.begin(), values.end());
    const float* const rounded = look_.rounded(row);
    const Bounds bounds = look_.bounds(row);
    float highest = largest;
    for (int64_t panel = 0; panel < look_.panels(); ++panel) {
      const float most = rounded[panel] + bounds.at(panel);
      if (!(most <= highest)) highest = most == most ? most : __builtin_inff();
    }
    if (part_) highest = std::max(highest, largest + 40 * filters_[row].temperature);  // beside which these would weigh nothing
    const float least = least_kept(filters_[row], last_kept, largest, highest);
    std::vector<bool> done(look_.panels());
    for (const int64_t panel : left) done[panel] = true;
    left.clear();
    for (int64_t panel = 0; panel < look_.panels() && !look_.hard(left); ++panel)
      if (!(rounded[panel] + bounds.at(panel) < least) && !done[panel]) left.push_back(panel);  // NaN is left
  }

  int64_t multiply() const {
    const auto take = [&](const RowPanel& one, const float* sums) {
      std::copy_n(sums, look_.columns(one.panel), out_ + one.row * out_stride_ + one.panel * kPanel);
    };
    return static_cast<int64_t>(look_.multiply_left<RowPanel>(left_, take).size());
  }

  // Rows that are hard, as many at once as lie side by side.
  int64_t take_all() const {
    int64_t multiplied = 0;
    for (int64_t row = 0, end = 0; row < look_.rows(); row = std::max(end, row + 1)) {
      for (end = row; end < look_.rows() && look_.hard(left_[end]);) ++end;
      if (end == row) continue;
      linear(weights_, x_ + row * stride_, stride_, end - row, out_ + row * out_stride_, out_stride_, Finish::kStoreFloat);
      multiplied += (end - row) * look_.panels();
    }
    return multiplied;
  }

  const PackedMatrix& weights_;
  const bf16* const x_;
  const int64_t stride_, out_stride_;
  const RowFilters* const filters_;
  const bool part_;
  float* const out_;
  const Look look_;
  std::vector<std::vector<int64_t>> left_;  // panels that are to be multiplied
};

// So many panels, each for a row or two, take about as long as a look saves: little where all rows wait for the same memory,
// several times the head where they wait for multiplications. Measured with AVX512 (bench/cpu_head.py).
int64_t worth(int64_t panels, int64_t rows) { return std::max(panels / 12, panels * (rows - 8) / 32); }

}  // namespace

void filtered_outputs(const PackedMatrix& weights, const HeadScreen* screen, const bf16* x, int64_t x_stride, int64_t rows,
                      const double* params, bool part, float* out, int64_t out_stride) {
  if (screen == nullptr || rests(screen->rest + 2))
    return linear(weights, x, x_stride, rows, out, out_stride, Finish::kStoreFloat);
  std::vector<RowFilters> filters;
  for (int64_t row = 0; row < rows; ++row) filters.push_back(filters_of(params + row, rows));
  int64_t multiplied = 0;
  for (int64_t first = 0; first < rows; first += kMostScreened) {
    Filtering some(weights, *screen, x + first * x_stride, x_stride, std::min(kMostScreened, rows - first),
                   filters.data() + first, part, out + first * out_stride, out_stride);
    multiplied += some.run();
  }
  learn(screen->rest + 2, multiplied <= worth(panels(weights.outputs), rows));
}

}  // namespace rhizome

using namespace rhizome;

void rhizome_filtered_outputs(const PackedMatrix* weights, const HeadScreen* screen, const bf16* x, int64_t x_stride,
                              int64_t rows, const double* params, int part, float* out, int64_t out_stride) {
  filtered_outputs(*weights, screen, x, x_stride, rows, params, part != 0, out, out_stride);
}
