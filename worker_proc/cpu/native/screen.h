// The largest output of each row by a look at int8 first: the weights of an output head are its bytes of codes and scales once
// more, whose products take half of the multiplications and half to two thirds of the memory. How far they are from the
// outputs proper is bounded, so that few panels remain in which the largest can be; those are multiplied as always, and the
// result is that of `linear_argmax` to the last bit.
//
// With x' and w' as rounded, x w - x' w' = (x - x') w + x' (w - w'), and by Cauchy and Schwarz that is at most
// |x - x'| |w| + |x'| |w - w'|: norms that are computed, of a row when it comes and of weights when they are loaded. To rank
// rounded products and verify the best of them is as old as vector quantization in searches for nearest neighbours (the
// VA-file: Weber, Schek and Blott, 1998).
#pragma once

#include "abi.h"
#include "linear.h"

namespace rhizome {

// Plain C types only: screen.py mirrors it with ctypes.
struct HeadScreen {
  PackedMatrix codes;   // of the same weights: kInt8Segments, or kInt8Channel where x keeps 16 bits
  const float* norms;   // [panels]: the largest |w| of an output
  const float* errors;  // [panels]: the largest |w - w'|
  int32_t* rest;        // [2, 2]: calls that do without the screen as it did not pay, and how many do the next time: of calls
                        // for the largest, of those for filtered logits
};

// What linear_argmax of `weights` gives (kBFloat16 or kCompressed without a bias, if there is a screen; it may be null).
void find_largest(const PackedMatrix& weights, const HeadScreen* screen, const bf16* x, int64_t x_stride, int64_t rows,
                  int64_t* index, float* best);

// What `linear` of `weights` gives, as float32, but minus infinity for outputs that no draw keeps. `params` double [4, rows] are
// each row's temperature, top_k, top_p and min_p (see sampling.h); `screen` may be null, and then there are all. `part`: other
// ranks have other outputs, which may be larger.
void filtered_outputs(const PackedMatrix& weights, const HeadScreen* screen, const bf16* x, int64_t x_stride, int64_t rows,
                      const double* params, bool part, float* out, int64_t out_stride);

}  // namespace rhizome

RHIZOME_EXPORT void rhizome_find_largest(const rhizome::PackedMatrix* weights, const rhizome::HeadScreen* screen,
                                         const rhizome::bf16* x, int64_t x_stride, int64_t rows, int64_t* index, float* best);

RHIZOME_EXPORT void rhizome_filtered_outputs(const rhizome::PackedMatrix* weights, const rhizome::HeadScreen* screen,
                                             const rhizome::bf16* x, int64_t x_stride, int64_t rows, const double* params,
                                             int part, float* out, int64_t out_stride);

// What `norms` and `errors` are the largest of, for rows [rows, inputs] of bfloat16 (`stride` elements apart) and what
// rhizome_quantize made of them with 8 bits; not finite where a weight is not.
RHIZOME_EXPORT void rhizome_code_errors(const rhizome::bf16* source, int64_t stride, int64_t rows, int64_t inputs, int64_t group,
                                        const uint8_t* codes, const float* scales, float* norms, float* errors);
