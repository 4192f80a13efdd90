// Weights in 8 or 4 bits: codes that are widened to bfloat16, some blocks of inputs at a time, right before they are
// multiplied. They are streamed from memory as codes; what is widened lives in the L1 cache.
//
//   kInt8Channel  weight = (code - 128) * scale, one scale per output. Differences of codes are whole numbers up to
//                 128, which bfloat16 holds exactly; the scale multiplies the sums.
//   kInt8Both     the same, and rows of x are rounded to int8, too, with a scale per row (W8A8): see fixed_point.h.
//   kInt8, kInt4  weight = (code - zero) * scale, rounded to bfloat16, a scale (and a zero) per group of inputs.
//   kInt4Segments, kInt8Segments, kFloat4Segments  kInt4, kInt8 and kFloat4 where rows of x are rounded to int8, too, with a scale for each segment (W4A8),
//                 and bytes are multiplied: see linear_task_segments.h.
//   kFloat8Channel, kFloat8  as kInt8, where a code is a number of FP8 (E4M3, without NaN), and its own weight: what
//                 bfloat16 holds, or times a scale per group, rounded to bfloat16. Numbers are 2^-8 of those that codes
//                 stand for (see float8.h), scales 2^8 times as large.
//   kFloat4       the same with numbers of FP4 (E2M1), twice as large, and scales half as large, a byte each (float4.h).
//
// So the sums are, bit for bit, those of a bfloat16 matrix of the widened weights, and what linear.h promises holds.
// With AVX512's dot products (linear_number_dots.h), and everywhere without dot products of bfloat16, scales of groups multiply sums
// instead of weights, which are rounded to nothing: sums of integers (linear_integers.h) on x86, FP4's included, of FP8 on all
// processors.
// Codes lie in panels of 32 outputs and blocks of 32 inputs, as bfloat16 weights do. Within a block the order is that of
// the micro-kernel: see `place_of`.
#pragma once

#include <type_traits>

#include "float4.h"
#include "float8.h"
#include "linear.h"
#include "linear_task.h"
#include "scale_forms.h"

#if defined(__AVX2__) && !defined(__AVX512BF16__)
#define RHIZOME_INTEGERS  // products of integer codes are computed in integers, see linear_integers.h
#endif

