#include "linear_quantized.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "parallel.h"

#if defined(__AMX_BF16__)
#include "linear_quantized_amx.h"
#elif !defined(__AVX512BF16__)
#include "linear_quantized_simd.h"
#endif

namespace rhizome {
namespace {

inline float number(float x) { return x; }
inline float number(bf16 x) { return to_float(x); }

// What codes a scheme has.
enum class Codes { kInt4, kInt8, kFloat8 };

// One group of `count` numbers; returns the scale, NaN where one of them is.
template <class Element>
float quantize_group(const Element* x, int64_t count, Codes kind, uint8_t* codes) {
  floats lows = {}, highs = {};
  words nans = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const floats value = load(x + i);
    lows = select(value < lows, value, lows);
    highs = select(value > highs, value, highs);
    nans |= (words)(value != value);
  }
  float low = 0, high = 0;
  bool nan = false;
  for (; i < count; ++i) {
    const float value = number(x[i]);
    low = std::min(low, value), high = std::max(high, value), nan |= value != value;
  }
  for (int lane = 0; lane < kLanes; ++lane)
    low = std::min(low, lows[lane]), high = std::max(high, highs[lane]), nan |= nans[lane] != 0;
  if (nan) {
    std::memset(codes, 0, count);
    return __builtin_nanf("");
  }
  const float largest = std::max(-low, high);
  float scale = kind == Codes::kInt4 ? (-low > high ? -low : -high) / 8 : largest / (kind == Codes::kInt8 ? 127.0f : kMostFloat8);
  if (std::abs(scale) < 1e-30f) scale = 0;
  const float inverse = scale == 0 ? 0.0f : 1.0f / scale;
  if (kind == Codes::kFloat8) {
    for (i = 0; i < count; ++i) codes[i] = float8_code(number(x[i]) * inverse);
    return scale;
  }
  const int32_t middle = kind == Codes::kInt4 ? 8 : 128, last = 2 * middle - 1;
  for (i = 0; i < count; ++i) {
    const int32_t code = static_cast<int32_t>(__builtin_nearbyintf(number(x[i]) * inverse)) + middle;
    codes[i] = static_cast<uint8_t>(std::clamp(code, 0, last));
  }
  return scale;
}

template <class Element>
void quantize(const Element* source, int64_t stride, int64_t rows, int64_t inputs, int64_t group, Codes kind,
              uint8_t* codes, float* scales) {
  const int64_t groups = (inputs + group - 1) / group;
  parallel_for(rows, [&](int64_t row, int) {
    for (int64_t i = 0; i < groups; ++i)
      scales[row * groups + i] = quantize_group(source + row * stride + i * group, std::min(group, inputs - i * group),
                                                kind, codes + row * inputs + i * group);
  });
}

#if !defined(__AMX_BF16__)
// Words of codes of 4 bits, as `place_of` has them: of one input in each of some pairs, or of inputs side by side.
#if defined(RHIZOME_INTEGERS) || defined(__AVX512BF16__)
using CodeWord = uint16_t;
#else
using CodeWord = uint32_t;
#endif
#if defined(RHIZOME_INTEGERS) || defined(__AVX512BF16__)
constexpr int kApart = 2;  // inputs of a word, one after the other
#else
constexpr int kApart = 1;
#endif
constexpr int kOfWord = 2 * sizeof(CodeWord);
#endif

// How many inputs of an output have their bytes side by side (`place_of`).
constexpr int bytes_together(Format format) {
  if (in_quads(format) || format == Format::kInt8Segments) return 4;
#if defined(__AMX_BF16__)
  return 32;
#else
  return as_numbers(format) || in_integers(format) ? 2 : 1;
#endif
}

template <int kTogether>
void put_bytes(Format format, int output, const uint8_t* from, uint8_t* codes) {
  for (int input = 0; input < 32; input += kTogether)
    std::memcpy(codes + place_of(format, output, input).byte, from + input, kTogether);
}

// Puts the 32 codes of an output into a block, where they are 0.
void add_codes(Format format, int output, const uint8_t* from, uint8_t* codes) {
  if (!in_nibbles(format)) {
    switch (bytes_together(format)) {
      case 32: return put_bytes<32>(format, output, from, codes);
      case 4: return put_bytes<4>(format, output, from, codes);
      case 2: return put_bytes<2>(format, output, from, codes);
      default: return put_bytes<1>(format, output, from, codes);
    }
  }
  if (in_segments(format)) {
    for (int input = 0; input < 32; ++input) {
      const CodePlace at = place_of(format, output, input);
      codes[at.byte] |= static_cast<uint8_t>(from[input] << at.shift);
    }
    return;
  }
#if defined(__AMX_BF16__)
  auto* const words = reinterpret_cast<uint16_t*>(codes) + output / 4 * 32;
  for (int input = 0; input < 32; ++input) words[input] |= static_cast<uint16_t>(from[input] << output % 4 * 4);
#else
  for (int first = 0; first < 32; first += kApart * kOfWord)
    for (int turn = 0; turn < kApart; ++turn) {
      CodeWord word = 0;
#pragma GCC unroll 8
      for (int i = 0; i < kOfWord; ++i) word |= static_cast<CodeWord>(CodeWord{from[first + i * kApart + turn]} << 4 * i);
      std::memcpy(codes + place_of(format, output, first + turn).byte, &word, sizeof word);
    }
#endif
}

}  // namespace

