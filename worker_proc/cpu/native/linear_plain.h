// Weights that are not stored as bfloat16, made so a piece at a time for kernels that know nothing else.
#pragma once

#include "linear_compressed.h"
#include "linear_quantized_simd.h"

namespace rhizome {

inline constexpr int kInflateTurns = 4;  // calls of `ahead` per block

// `count` blocks from `block` on, of weights that are not stored as bfloat16, in the layout of linear.h. `ahead` is called
// meanwhile if they are in 12 bits.
template <class Ahead>
inline void make_plain(const PackedMatrix& weights, int64_t block, int64_t count, bf16* out, [[maybe_unused]] Ahead&& ahead) {
  if (has_codes(weights.format)) return widen_codes(weights, block, count, out);
#if defined(__AVX2__) || defined(__ARM_NEON)
  const uint8_t* from = compressed_block(weights, block);
  const Inflater inflater(weights);
  bf16* to = out;
  for (int64_t pack = 0; pack < count * kBlockPacks; ++pack, from += kPackBytes, to += kPackWeights) {
    if (pack % (kBlockPacks / kInflateTurns) == 0) ahead();
    inflater.inflate(from, to);
  }
  put_exceptions(weights, block, block + count, out);
#endif
}

}  // namespace rhizome
