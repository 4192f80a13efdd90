// Quantized weights for vector registers without dot products of bfloat16: codes become float32 in registers, right before
// they are multiplied, rounded to bfloat16 as the formats say. FP8 on any processor, integers where linear_integers.h does
// not compute them: on Arm, and on x86 without AVX2.
#pragma once

#if !defined(__AVX512BF16__)  // which AMX has too

#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include <cstring>

#include "linear_quantized.h"
#include "linear_simd.h"
#include "registers.h"

namespace rhizome {

// To the nearest bfloat16, ties to even, for numbers from 2^-126 to 2^110. The last bit of the difference is worth that of a
// bfloat16 (half of it where the number is within 2^-16 of a power of two, to which it is rounded either way), so that is all
// that is left of the number: three instructions, where bits take five.
inline floats round_to_bf16(floats value) {
#if defined(__ARM_NEON)
  value = held(value);  // compilers would add a product before it is rounded
  const floats far = value * 65536.0f;
  const floats rest = far - value;
  return far - rest;
#else
  const words bits = (words)value;
  return (floats)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
#endif
}

// a * b + c, rounded once; where the CPU cannot, as kFuses says, not to be called.
#if defined(__aarch64__)
inline constexpr bool kFuses = true;
inline floats fused(floats a, floats b, floats c) {
  return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
inline constexpr bool kFuses = false;
inline floats fused(floats a, floats b, floats c) { return a * b + c; }
#endif

// kLanes codes of 8 bits.
template <bool kSigned>
inline floats numbers_of(const uint8_t* codes) {
#if defined(__ARM_NEON)
  typedef uint32_t TwoWords __attribute__((vector_size(8)));
  TwoWords four = {};
  std::memcpy(&four, codes, 4);
  if constexpr (kSigned) return (floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8((int8x8_t)four))));
  return (floats)vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8((uint8x8_t)four))));
#else
  floats numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = kSigned ? static_cast<int8_t>(codes[i]) : codes[i];
  return numbers;
#endif
}

// Codes from block `block` of a matrix on, as PlainPiece has bfloat16. kZeros: there are zeros.
template <Format kFormat, bool kZeros>
class CodePiece {
  static constexpr int kOfTile = kTile / kLanes;
  static constexpr int64_t kTileCodes = code_bytes(kFormat, kTileElements);

 public:
  CodePiece(const PackedMatrix& weights, int64_t block) : weights_(weights), block_(block) {}

  template <int kTiles>
  class Numbers {
    static constexpr int kVectors = kTiles * kOfTile;

   public:
    static constexpr int kRun = 8;

    Numbers(const PackedMatrix& weights, int64_t block, int tile)
        : codes_(codes_at(weights, 0, block) + tile * kTileCodes) {
      if constexpr (!by_channel(kFormat)) {
        const int64_t all = blocks(weights.inputs), panel = block / all, step = block % all;
        of_group_ = weights.group / 32, left_ = of_group_ - step % of_group_;
        const int64_t at = (panel * groups(weights) + step / of_group_) * kPanel + tile * kTile;
        scales_ = scales_of<kFormat>(weights) + at, zeros_ = kZeros ? weights.zeros + at : nullptr;
        enter();
      }
    }

    floats operator()(int input, int v) const {
      if constexpr (kFormat == Format::kFloat4) {
        return round_to_bf16(float4_numbers(eight_codes(v) >> 4 * input & 15u) * scale_[0][v]);
      } else if constexpr (kFormat == Format::kInt4) {
        // where they are in a word, codes are numbers 16^input times as large
        const words eight = eight_codes(v);
        const ints code = (ints)(input == 7 ? eight >> 28 : eight & 15u << 4 * input);
        const floats number = __builtin_convertvector(code, floats);
        const int place = input == 7 ? 0 : input;
        if constexpr (kOneStep) return round_to_bf16(fused(number, scale_[place][v], offset_[v]));
        return round_to_bf16((number * kPlaces[place] + offset_[v]) * scale_[0][v]);
      } else {
        const uint8_t* const codes = codes_ + v / kOfTile * kTileCodes + input * kTile + v % kOfTile * kLanes;
        floats number;
        if constexpr (is_float8(kFormat))
          number = float8_numbers(codes);
        else
          number = numbers_of<!kZeros>(codes);
        if constexpr (by_channel(kFormat)) return number;
        return round_to_bf16((kZeros ? number + offset_[v] : number) * scale_[0][v]);
      }
    }