#if defined(__AMX_BF16__)
void multiply_codes(const PackedMatrix& weights, const TurnedRows& x, int64_t row_begin, int64_t row_end, int64_t panel,
                    RowSums then) {
  switch (weights.format) {
    case Format::kInt8: return multiply_format<Format::kInt8>(weights, x, row_begin, row_end, panel, then);
    case Format::kInt4: return multiply_format<Format::kInt4>(weights, x, row_begin, row_end, panel, then);
    case Format::kFloat8Channel:
      return multiply_format<Format::kFloat8Channel>(weights, x, row_begin, row_end, panel, then);
    case Format::kFloat8: return multiply_format<Format::kFloat8>(weights, x, row_begin, row_end, panel, then);
    case Format::kFloat4: return multiply_format<Format::kFloat4>(weights, x, row_begin, row_end, panel, then);
    case Format::kInt8Channel:
    case Format::kInt8Both:
    case Format::kInt4Segments:
    case Format::kInt8Segments:
    case Format::kFloat4Segments:
    case Format::kBFloat16:
    case Format::kCompressed: return;
  }
}
#elif !defined(__AVX512BF16__)
namespace {

// Calls take(CodePiece) for what `weights` are.
template <class Take>
void with_codes(const PackedMatrix& weights, int64_t block, Take take) {
  [[maybe_unused]] const bool zeros = weights.zeros != nullptr;
  switch (weights.format) {
#if !defined(RHIZOME_INTEGERS)
    case Format::kInt8Both:
    case Format::kInt8Channel: return take(CodePiece<Format::kInt8Channel, false>(weights, block));
    case Format::kInt8:
      return zeros ? take(CodePiece<Format::kInt8, true>(weights, block)) : take(CodePiece<Format::kInt8, false>(weights, block));
    case Format::kInt4:
      return zeros ? take(CodePiece<Format::kInt4, true>(weights, block)) : take(CodePiece<Format::kInt4, false>(weights, block));
    case Format::kFloat4: return take(CodePiece<Format::kFloat4, false>(weights, block));
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    case Format::kFloat8: return take(CodePiece<Format::kFloat8, false>(weights, block));
#else
    case Format::kFloat8:  // whose scales multiply sums, too
#endif
    case Format::kFloat8Channel: return take(CodePiece<Format::kFloat8Channel, false>(weights, block));
    default: return;
  }
}

}  // namespace

void code_pass(const PackedMatrix& weights, int64_t block, int count, const SimdRows& rows, int64_t steps, LinesAhead& ahead) {
  with_codes(weights, block, [&](const auto& piece) { simd_pass(count, rows, piece, steps, ahead); });
}

void widen_codes(const PackedMatrix& weights, int64_t block, int64_t count, bf16* out) {
  with_codes(weights, block, [&](const auto& piece) { piece.widen(count, out); });
}
#endif

}  // namespace rhizome

int rhizome_knows(int format) {
  [[maybe_unused]] const auto of = static_cast<rhizome::Format>(format);
#if defined(RHIZOME_INT8_DOTS)
  return 1;
#elif defined(RHIZOME_BYTE_PAIRS)
  return of != rhizome::Format::kInt8Segments;
#else
  return !rhizome::in_segments(of);
#endif
}

int rhizome_scales_sums([[maybe_unused]] int format) {
#if defined(__AMX_BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return 0;
#elif defined(__AVX512BF16__)
  const auto of = static_cast<rhizome::Format>(format);
  return rhizome::as_numbers(of) && !rhizome::by_channel(of);
#else
  return rhizome::is_float8(static_cast<rhizome::Format>(format));
#endif
}

void rhizome_quantize(const void* source, int wide, int64_t stride, int64_t rows, int64_t inputs, int64_t group,
                      int bits, int floating, uint8_t* codes, float* scales) {
  using namespace rhizome;
  const Codes kind = floating ? Codes::kFloat8 : bits == 4 ? Codes::kInt4 : Codes::kInt8;
  if (wide)
    quantize(static_cast<const float*>(source), stride, rows, inputs, group, kind, codes, scales);
  else
    quantize(static_cast<const bf16*>(source), stride, rows, inputs, group, kind, codes, scales);
}

void rhizome_pack_codes(const rhizome::PackedMatrix* weights, const uint8_t* source, int64_t stride, int64_t rows,
                        int halved, int64_t first, int paired) {
  using namespace rhizome;
  // Tasks are rows of one panel at most, which share no byte with others.
  const int64_t per_panel = paired == 0 ? kPanel : kTile;
  const int64_t begin_panel = first / per_panel, end_panel = (first + rows + per_panel - 1) / per_panel;
  parallel_for(end_panel - begin_panel, [&](int64_t task, int) {
    const int64_t panel = begin_panel + task;
    const int64_t begin = std::max(first, panel * per_panel), end = std::min(first + rows, (panel + 1) * per_panel);
    for (int64_t step = 0; step < blocks(weights->inputs); ++step) {
      uint8_t* const codes = const_cast<uint8_t*>(codes_at(*weights, panel, step));
      const int64_t count = std::min<int64_t>(32, weights->inputs - step * 32);
      for (int64_t at = begin; at < end; ++at) {
        const uint8_t* const from = source + (at - first) * stride + step * (halved != 0 ? 16 : 32);
        uint8_t row[32] = {};
        if (halved != 0)
          for (int64_t i = 0; i < count; ++i) row[i] = stored(*weights, from[i / 2] >> i % 2 * 4 & 15);
        else
          std::transform(from, from + count, row, [&](uint8_t code) { return stored(*weights, code); });
        add_codes(weights->format, static_cast<int>(at % per_panel + (paired == 2 ? kTile : 0)), row, codes);
      }
    }
  });
}
