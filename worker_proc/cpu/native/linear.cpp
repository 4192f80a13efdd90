#include "linear.h"

#include <algorithm>
#include <vector>

#include "linear_compressed.h"
#include "linear_panels.h"
#include "linear_quantized.h"
#include "linear_task.h"
#include "parallel.h"

namespace rhizome {
namespace {

// Whether results of so many rows go past the caches: what they replace would have to be read first, and drive out x.
inline bool streams(const void* out, int64_t out_stride, int64_t rows) {
  return kWritesPast && rows >= kStreamRows && reinterpret_cast<uintptr_t>(out) % 64 == 0 && out_stride % 32 == 0;
}

// Fetches what a block of results will be written to, so that the writes need not wait for the lines.
template <class Element>
inline void fetch_results(const Element* from, int64_t stride, int count, int width) {
  for (; count > 0; --count, from += stride)
    for (int i = 0; i < width; i += 64 / static_cast<int>(sizeof(Element))) __builtin_prefetch(from + i, 1, 3);
}

constexpr auto nothing = [](int64_t /*panel*/, int64_t /*row*/, int /*count*/) {};

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
                  TakeHead take) {
  const int64_t unit = head_dim / kPanel;
  for_panels(
      weights, x, x_stride, rows, nothing,
      [&](int64_t panel, int64_t row, int count, const float* sums, int) {
        // of the rows of a task, whose first one is not known here: rows of a task are never as far apart
        alignas(64) static thread_local bf16 held[kGroupRows * kMaxHead];
        const int64_t part = panel % unit;
        bf16* const numbers = held + row % kGroupRows * head_dim;
        for (int i = 0; i < count; ++i, sums += kPanel) put_panel<false>(sums, numbers + i * head_dim + part * kPanel);
        if (part == unit - 1) take(panel / unit, row, count, numbers);
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

void linear_panels(const PackedMatrix& weights, const bf16* x, int64_t x_stride, int64_t rows, TakePanel take) {
  for_panels(weights, x, x_stride, rows, nothing, [&](int64_t panel, int64_t row, int count, const float* sums, int) {
    take(panel, row, count, sums);
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