    void next_run() { codes_ += kTileCodes / 32 * kRun; }

    void next_block() {
      codes_ += kTileCodes;
      if (by_channel(kFormat) || --left_ > 0) return;
      left_ = of_group_, scales_ += kPanel, zeros_ += kZeros ? kPanel : 0;
      enter();
    }

   private:
    // Of 4 bits: a word for each output.
    words eight_codes(int v) const {
      return *reinterpret_cast<const words*>(codes_ + v / kOfTile * kTileCodes + v % kOfTile * 4 * kLanes);
    }

    // Whether a weight is code * scale - 8 * scale, which is rounded once, as (code - 8) * scale is.
    static constexpr bool kOneStep = kFormat == Format::kInt4 && !kZeros && kFuses;

    // What belongs to a group.
    void enter() {
      for (int v = 0; v < kVectors; ++v) {
        const floats scale = load_scales(scales_ + v * kLanes);
        for (int place = 0; place < kScales; ++place) scale_[place][v] = scale * kPlaces[place];
        if constexpr (kZeros)
          offset_[v] = -load(zeros_ + v * kLanes);
        else
          offset_[v] = kOneStep ? scale * -8.0f : splat(-8.0f);
      }
    }

    static constexpr int kScales = kOneStep ? 7 : 1;
    static constexpr float kPlaces[] = {1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f};
    const uint8_t* codes_;
    const Scale<kFormat>* scales_ = nullptr;
    const float* zeros_ = nullptr;
    int64_t of_group_ = 1, left_ = 1;
    floats scale_[kScales][kVectors], offset_[kVectors];
  };

  template <int kTiles>
  Numbers<kTiles> at(int tile) const {
    return Numbers<kTiles>(weights_, block_, tile);
  }

  // `count` blocks in the layout of linear.h.
  void widen(int64_t count, bf16* out) const {
    for (int tile = 0; tile < 2; ++tile, out += kTileElements) {
      Numbers<1> numbers = at<1>(tile);
      words* to = reinterpret_cast<words*>(out);
      for (int64_t block = 0; block < count; ++block, to += kTileElements / (2 * kLanes), numbers.next_block())
        for (int run = 0; run < 32; run += Numbers<1>::kRun, numbers.next_run()) {
#pragma GCC unroll 4
          for (int pair = 0; pair < Numbers<1>::kRun / 2; ++pair)
            for (int v = 0; v < kOfTile; ++v) {
              const floats first = numbers(2 * pair, v), second = numbers(2 * pair + 1, v);
              *to++ = (words)first >> 16 | ((words)second & 0xffff0000u);
            }
        }
    }
  }

 private:
  const PackedMatrix& weights_;
  int64_t block_;
};

// Whether codes become numbers in registers, anew for every pass of so many rows. Otherwise a piece is widened before: where
// that is dear and there are several passes, or so many rows that they leave no registers for it.
inline bool widened_in_passing(Format format, int64_t rows) {
  if (int8_by_channel(format)) return true;
  return rows <= (in_nibbles(format) ? kSimdRows - 1 : kSimdRows);
}

// `simd_pass` for blocks [block, block + steps) of the panel they are in.
void code_pass(const PackedMatrix& weights, int64_t block, int count, const SimdRows& rows, int64_t steps, LinesAhead& ahead);

// `count` blocks from `block` on in the layout of linear.h.
void widen_codes(const PackedMatrix& weights, int64_t block, int64_t count, bf16* out);

}  // namespace rhizome

#endif
