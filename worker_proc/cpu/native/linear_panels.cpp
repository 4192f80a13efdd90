#include "linear_panels.h"

#include <algorithm>
#include <vector>

#include "linear_compressed.h"
#include "linear_quantized.h"
#include "linear_task.h"
#include "parallel.h"
#include "plane_rows.h"
#include "room.h"
#include "rounded_rows.h"
#include "rows.h"

#if defined(__AMX_BF16__)
#include "linear_quantized_rows.h"
#include "linear_task_amx.h"
#include "linear_task_compressed.h"
#elif defined(__AVX512BF16__)
#include "linear_task_dots.h"
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "linear_task_mmla.h"
#else
#include "linear_task_integers.h"
#include "linear_task_simd.h"
#endif
#include "linear_task_int8.h"
#include "linear_task_segments.h"

namespace rhizome {
namespace {

constexpr int64_t kStreamBytes = 256 * 1024;  // of weights per task when few rows share them
constexpr int64_t kChunk = 4;         // panels per task when many rows share them: their results lie side by side

inline void add_bias(const PackedMatrix& weights, int64_t panel, float* sums, int64_t rows) {
  if (weights.bias == nullptr) return;
  for (int64_t row = 0; row < rows; ++row)
    for (int i = 0; i < kPanel; i += kLanes)
      store(sums + row * kPanel + i, load(sums + row * kPanel + i) + load(weights.bias + panel * kPanel + i));
}

// Rows of x with their numbers in the order of the matrix's inputs, `stride` apart, and zeros up to a whole block. Until the
// next call by this thread.
const bf16* in_order(const PackedMatrix& weights, const bf16* x, int64_t x_stride, int64_t rows, int64_t stride) {
  static thread_local std::vector<bf16> memory;
  bf16* const out = room_in(memory, rows * stride);
  for_rows(rows, weights.inputs, [&](int64_t row) {
    bf16* const to = out + row * stride;
    for (int64_t i = 0; i < weights.inputs; ++i) to[i] = x[row * x_stride + weights.order[i]];
    std::fill(to + weights.inputs, to + blocks(weights.inputs) * 32, bf16{0});
  });
  return out;
}

// Sums [count, 32] of rows, times their units.
inline void scale_rows(const float* units, int count, float* sums) {
  for (int i = 0; i < count; ++i, sums += kPanel)
    for (int v = 0; v < kPanel; v += kLanes) store(sums + v, load(sums + v) * splat(units[i]));
}

// How the products of `rows` rows are cut into tasks. Panels come in units that one thread takes one after another for the
// same rows, at most kGroupRows.
class Tasks {
 public:
  Tasks(const PackedMatrix& weights, int64_t rows, int64_t unit) : rows_(rows), panels_(panels(weights.outputs)) {
    const int64_t row_bytes = 64 * blocks(weights.inputs);
    const int64_t most = blocks(weights.inputs) > kWholeSteps ? kPartRows : kGroupRows;
    groups_ = (rows + most - 1) / most;
    // groups of about the same size, in whole blocks
    group_ = ((rows + groups_ - 1) / groups_ + kBlockRows - 1) / kBlockRows * kBlockRows;
    const bool streaming = rows <= 2 * kBlockRows;
    chunk_ = streaming ? std::max<int64_t>(kStreamBytes / (row_bytes * kPanel), 1) : kChunk;
    chunk_ = std::min(chunk_, std::max<int64_t>(panels_ / (4 * num_threads()), 1));
    chunk_ = (chunk_ + unit - 1) / unit * unit;
    chunks_ = (panels_ + chunk_ - 1) / chunk_;
  }

  // Calls body(Range, thread) for each.
  template <class Body>
  void run(Body&& body) const {
    parallel_for(groups_ * chunks_, [&](int64_t task, int thread) {
      const int64_t at = task / chunks_, first = task % chunks_ * chunk_;
      // threads take tasks in turn
      body(Range{at * group_, std::min(rows_, (at + 1) * group_), first, std::min(panels_, first + chunk_),
                 first + chunk_ * num_threads()}, thread);
      finish_streams();
    });
  }

