#include "linear.h"

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

// Whether results of so many rows go past the caches: what they replace would have to be read first, and drive out x.
inline bool streams(const void* out, int64_t out_stride, int64_t rows) {
  return kWritesPast && rows >= kStreamRows && reinterpret_cast<uintptr_t>(out) % 64 == 0 && out_stride % 32 == 0;
}

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

// Calls then(panel, row, count, sums, thread) for all panels and rows, and before(panel, row, count) some time before (not
// where quantized weights are widened for AMX), panels in units as Tasks has them.
template <class Before, class Then>
void for_panels(const PackedMatrix& weights, const bf16* x, int64_t x_stride, int64_t rows, Before&& before, Then&& then,
                int64_t unit = 1) {
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
        auto take = [&](int64_t row, int count, float* sums) { finish(panel, row, count, sums, thread); };
        multiply_codes(weights, turned, range.row_begin, range.row_end, panel, &take,
                       [](void* context, int64_t row, int count, float* sums) {
                         (*static_cast<decltype(take)*>(context))(row, count, sums);
                       });
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

// Fetches what a block of results will be written to, so that the writes need not wait for the lines.
template <class Element>
inline void fetch_results(const Element* from, int64_t stride, int count, int width) {
  for (; count > 0; --count, from += stride)
    for (int i = 0; i < width; i += 64 / static_cast<int>(sizeof(Element))) __builtin_prefetch(from + i, 1, 3);
}

inline void nothing(int64_t /*panel*/, int64_t /*row*/, int /*count*/) {}

template <class Element, bool kAdding>
inline void put(const float* sums, int count, Element* out) {
  for (int i = 0; i < count; i += kLanes) {
    if (count - i >= kLanes) {
      floats value = load(sums + i);
      if constexpr (kAdding) value += load(out + i);
      store(out + i, value);
    } else {
      floats value = load(sums + i);
      if constexpr (kAdding) value += load_some(out + i, count - i);
      store_some(out + i, value, count - i);
    }
  }
}

// A whole row of a panel.
template <bool kPast>
inline void put_panel(const float* sums, bf16* out) {
  for (int i = 0; i < kPanel; i += 2 * kLanes) store_pair<kPast>(out + i, load(sums + i), load(sums + i + kLanes));
}

inline floats gated(const float* sums, Finish how) {
  const floats gate = load(sums), up = load(sums + kTile);
  if (how == Finish::kClampedMul) return clamped_swiglu(gate, up);
  return (how == Finish::kGeluMul ? gelu(gate) : silu(gate)) * up;
}

inline void put_gated(const float* sums, int count, bf16* out, Finish how) {
  for (int i = 0; i < count; i += kLanes) {
    if (count - i >= kLanes)
      store(out + i, gated(sums + i, how));
    else
      store_some(out + i, gated(sums + i, how), count - i);
  }
}

// Of two panels of gates and ups: what came of the first one, `held` [count, 16], and the sums of the second one make whole
// cache lines.
template <bool kPast>
inline void put_gated_pairs(const float* held, const float* sums, int count, bf16* out, int64_t out_stride,
                            Finish how) {
  static_assert(kLanes <= kTile);
  for (; count > 0; --count, held += kTile, sums += kPanel, out += out_stride) {
    if constexpr (kLanes == kTile) {
      store_pair<kPast>(out, load(held), gated(sums, how));
    } else {
      for (int i = 0; i < kTile; i += kLanes) store(out + i, load(held + i)), store(out + kTile + i, gated(sums + i, how));
    }
  }
}

struct Best {
  floats value[kPanel / kLanes];
  ints index[kPanel / kLanes];
};

}  // namespace