namespace rhizome {

// Those of AVX2 need FMA, too: sums of segments are scaled and added in one rounding.
#if !defined(__AMX_INT8__) && (defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && defined(__FMA__) && !defined(__AVX512F__)))
#define RHIZOME_INT8_DOTS  // rows of int8 are multiplied as bytes, see plane_rows.h
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define RHIZOME_BYTE_PAIRS  // rows of int8 are multiplied as bytes with codes of 4 bits, see segment_sums.h
#endif
#if defined(RHIZOME_INT8_DOTS) || defined(RHIZOME_BYTE_PAIRS)
#define RHIZOME_SEGMENTS  // formats `in_segments` are known
#endif

inline constexpr int64_t kBlockWeights = 32 * kPanel;

constexpr bool has_codes(Format format) { return format != Format::kBFloat16 && format != Format::kCompressed; }
constexpr bool is_float4(Format format) { return format == Format::kFloat4 || format == Format::kFloat4Segments; }
constexpr bool in_nibbles(Format format) {  // 4 bits each
  return format == Format::kInt4 || format == Format::kInt4Segments || is_float4(format);
}
constexpr bool in_segments(Format format) {
  return format == Format::kInt4Segments || format == Format::kInt8Segments || format == Format::kFloat4Segments;
}
constexpr int64_t code_bytes(Format format, int64_t weights) { return in_nibbles(format) ? weights / 2 : weights; }
constexpr bool int8_by_channel(Format format) { return format == Format::kInt8Channel || format == Format::kInt8Both; }
constexpr bool by_channel(Format format) { return int8_by_channel(format) || format == Format::kFloat8Channel; }
// Whether bytes of four inputs lie side by side, in blocks of 64 inputs: two tiles of 16 outputs, which are 16 rows, one per four
// inputs, of 16 outputs times 4 inputs. Two bytes in the place of a bfloat16, that is the layout of linear.h with half of the
// inputs.
constexpr bool in_quads([[maybe_unused]] Format format) {
#if defined(__AMX_INT8__)
  return int8_by_channel(format);
#elif defined(RHIZOME_INT8_DOTS) && defined(__AVX512BF16__)
  return int8_by_channel(format);  // rather than as bfloat16
#elif defined(RHIZOME_INT8_DOTS)
  return format == Format::kInt8Both;
#else
  return false;
#endif
}
constexpr bool in_integers([[maybe_unused]] Format format) {
#if defined(RHIZOME_INTEGERS)
  return (int8_by_channel(format) && !in_quads(format)) || format == Format::kInt8 ||
         (in_nibbles(format) && !in_segments(format));
#else
  return false;
#endif
}
constexpr bool is_float8(Format format) { return format == Format::kFloat8Channel || format == Format::kFloat8; }
inline int64_t groups(const PackedMatrix& weights) {
  return by_channel(weights.format) ? 1 : scale_groups(weights);
}

// The scales of a matrix of this format, see float4.h.
template <Format kFormat>
using Scale = std::conditional_t<is_float4(kFormat), uint8_t, float>;
template <Format kFormat>
inline const Scale<kFormat>* scales_of(const PackedMatrix& weights) {
  return reinterpret_cast<const Scale<kFormat>*>(weights.scales);
}

inline float middle_code(Format format) { return in_nibbles(format) ? 8.0f : 128.0f; }
// The same of codes that are multiplied as integers, FP4's numbers kMostFloat4 more than they are.
constexpr int middle_number(Format format) { return is_float4(format) ? kMostFloat4 : in_nibbles(format) ? 8 : 128; }

// Whether codes are multiplied as the numbers of bfloat16 that they are (linear_number_dots.h).
constexpr bool as_numbers([[maybe_unused]] Format format) {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  return has_codes(format) && !in_quads(format) && !in_segments(format);
#else
  return false;
#endif
}

// Where the code of an output and input of a block is.
struct CodePlace {
  int64_t byte;
  int shift;
};

// For AMX (linear_quantized_amx.h), the inputs of an output are side by side; four outputs share words of 16 bits in
// int4. For dot products (linear_number_dots.h) bytes are in the order of the bfloat16 layout: tiles, pairs of inputs,
// outputs, the two inputs of a pair, or, if they are looked up (code_numbers.h), two pairs of inputs of four outputs share 16 bytes;
// elsewhere (linear_quantized_simd.h) tiles, inputs, outputs. int4 is in words then, so that no
// code need leave its lane: of 32 bits and eight inputs, [tile][4][16 outputs], and with dot products of 16 bits, of one input in
// each of four pairs, [tile][4][16 outputs][2]. In integers (linear_integers.h), both lie as for dot products.
inline CodePlace place_of(Format format, int64_t output, int64_t input) {
  if (in_quads(format))
    return {output / kTile * kTileElements * 2 + input / 4 * 4 * kTile + output % kTile * 4 + input % 4, 0};
  if (format == Format::kInt8Segments)
    return {output / kTile * kTileElements + input / 4 * 4 * kTile + output % kTile * 4 + input % 4, 0};
  if (in_segments(format))
    return {output / kTile * kTileElements / 2 + input / 8 * 4 * kTile + output % kTile * 4 + input % 4,
            static_cast<int>(input / 4 % 2 * 4)};
#if defined(__AMX_BF16__)
  if (in_nibbles(format))
    return {output / 4 * 64 + input * 2 + output % 4 / 2, static_cast<int>(output % 2 * 4)};
  return {output * 32 + input, 0};
#else
  if (in_nibbles(format)) {
#if defined(RHIZOME_INTEGERS) || defined(__AVX512BF16__)
    const int64_t pair = input / 2, row = output / kTile * 4 + pair / 4;
    return {row * 64 + (output % kTile * 2 + input % 2) * 2 + pair % 4 / 2, static_cast<int>(pair % 2 * 4)};
#else
    const int64_t row = output / kTile * 4 + input / 8;
    return {row * 64 + output % kTile * 4 + input % 8 / 2, static_cast<int>(input % 2 * 4)};
#endif
  }
#if defined(__AVX512VBMI__)
  if (as_numbers(format)) {
    const int64_t in_lane = input % 4 / 2 * 8 + output % 4 * 2 + input % 2;
    return {output / kTile * kTileElements + input / 4 * 64 + output % kTile / 4 * 16 + in_lane, 0};
  }
#endif
  const CodePlace in_pairs{output / kTile * kTileElements + input / 2 * 2 * kTile + output % kTile * 2 + input % 2, 0};
#if defined(__AVX512BF16__)
  return in_pairs;
#else
  return in_integers(format) ? in_pairs : CodePlace{output / kTile * kTileElements + input * kTile + output % kTile, 0};
#endif
#endif
}

// A code as it is stored, and the other way round: those of int8 are signed, but for those in quads, those in groups on AMX and,
// in groups with zeros, elsewhere than with dot products of bfloat16; where they are looked up (code_numbers.h), a bit that says
// whether they are below the middle one, or not, and how far from it. In integers, those of FP4 begin with the least number
// (linear_integers.h).
inline uint8_t stored([[maybe_unused]] const PackedMatrix& weights, uint8_t code) {
  if (in_quads(weights.format)) return code;
#if !defined(__AMX_BF16__)
  if (int8_by_channel(weights.format) || weights.format == Format::kInt8) {
#if defined(__AVX512VBMI__)
    if (as_numbers(weights.format)) return code >= 128 ? code : -code & 127;
#endif
    if (as_numbers(weights.format) || weights.zeros == nullptr) return code ^ 128;
  }
#endif
  if (in_integers(weights.format) && weights.format == Format::kFloat4) return code ^ 15;
  return code;
}

// The codes of block `step` of a panel.
inline const uint8_t* codes_at(const PackedMatrix& weights, int64_t panel, int64_t step) {
  if (in_quads(weights.format)) {  // two blocks share tiles
    const int64_t pair = panel * ((blocks(weights.inputs) + 1) / 2) + step / 2;
    return reinterpret_cast<const uint8_t*>(weights.data) + pair * 2 * kBlockWeights + step % 2 * kTileElements;
  }
  const int64_t block = panel * blocks(weights.inputs) + step;
  return reinterpret_cast<const uint8_t*>(weights.data) + code_bytes(weights.format, block * kBlockWeights);
}

// A matrix `in_quads` as one of bfloat16 with the same memory.
inline PackedMatrix as_pairs(const PackedMatrix& weights) {
  PackedMatrix pairs = weights;
  pairs.format = Format::kBFloat16;
  pairs.inputs = static_cast<int32_t>((blocks(weights.inputs) + 1) / 2 * 32);
  pairs.bias = pairs.scales = nullptr;
  return pairs;
}

// What is left to do for the sums [rows, 32] of a panel.
inline void scale_sums(const PackedMatrix& weights, int64_t panel, float* sums, int64_t rows) {
  if (!by_channel(weights.format)) return;
  for (int64_t row = 0; row < rows; ++row, sums += kPanel)
    for (int i = 0; i < kPanel; i += kLanes) store(sums + i, load(sums + i) * load(weights.scales + panel * kPanel + i));
}

// Input `input` of packed output `output`.
inline float widened(const PackedMatrix& weights, int64_t output, int64_t input) {
  const int64_t panel = output / kPanel, place = output % kPanel;
  const CodePlace at = place_of(weights.format, place, input % 32);
  const int byte = codes_at(weights, panel, input / 32)[at.byte] >> at.shift;
  const int code = stored(weights, static_cast<uint8_t>(in_nibbles(weights.format) ? byte & 15 : byte));
  const int64_t group = by_channel(weights.format) ? 0 : input / weights.group;
  if (weights.scale_form != ScaleForm::kFloat32) {
    const GroupScales some = scales_at(weights, panel, groups(weights), group, static_cast<int>(place / kLanes) * kLanes);
    float scale = some.scale[place % kLanes], zero = middle_code(weights.format);
    if (has_below(weights)) {  // as `steps_of` in worker_proc/quantization/rows.py
      const float below = some.zero[place % kLanes];
      scale = scale == 0 ? -below : scale;
      scale = scale == 0 ? 1 : scale;
      zero = below / scale;
    }
    return (static_cast<float>(code) - zero) * scale;
  }
  const int64_t scale = (panel * groups(weights) + group) * kPanel + place;
  if (is_float8(weights.format)) return float8_number(code) * weights.scales[scale];
  if (is_float4(weights.format)) return kFloat4Numbers[code] * scale_of(scales_of<Format::kFloat4>(weights)[scale]);
  const float zero = weights.zeros != nullptr ? weights.zeros[scale] : middle_code(weights.format);
  return (static_cast<float>(code) - zero) * weights.scales[scale];
}

}  // namespace rhizome

