#include "state_space.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "causal_conv.h"
#include "parallel.h"
#include "pieces.h"
#include "room.h"
#include "rows.h"

namespace rhizome {
namespace {

constexpr int64_t kChannels = 128;  // of the convolution of B and C in a task
constexpr int64_t kEach = 4;        // sequences of a thread, at least, of which it does all
constexpr int64_t kRows = 16;       // of a head's state that all tokens of a piece go by while they are in the L1 cache
constexpr int64_t kNormed = 8;      // tokens of a task

class StateSpace {
 public:
  explicit StateSpace(const SpaceBatch& batch)
      : b_(batch),
        width_(batch.heads * batch.head_dim),
        channels_(width_ + 2 * batch.groups * batch.state_size),
        stride_(batch.inputs_stride),
        mixed_stride_(float_stride(channels_)) {}

  void run() {
    bool single = true;
    for (int64_t i = 0; i < b_.num_segments; ++i) single = single && b_.segments[3 * i + 2] == 1;
    if (single && b_.num_segments >= kEach * num_threads())  // what another core has written last may be far away
      parallel_for(b_.num_segments, [&](int64_t task, int) { StateSpace(b_).run(b_.segments + 3 * task, 1); });
    else
      run(b_.segments, b_.num_segments);
  }

 private:
  // As tasks, but where it is part of one.
  void run(const int64_t* segments, int64_t num_segments) {
    static thread_local std::vector<float> memory;
    in_rounds(segments, num_segments, [&](const std::vector<Piece>& pieces, int64_t tokens) {
      mixed_ = room_in(memory, tokens * (mixed_stride_ + width_));
      values_ = mixed_ + tokens * mixed_stride_;
      const int64_t count = static_cast<int64_t>(pieces.size());
      const int64_t shared = channels_ - width_, blocks = (shared + kChannels - 1) / kChannels;
      parallel_for(count * blocks, [&](int64_t task, int) {
        const int64_t first = task % blocks * kChannels;
        convolve(pieces[task / blocks], width_ + first, std::min(kChannels, shared - first));
      });
      parallel_for(count * b_.heads, [&](int64_t task, int) {
        const Piece& piece = pieces[task / b_.heads];
        const int64_t head = task % b_.heads;
        convolve(piece, head * b_.head_dim, b_.head_dim);
        recur(piece, head);
      });
      constexpr int64_t kParts = kPieceTokens / kNormed;
      parallel_for(count * kParts, [&](int64_t task, int) {
        const Piece& piece = pieces[task / kParts];
        const int64_t begin = task % kParts * kNormed;
        for (int64_t t = begin; t < std::min(begin + kNormed, piece.count); ++t) finish(piece, t);
      });
    });
  }

  void convolve(const Piece& piece, int64_t first, int64_t width) {
    const bf16* const from = projected(piece, 0) + width_ + first;
    float* const to = mixed(piece, 0) + first;
    rhizome::convolve(
        b_.kernel, b_.conv + (piece.row * channels_ + first) * b_.kernel, b_.conv_weight + first, channels_, width, piece.count,
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
    bf16* out = b_.out + (piece.token + t) * b_.out_stride;
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

  const bf16* projected(const Piece& piece, int64_t t) const { return b_.inputs + (piece.token + t) * stride_; }
  float* mixed(const Piece& piece, int64_t t) const { return mixed_ + (piece.place + t) * mixed_stride_; }
  float* values(const Piece& piece, int64_t t) const { return values_ + (piece.place + t) * width_; }

  const SpaceBatch& b_;
  const int64_t width_, channels_, stride_, mixed_stride_;
  float *mixed_ = nullptr, *values_ = nullptr;  // of the tokens of a round
};

}  // namespace

void copy_states(const SpaceBatch& batch, const int64_t* copies, int64_t count) {
  const int64_t width = batch.heads * batch.head_dim;
  const int64_t conv = (width + 2 * batch.groups * batch.state_size) * batch.kernel, state = width * batch.state_size;
  parallel_for(count, [&](int64_t copy, int) {
    const int64_t from = copies[2 * copy], to = copies[2 * copy + 1];
    memcpy(batch.conv + to * conv, batch.conv + from * conv, conv * sizeof(bf16));
    memcpy(batch.state + to * state, batch.state + from * state, state * sizeof(float));
  });
}

}  // namespace rhizome

void rhizome_state_space(const rhizome::SpaceBatch* batch) { rhizome::StateSpace(*batch).run(); }