void linear(const PackedMatrix& weights, const bf16* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride,
            Finish finish) {
  // Calls put(sums of a row, how many of them there are, where they go) for all rows of all panels of `width` outputs.
  auto run = [&]<class Element>(Element* to, int width, int64_t outputs, auto put) {
    const auto before = [&](int64_t panel, int64_t row, int count) {
      fetch_results(to + row * out_stride + panel * width, out_stride, count, width);
    };
    for_panels(weights, x, x_stride, rows, before, [&](int64_t panel, int64_t row, int count, const float* sums, int) {
      const int columns = static_cast<int>(std::min<int64_t>(width, outputs - panel * width));
      Element* place = to + row * out_stride + panel * width;
      if (columns == width)
        for (int i = 0; i < count; ++i, sums += kPanel, place += out_stride) put(sums, width, place);
      else
        for (int i = 0; i < count; ++i, sums += kPanel, place += out_stride) put(sums, columns, place);
    });
  };
  // The same for bfloat16 and many rows, in whole cache lines.
  auto stream_whole = [&](bf16* to) {
    for_panels(weights, x, x_stride, rows, nothing, [&](int64_t panel, int64_t row, int count, const float* sums, int) {
      const int columns = static_cast<int>(std::min<int64_t>(kPanel, weights.outputs - panel * kPanel));
      bf16* place = to + row * out_stride + panel * kPanel;
      for (int i = 0; i < count; ++i, sums += kPanel, place += out_stride) {
        if (columns == kPanel)
          put_panel<true>(sums, place);
        else
          put<bf16, false>(sums, columns, place);
      }
    });
  };
  // Gates and ups: two panels make a cache line.
  auto pairs = [&](bf16* to) {
    const bool past = streams(to, out_stride, rows);
    const auto before = [&](int64_t panel, int64_t row, int count) {
      if (!past && panel % 2) fetch_results(to + row * out_stride + panel / 2 * kPanel, out_stride, count, kPanel);
    };
    for_panels(weights, x, x_stride, rows, before, [&](int64_t panel, int64_t row, int count, const float* sums, int) {
      alignas(64) static thread_local float held[kGroupRows * kTile];  // as in `linear_heads`
      float* const first = held + row % kGroupRows * kTile;
      bf16* const place = to + row * out_stride + panel / 2 * kPanel;
      if (panel % 2 == 0)
        for (int i = 0; i < count * kTile; i += kLanes) store(first + i, gated(sums + i / kTile * kPanel + i % kTile, finish));
      else if (past)
        put_gated_pairs<true>(first, sums, count, place, out_stride, finish);
      else
        put_gated_pairs<false>(first, sums, count, place, out_stride, finish);
    }, 2);
  };
  bf16* const half = static_cast<bf16*>(out);
  float* const single = static_cast<float*>(out);
  switch (finish) {
    case Finish::kStore:
      if (streams(out, out_stride, rows)) return stream_whole(half);
      return run(half, kPanel, weights.outputs, [](auto... row) { put<bf16, false>(row...); });
    case Finish::kStoreFloat:
      return run(single, kPanel, weights.outputs, [](auto... row) { put<float, false>(row...); });
    case Finish::kAdd:
      return run(single, kPanel, weights.outputs, [](auto... row) { put<float, true>(row...); });
    case Finish::kSiluMul:
    case Finish::kGeluMul:
    case Finish::kClampedMul:
      if (weights.outputs % (2 * kPanel) == 0) return pairs(half);
      return run(half, kTile, weights.outputs / 2, [=](auto... row) { put_gated(row..., finish); });
  }
}

void linear_heads(const PackedMatrix& weights, const bf16* x, int64_t x_stride, int64_t rows, int64_t head_dim,
                  TakeHead take, void* context) {
  const int64_t unit = head_dim / kPanel;
  for_panels(
      weights, x, x_stride, rows, nothing,
      [&](int64_t panel, int64_t row, int count, const float* sums, int) {
        // of the rows of a task, whose first one is not known here: rows of a task are never as far apart
        alignas(64) static thread_local bf16 held[kGroupRows * kMaxHead];
        const int64_t part = panel % unit;
        bf16* const numbers = held + row % kGroupRows * head_dim;
        for (int i = 0; i < count; ++i, sums += kPanel) put_panel<false>(sums, numbers + i * head_dim + part * kPanel);
        if (part == unit - 1) take(context, panel / unit, row, count, numbers);
      },
      unit);
}

