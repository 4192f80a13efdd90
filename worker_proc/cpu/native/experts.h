// The experts of a mixture (Shazeer et al., 2017): gated MLPs, a few of which every token goes through.
#pragma once

#include <cstdint>

#include "abi.h"
#include "bf16.h"
#include "linear.h"

// out float32 [tokens, outputs of a down projection] = sum over j of shares[t, j] * expert chosen[t, j] of x[t], added up in
// ascending order of experts, so that a token's bits do not depend on the others. An expert that is not below `experts` is
// none. `gate_ups` (paired) and `downs` have `experts` matrices; x bfloat16 [tokens, inputs] with `x_stride` elements between
// rows; chosen and shares [tokens, each]. `finish` is one of those that multiply gates and ups.
RHIZOME_EXPORT void rhizome_experts(const rhizome::PackedMatrix* gate_ups, const rhizome::PackedMatrix* downs,
                                    int64_t experts, const rhizome::bf16* x, int64_t x_stride, int64_t tokens,
                                    const int64_t* chosen, const float* shares, int64_t each, int finish, float* out);