// Rows [rows, inputs] of bfloat16 (or float32 if `wide`), `stride` elements apart, to codes [rows, inputs] and scales
// [rows, groups] of `group` inputs: what worker_proc/quantization/rows.py defines, to the last bit. FP8 if `floating`.
RHIZOME_EXPORT void rhizome_quantize(const void* source, int wide, int64_t stride, int64_t rows, int64_t inputs,
                                     int64_t group, int bits, int floating, uint8_t* codes, float* scales);

// Whether a matrix may have this format.
RHIZOME_EXPORT int rhizome_knows(int format);

// Whether sums of products over all inputs are exact.
RHIZOME_EXPORT int rhizome_exact(int format);

// Whether products of integer codes are computed in integers.
RHIZOME_EXPORT int rhizome_integers();

// Whether the scales of groups multiply sums of floating point numbers.
RHIZOME_EXPORT int rhizome_scales_sums(int format);

// Puts codes [rows, inputs] (`stride` bytes apart) into the zeroed memory of `weights`, as rhizome_pack does. Codes of 4 bits may
// be `halved`: [rows, inputs / 2], the first of two in the lower half of a byte.
RHIZOME_EXPORT void rhizome_pack_codes(const rhizome::PackedMatrix* weights, const uint8_t* source, int64_t stride,
                                       int64_t rows, int halved, int64_t first, int paired);
