#include "short_conv.h"

#include <algorithm>

#include "causal_conv.h"
#include "parallel.h"

namespace rhizome {
namespace {

constexpr int64_t kBlock = 256;  // channels of a task

// The channels from `first` on of a segment.
void run(const ConvBatch& b, const int64_t* segment, int64_t first) {
  const int64_t width = b.channels, row = 3 * width;
  for (int64_t c = first; c < std::min(first + kBlock, width); c += kLanes) {
    const bf16* from = b.inputs + segment[1] * row + c;
    bf16* to = b.out + segment[1] * width + c;
    const floats bias = load(b.bias + c);
    convolve(
        b.conv + (segment[0] * width + c) * b.kernel, b.weight + c, width, b.kernel, segment[2],
        [&](int64_t t) { return widen(narrow(load(from + t * row) * load(from + t * row + 2 * width))); },
        [&](int64_t t, floats sum) { store(to + t * width, load(from + t * row + width) * (sum + bias)); });
  }
}

}  // namespace
}  // namespace rhizome

void rhizome_short_conv(const rhizome::ConvBatch* batch) {
  using namespace rhizome;
  const int64_t blocks = (batch->channels + kBlock - 1) / kBlock;
  parallel_for(batch->num_segments * blocks, [&](int64_t task, int) {
    run(*batch, batch->segments + 3 * (task / blocks), task % blocks * kBlock);
  });
}
