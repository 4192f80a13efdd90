// What a task of a product works on, and how it cuts its inputs.
#pragma once

#include <algorithm>

#include "linear.h"

namespace rhizome {

constexpr int64_t kGroupRows = 576;  // of x that a task takes at most, for the L2 cache: 512 and some decodes
constexpr int64_t kSteps = 8;        // blocks of 32 inputs in one pass over the rows of a group: 16 KiB of weights
constexpr int64_t kWholeSteps = 32;  // more blocks are taken in parts
constexpr int64_t kPartSteps = 16;   // blocks in a part
constexpr int64_t kPartRows = 320;   // the same where the inputs are taken in parts: 256 and some decodes
constexpr int64_t kMaxChunk = kMaxHead / kPanel;
constexpr int kBlockLines = 2 * kTileElements * sizeof(bf16) / 64;

// Rows of x and panels of weights, [begin, end).
struct Range {
  int64_t row_begin, row_end, panel_begin, panel_end;
};

// Block `step` of the inputs of a panel.
inline const bf16* weights_at(const PackedMatrix& weights, int64_t panel, int64_t step) {
  return weights.data + (panel * blocks(weights.inputs) + step) * 2 * kTileElements;
}

// Room for the sums of a task: of all its panels where the inputs are taken in parts, else of one.
inline float* sums_of_thread() {
  alignas(64) static thread_local float sums[std::max(kGroupRows, kPartRows * kMaxChunk) * kPanel];
  return sums;
}

}  // namespace rhizome