 private:
  int64_t rows_, panels_, groups_, group_, chunk_, chunks_;
};

}  // namespace

void for_panels(const PackedMatrix& weights, const bf16* x, int64_t x_stride, int64_t rows, BeforePanel before, ThenPanel then,
                int64_t unit) {
  if (rows == 0) return;
  if (weights.order != nullptr) {
    const int64_t stride = row_stride(weights.inputs);
    x = in_order(weights, x, x_stride, rows, stride), x_stride = stride;
  }
  const float* units = nullptr;
#if !defined(__AMX_INT8__) && !defined(RHIZOME_INT8_DOTS) && !defined(RHIZOME_INTEGERS)
  if (weights.format == Format::kInt8Both) {
    const RoundedRows made(x, x_stride, rows, 32 * blocks(weights.inputs));
    x = made.data(), x_stride = made.stride(), units = made.units();
  }
#endif
  const auto finish = [&](int64_t panel, int64_t row, int count, float* sums, int thread) {
    if (units != nullptr) scale_rows(units + row, count, sums);
    scale_sums(weights, panel, sums, count);
    add_bias(weights, panel, sums, count);
    then(panel, row, count, sums, thread);
  };
#if defined(__AMX_INT8__) || defined(RHIZOME_INT8_DOTS)
  if (in_quads(weights.format)) {
    const PackedMatrix pairs = as_pairs(weights);
    const PlaneRows made(x, x_stride, rows, weights);
    const int planes = made.planes();
    const auto of_rows = [&](int64_t panel, int64_t row, int count) { before(panel, row / planes, count / planes); };
    return Tasks(pairs, planes * rows, unit).run([&](const Range& range, int thread) {
      const auto take = [&](int64_t panel, int64_t row, int count, float* sums) {
        made.join(row / planes, count / planes, sums);
        finish(panel, row / planes, count / planes, sums, thread);
      };
      multiply_bytes(pairs, made.data(), made.stride(), range, of_rows, take);
    });
  }
#endif
  const Tasks tasks(weights, rows, unit);
#if defined(RHIZOME_SEGMENTS)
  if (in_segments(weights.format)) {
    const SegmentRows made(x, x_stride, rows, weights);
    return tasks.run([&](const Range& range, int thread) {
      const auto take = [&](int64_t panel, int64_t row, int count, float* sums) { finish(panel, row, count, sums, thread); };
      multiply_segments(weights, made.data(), made.stride(), range, before, take);
    });
  }
#endif
#if defined(__AMX_BF16__)
  if (has_codes(weights.format)) {
    const TurnedRows turned(x, x_stride, rows, blocks(weights.inputs));
    return tasks.run([&](const Range& range, int thread) {
      configure_turned_tiles(turned.columns());
      for (int64_t panel = range.panel_begin; panel < range.panel_end; ++panel) {
        const auto take = [&](int64_t row, int count, float* sums) { finish(panel, row, count, sums, thread); };
        multiply_codes(weights, turned, range.row_begin, range.row_end, panel, take);
      }
    });
  }
#endif
#if defined(__AVX512BF16__)
#if !defined(__AMX_BF16__)
  if (as_numbers(weights.format) && weights.zeros != nullptr) {
    const SummedRows made(x, x_stride, rows, weights);
    x = made.data(), x_stride = made.stride();
  }
#endif
  const bf16* const inputs = x;
  const int64_t stride = x_stride;
#else
#if defined(RHIZOME_INTEGERS)
  if (in_integers(weights.format)) {
    const FixedRows made(x, x_stride, rows, 32 * blocks(weights.inputs), weights.format == Format::kInt8Both);
    return tasks.run([&](const Range& range, int thread) {
      const auto take = [&](int64_t panel, int64_t row, int count, float* sums) {
        scale_rows(made.units() + row, count, sums);
        finish(panel, row, count, sums, thread);
      };
      multiply_integers(weights, made.data(), made.stride(), range, before, take);
    });
  }
#endif
  const TaskRows made(x, x_stride, rows, 32 * blocks(weights.inputs));
  const auto* const inputs = made.data();
  const int64_t stride = made.stride();
#endif
  tasks.run([&](const Range& range, int thread) {
    const auto take = [&](int64_t panel, int64_t row, int count, float* sums) { finish(panel, row, count, sums, thread); };
#if defined(__AMX_BF16__)
    if (weights.format == Format::kCompressed)
      multiply_compressed(weights, inputs, stride, range, before, take);
    else
#endif
      multiply(weights, inputs, stride, range, before, take);
  });
}

}  // namespace rhizome