void linear_argmax(const PackedMatrix& weights, const bf16* x, int64_t x_stride, int64_t rows, int64_t* index,
                   float* best) {
  constexpr int kVectors = kPanel / kLanes;
  const int threads = num_threads();
  std::vector<Best> found(threads * rows);
  for (Best& one : found)
    for (int v = 0; v < kVectors; ++v) one.value[v] = splat(-__builtin_inff()), one.index[v] = ints{};
  ints lanes[kVectors];
  for (int i = 0; i < kPanel; ++i) lanes[i / kLanes][i % kLanes] = i;
  for_panels(weights, x, x_stride, rows, nothing, [&](int64_t panel, int64_t row, int count, const float* sums, int thread) {
    const int32_t first = static_cast<int32_t>(panel * kPanel);
    for (int i = 0; i < count; ++i) {
      Best& one = found[thread * rows + row + i];
      for (int v = 0; v < kVectors; ++v) {
        const floats value = load(sums + i * kPanel + v * kLanes);
        const ints at = lanes[v] + first;
        const ints better = (value > one.value[v]) & (at < weights.outputs);
        one.value[v] = select(better, value, one.value[v]);
        one.index[v] = (at & better) | (one.index[v] & ~better);
      }
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    best[row] = -__builtin_inff();
    index[row] = 0;
    for (int64_t part = row; part < threads * rows; part += rows)
      for (int i = 0; i < kPanel; ++i) {
        const float value = found[part].value[i / kLanes][i % kLanes];
        const int32_t at = found[part].index[i / kLanes][i % kLanes];
        if (value > best[row] || (value == best[row] && at < index[row])) best[row] = value, index[row] = at;
      }
  }
}

void linear_panels(const PackedMatrix& weights, const bf16* x, int64_t x_stride, int64_t rows, TakePanel take, void* context) {
  for_panels(weights, x, x_stride, rows, nothing, [&](int64_t panel, int64_t row, int count, const float* sums, int) {
    take(context, panel, row, count, sums);
  });
}

PackedMatrix panel_of(const PackedMatrix& weights, int64_t panel) {
  PackedMatrix one = weights;
  const int64_t block = panel * blocks(weights.inputs);
  one.outputs = kPanel;
  if (weights.format == Format::kCompressed) {
    one.data = reinterpret_cast<const bf16*>(compressed_block(weights, block));
    one.exception_starts += block;
  } else {
    one.data = weights_at(weights, panel, 0);
  }
  if (weights.bias != nullptr) one.bias += panel * kPanel;
  return one;
}

void unpack_row(const PackedMatrix& weights, int64_t output, bf16* out) {
  if (weights.format == Format::kCompressed) return inflate_row(weights, output, out);
  if (weights.format != Format::kBFloat16) {
    for (int64_t input = 0; input < weights.inputs; ++input)
      out[weights.order != nullptr ? weights.order[input] : input] = to_bf16(widened(weights, output, input));
    return;
  }
  const int64_t steps = blocks(weights.inputs), place = output % kPanel;
  const bf16* tile = weights.data + (output / kPanel * steps * 2 + place / kTile) * kTileElements + place % kTile * 2;
  for (int64_t input = 0; input < weights.inputs; input += 32, tile += 2 * kTileElements)
    for (int64_t i = 0; i < 32 && input + i < weights.inputs; ++i) out[input + i] = tile[i / 2 * 2 * kTile + i % 2];
}

}  // namespace rhizome

using rhizome::bf16;
using rhizome::PackedMatrix;

RHIZOME_EXPORT void rhizome_linear(const PackedMatrix* weights, const bf16* x, int64_t x_stride, int64_t rows,
                                   void* out, int64_t out_stride, int finish) {
  rhizome::linear(*weights, x, x_stride, rows, out, out_stride, static_cast<rhizome::Finish>(finish));
}

RHIZOME_EXPORT void rhizome_unpack_rows(const PackedMatrix* weights, const int64_t* outputs, int64_t rows, bf16* out,
                                        int64_t out_stride) {
  rhizome::parallel_for(rows, [&](int64_t row, int) {
    rhizome::unpack_row(*weights, outputs[row], out + row * out_stride);
  });
}
