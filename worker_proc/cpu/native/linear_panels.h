// The products of all rows with all panels of a matrix, however it is stored.
#pragma once

#include <cstdint>

#include "callback.h"
#include "linear.h"

namespace rhizome {

using BeforePanel = Callback<int64_t, int64_t, int>;  // panel, row, count
using PanelSums = Callback<int64_t, int64_t, int, float*>;  // and sums [count, 32], which may be written to
using ThenPanel = Callback<int64_t, int64_t, int, const float*, int>;  // and sums, thread

// Calls then(panel, row, count, sums, thread) for all panels and rows, and before(panel, row, count) some time before (not
// where quantized weights are widened for AMX). One thread takes `unit` panels one after another for the same rows, at most kGroupRows.
void for_panels(const PackedMatrix& weights, const bf16* x, int64_t x_stride, int64_t rows, BeforePanel before, ThenPanel then,
                int64_t unit = 1);

}  // namespace rhizome
