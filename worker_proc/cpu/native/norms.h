// Norms of rows, for models whose layers are torch's.
#pragma once

#include <cstdint>

#include "abi.h"
#include "bf16.h"

// x / sqrt(mean(x**2) + eps) * weight for every row of x [rows, size], one after another; to `out`, the same.
RHIZOME_EXPORT void rhizome_rms_norm(const rhizome::bf16* x, int64_t rows, int64_t size, const float* weight, float eps,
                                     rhizome::bf16* out);
