#include "short_conv.h"

#include <algorithm>

#include "causal_conv.h"
#include "pieces.h"

namespace rhizome {
namespace {

constexpr int64_t kBlock = 256;  // channels of a task

// The channels from `first` on of a segment.
void run(const ConvBatch& b, const int64_t* segment, int64_t first) {
  const int64_t width = b.channels, row = b.inputs_stride;
  const bf16* const from = b.inputs + segment[1] * row + first;
  bf16* const to = b.out + segment[1] * b.out_stride + first;
  convolve(
      b.kernel, b.conv + (segment[0] * width + first) * b.kernel, b.weight + first, width, std::min(kBlock, width - first),
      segment[2],
      [&](int64_t t, int64_t c) {
        const bf16* const at = from + t * row + c;
        return widen(narrow(load(at) * load(at + 2 * width)));
      },
      [&](int64_t t, int64_t c, floats sum) {
        store(to + t * b.out_stride + c, load(from + t * row + width + c) * (sum + load(b.bias + first + c)));
      });
}

}  // namespace

void copy_states(const ConvBatch& batch, const int64_t* copies, int64_t count) {
  const int64_t size = batch.channels * batch.kernel;
  for (const int64_t* copy = copies; copy < copies + 2 * count; copy += 2)
    std::copy_n(batch.conv + copy[0] * size, size, batch.conv + copy[1] * size);
}

}  // namespace rhizome

void rhizome_short_conv(const rhizome::ConvBatch* batch) {
  using namespace rhizome;
  for_channels(batch->segments, batch->num_segments, batch->channels, kBlock,
               [&](const int64_t* segment, int64_t first) { run(*batch, segment, first); });
}
