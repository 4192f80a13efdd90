#include "state_space.h"

#include <cmath>
#include <memory>

#include "causal_conv.h"
#include "parallel.h"
#include "pieces.h"
#include "rows.h"

namespace rhizome {
namespace {

constexpr int64_t kChannels = 128;  // of the convolution in a task
constexpr int64_t kRows = 16;       // of a head's state that all tokens of a piece go by while they are in the L1 cache
constexpr int64_t kNormed = 8;      // tokens of a task

class StateSpace {
 public:
  explicit StateSpace(const SpaceBatch& batch)
      : b_(batch),
        width_(batch.heads * batch.head_dim),
        channels_(width_ + 2 * batch.groups * batch.state_size),
        stride_(width_ + channels_ + batch.heads),
        mixed_stride_(float_stride(channels_)) {}

  void run() {
    in_rounds(b_.segments, b_.num_segments, [&](const std::vector<Piece>& pieces, int64_t tokens) {
      if (tokens > room_) {
        room_ = tokens;
        mixed_.reset(new float[tokens * mixed_stride_]);
        values_.reset(new float[tokens * width_]);
      }
      const int64_t count = static_cast<int64_t>(pieces.size()), blocks = (channels_ + kChannels - 1) / kChannels;
      parallel_for(count * blocks, [&](int64_t task, int) { convolve(pieces[task / blocks], task % blocks); });
      parallel_for(count * b_.heads, [&](int64_t task, int) { recur(pieces[task / b_.heads], task % b_.heads); });
      constexpr int64_t kParts = kPieceTokens / kNormed;
      parallel_for(count * kParts, [&](int64_t task, int) {
        const Piece& piece = pieces[task / kParts];
        const int64_t begin = task % kParts * kNormed;
        for (int64_t t = begin; t < std::min(begin + kNormed, piece.count); ++t) finish(piece, t);
      });
    });
  }

 private:
  void convolve(const Piece& piece, int64_t block) {
    const int64_t first = block * kChannels;
    const bf16* const from = projected(piece, 0) + width_ + first;
    float* const to = mixed(piece, 0) + first;
    rhizome::convolve(
        b_.kernel, b_.conv + (piece.row * channels_ + first) * b_.kernel, b_.conv_weight + first, channels_,
        std::min(kChannels, channels_ - first), piece.count,
        [&](int64_t t, int64_t c) { return load(from + t * stride_ + c); },
        [&](int64_t t, int64_t c, floats sum) { store(to + t * mixed_stride_ + c, silu(sum + load(b_.conv_bias + first + c))); });
  }

  // S = exp(dt * rate) * S + dt * x B^T, out = S C + skip * x. Rows of the state are independent.
  void recur(const Piece& piece, int64_t head) {
    const int64_t group = head / (b_.heads / b_.groups), size = b_.state_size;
    float decay[kPieceTokens], step[kPieceTokens];
    for (int64_t t = 0; t < piece.count; ++t) {
      const float x = to_float(projected(piece, t)[width_ + channels_ + head]) + b_.dt_bias[head];
      const float dt = x > 20.0f ? x : std::log1p(std::exp(x));
      step[t] = std::min(std::max(dt, b_.least_dt), b_.most_dt);
      decay[t] = std::exp(step[t] * b_.rate[head]);
    }
    float* state = b_.state + (piece.row * b_.heads + head) * b_.head_dim * size;
    for (int64_t first = 0; first < b_.head_dim; first += kRows)
      for (int64_t t = 0; t < piece.count; ++t) {
        const float* x = mixed(piece, t) + head * b_.head_dim;
        const float* in = mixed(piece, t) + width_ + group * size;
        const float* out = in + b_.groups * size;
        float* to = values(piece, t) + head * b_.head_dim;
        const floats kept = splat(decay[t]);
        for (int64_t row = first; row < first + kRows; row += 4) {
          float* s = state + row * size;
          floats sums[4] = {}, added[4];
          for (int i = 0; i < 4; ++i) added[i] = splat(step[t] * x[row + i]);
          for (int64_t n = 0; n < size; n += kLanes) {
            const floats b = load(in + n), c = load(out + n);
            for (int i = 0; i < 4; ++i) {
              const floats next = kept * load(s + i * size + n) + added[i] * b;
              store(s + i * size + n, next);
              sums[i] = sums[i] + next * c;
            }
          }
          for (int i = 0; i < 4; ++i) to[row + i] = sum(sums[i]) + b_.skip[head] * x[row + i];
        }
      }
  }

  // Times SiLU of the gate, then RMSNorm over groups; where others have a part of the only group, they divide later.
  void finish(const Piece& piece, int64_t t) {
    float* x = values(piece, t);
    const bf16* gate = projected(piece, t);
    bf16* out = b_.out + (piece.token + t) * width_;
    const int64_t size = width_ / b_.norm_groups;
    for (int64_t begin = 0; begin < width_; begin += size) {
      floats squares = {};
      for (int64_t c = begin; c < begin + size; c += kLanes) {
        const floats gated = load(x + c) * silu(load(gate + c));
        store(x + c, gated);
        squares = squares + gated * gated;
      }
      const float total = sum(squares);
      if (b_.squares) b_.squares[piece.token + t] = total;
      const floats factor = splat(b_.squares ? 1.0f : 1.0f / std::sqrt(total / static_cast<float>(size) + b_.eps));
      for (int64_t c = begin; c < begin + size; c += kLanes) store(out + c, load(x + c) * factor * load(b_.norm + c));
    }
  }

  const bf16* projected(const Piece& piece, int64_t t) const { return b_.projected + (piece.token + t) * stride_; }
  float* mixed(const Piece& piece, int64_t t) { return mixed_.get() + (piece.place + t) * mixed_stride_; }
  float* values(const Piece& piece, int64_t t) { return values_.get() + (piece.place + t) * width_; }

  const SpaceBatch& b_;
  const int64_t width_, channels_, stride_, mixed_stride_;
  int64_t room_ = 0;
  std::unique_ptr<float[]> mixed_, values_;  // of the tokens of a round
};

}  // namespace
}  // namespace rhizome

void rhizome_state_space(const rhizome::SpaceBatch* batch) { rhizome::StateSpace(*batch).run(); }
