#include "selective_scan.h"

#include <algorithm>

#include "causal_conv.h"
#include "pieces.h"

namespace rhizome {
namespace {

constexpr int64_t kConvolved = 256;  // channels of a task
constexpr int64_t kScanned = 4 * kLanes;

void mix(const ScanBatch& b, const int64_t* segment, int64_t first) {
  const bf16* const from = b.projected + segment[1] * 2 * b.channels + first;
  bf16* const to = b.mixed + segment[1] * b.channels + first;
  convolve(
      b.kernel, b.conv + (segment[0] * b.channels + first) * b.kernel, b.conv_weight + first, b.channels,
      std::min(kConvolved, b.channels - first), segment[2], [&](int64_t t, int64_t c) { return load(from + t * 2 * b.channels + c); },
      [&](int64_t t, int64_t c, floats sum) { store(to + t * b.channels + c, silu(sum + load(b.conv_bias + first + c))); });
}

// log(1 + exp(x)), with the series of 2 atanh(u / (2 + u)) = log(1 + u) for u = exp(-|x|).
inline floats softplus(floats x) {
  const floats size = select(x > 0.0f, x, -x), power = exp(-size);
  const floats z = power / (power + 2.0f), square = z * z;
  floats series = splat(1.0f / 15);
  for (const float term : {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f}) series = series * square + term;
  return select(x > 0.0f, x, floats{}) + 2.0f * z * series;
}

// Up to kScanned channels of a segment, kLanes at a time: S = exp(dt * rate) * S + dt * x * B, out = (S C + skip * x) * silu(gate).
class Scan {
 public:
  Scan(const ScanBatch& batch, const int64_t* segment, int64_t first) : b_(batch), segment_(segment), first_(first) {}

  void run() {
    alignas(64) float weights[2 * kPieceTokens * kMostStates];  // B and C, which several vectors of channels go by
    const int64_t last = std::min(first_ + kScanned, b_.channels);
    for (int64_t begin = 0; begin < segment_[2]; begin += kPieceTokens) {
      const int64_t token = segment_[1] + begin, count = std::min(kPieceTokens, segment_[2] - begin);
      float* to = weights;
      for (int64_t t = token; t < token + count; ++t)
        for (int64_t n = 0; n < b_.states; ++n) {
          *to++ = to_float(b_.into[t * b_.states + n]);
          *to++ = to_float(b_.out_of[t * b_.states + n]);
        }
      for (int64_t channel = first_; channel < last; channel += kLanes) {
        if (b_.states == 16)
          scan<16>(channel, token, count, weights);
        else
          scan<0>(channel, token, count, weights);
      }
    }
  }

 private:
  template <int kStates>
  void scan(int64_t channel, int64_t token, int64_t count, const float* weights) const {
    const int64_t states = kStates ? kStates : b_.states, channels = b_.channels;
    float* const held = b_.state + (segment_[0] * channels + channel) * states;
    floats state[kStates ? kStates : kMostStates], rate[kStates ? kStates : kMostStates];
    for (int64_t n = 0; n < states; ++n) {
      for (int lane = 0; lane < kLanes; ++lane) state[n][lane] = held[lane * states + n];
      rate[n] = load(b_.rate + n * channels + channel);
    }
    const floats skip = load(b_.skip + channel);
    for (int64_t t = token; t < token + count; ++t) {
      const floats x = load(b_.mixed + t * channels + channel), step = softplus(load(b_.steps + t * channels + channel));
      const floats added = step * x;
      floats sum = skip * x;
      for (int64_t n = 0; n < states; ++n, weights += 2) {
        state[n] = exp(step * rate[n]) * state[n] + added * weights[0];
        sum = sum + state[n] * weights[1];
      }
      const floats gate = load(b_.projected + (2 * t + 1) * channels + channel);
      store(b_.out + t * channels + channel, sum * silu(gate));
    }
    for (int64_t n = 0; n < states; ++n)
      for (int lane = 0; lane < kLanes; ++lane) held[lane * states + n] = state[n][lane];
  }

  const ScanBatch& b_;
  const int64_t* const segment_;
  const int64_t first_;
};

}  // namespace
}  // namespace rhizome

using namespace rhizome;

void rhizome_scan_convolve(const ScanBatch* batch) {
  for_channels(batch->segments, batch->num_segments, batch->channels, kConvolved,
               [&](const int64_t* segment, int64_t first) { mix(*batch, segment, first); });
}

void rhizome_selective_scan(const ScanBatch* batch) {
  for_channels(batch->segments, batch->num_segments, batch->channels, kScanned,
               [&](const int64_t* segment, int64_t first) { Scan(*batch, segment, first).run(); });
}
