#include "delta_net.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "causal_conv.h"
#include "parallel.h"
#include "pieces.h"

namespace rhizome {
namespace {

constexpr int64_t kHeld = 128 * 64;   // numbers of a state's columns that are held side by side: rows a power of two apart
                                      // would share the few places of the L1 cache where such addresses go
constexpr int64_t kLong = 4;          // tokens for which that pays

class DeltaNet {
 public:
  explicit DeltaNet(const DeltaBatch& batch)
      : b_(batch),
        key_width_(batch.k_heads * batch.k_dim),
        channels_(2 * key_width_ + batch.v_heads * batch.v_dim),
        value_width_(batch.v_heads * batch.v_dim) {}

  void run() {
    in_rounds(b_.segments, b_.num_segments, [&](const std::vector<Piece>& pieces, int64_t tokens) {
      reserve(tokens);
      const int64_t blocks = 2 * b_.k_heads + b_.v_heads, count = static_cast<int64_t>(pieces.size());
      parallel_for(count * (blocks + 1), [&](int64_t task, int) {
        const Piece& piece = pieces[task / (blocks + 1)];
        const int64_t block = task % (blocks + 1);
        block < blocks ? convolve(piece, block) : make_gates(piece);
      });
      parallel_for(count * b_.v_heads, [&](int64_t task, int) {
        const Piece& piece = pieces[task / b_.v_heads];
        const int64_t head = task % b_.v_heads;
        if (b_.v_dim % 64 == 0) return recur<64>(piece, head);
        if (b_.v_dim % 32 == 0) return recur<32>(piece, head);
        return recur<16>(piece, head);
      });
    });
  }

 private:
  void reserve(int64_t tokens) {
    if (tokens <= room_) return;
    room_ = tokens;
    mixed_.reset(new float[tokens * channels_]);
    gates_.reset(new float[tokens * 2 * b_.v_heads]);
    values_.reset(new float[tokens * value_width_]);
  }

  // Convolution and SiLU of one head's channels; those of queries and keys are brought to length 1, queries scaled.
  void convolve(const Piece& piece, int64_t block) {
    const bool is_value = block >= 2 * b_.k_heads, is_query = block < b_.k_heads;
    const int64_t width = is_value ? b_.v_dim : b_.k_dim;
    const int64_t first = is_value ? 2 * key_width_ + (block - 2 * b_.k_heads) * b_.v_dim : block * b_.k_dim;
    bf16* kept = b_.conv + (piece.row * channels_ + first) * b_.kernel;
    for (int64_t c = 0; c < width; c += kLanes) {
      const bf16* from = b_.qkv + piece.token * channels_ + first + c;
      float* to = mixed(piece, 0) + first + c;
      rhizome::convolve(
          kept + c * b_.kernel, b_.conv_weight + first + c, channels_, b_.kernel, piece.count,
          [&](int64_t t) { return load(from + t * channels_); },
          [&](int64_t t, floats sum) { store(to + t * channels_, silu(sum)); });
    }
    if (is_value) return;
    const float scale = is_query ? 1.0f / std::sqrt(static_cast<float>(b_.k_dim)) : 1.0f;
    for (int64_t t = 0; t < piece.count; ++t) {
      float* x = mixed(piece, t) + first;
      floats squares = {};
      for (int64_t c = 0; c < width; c += kLanes) squares = squares + load(x + c) * load(x + c);
      const floats factor = splat(scale / std::sqrt(sum(squares) + 1e-6f));
      for (int64_t c = 0; c < width; c += kLanes) store(x + c, load(x + c) * factor);
    }
  }

  // How much of the state each token leaves, and how much of the difference it writes.
  void make_gates(const Piece& piece) {
    for (int64_t t = 0; t < piece.count; ++t)
      for (int64_t h = 0; h < b_.v_heads; ++h) {
        const int64_t at = (piece.token + t) * b_.v_heads + h;
        const float x = to_float(b_.a[at]) + b_.dt_bias[h];
        const float step = x > 20.0f ? x : std::log1p(std::exp(x));
        float* gate = gates_.get() + 2 * ((piece.place + t) * b_.v_heads + h);
        gate[0] = std::exp(b_.rate[h] * step);
        gate[1] = 1.0f / (1.0f + std::exp(-to_float(b_.b[at])));
      }
  }

  // A value head: the columns of its state are independent, so some of them take all tokens while they are in the L1
  // cache. S = decay * S + k (beta * (v - decay * S^T k))^T, out = S^T q.
  template <int kColumns>
  void recur(const Piece& piece, int64_t head) {
    constexpr int kVectors = kColumns / kLanes ? kColumns / kLanes : 1;
    constexpr int kChains = kVectors < 8 ? 8 / kVectors : 1;  // of additions, for the sake of latency
    const int64_t key_head = head / (b_.v_heads / b_.k_heads);
    float* whole = b_.state + (piece.row * b_.v_heads + head) * b_.k_dim * b_.v_dim;
    alignas(64) float held[kHeld];
    const bool holds = piece.count >= kLong && b_.k_dim * kColumns <= kHeld;
    const int64_t stride = holds ? kColumns : b_.v_dim;
    for (int64_t column = 0; column < b_.v_dim; column += kColumns) {
      float* state = holds ? held : whole + column;
      if (holds)
        for (int64_t i = 0; i < b_.k_dim; ++i) std::copy_n(whole + i * b_.v_dim + column, kColumns, held + i * kColumns);
      for (int64_t t = 0; t < piece.count; ++t) {
        const float* q = mixed(piece, t) + key_head * b_.k_dim;
        const float* k = q + key_width_;
        const float* v = mixed(piece, t) + 2 * key_width_ + head * b_.v_dim + column;
        const float* gate = gates_.get() + 2 * ((piece.place + t) * b_.v_heads + head);
        const floats decay = splat(gate[0]), beta = splat(gate[1]);
        floats sums[kChains][kVectors] = {};
        for (int64_t i = 0; i < b_.k_dim; i += kChains)
          for (int chain = 0; chain < kChains; ++chain) {
            const float* s = state + (i + chain) * stride;
            const floats key = splat(k[i + chain]);
            for (int j = 0; j < kVectors; ++j) sums[chain][j] = sums[chain][j] + key * load(s + j * kLanes);
          }
        floats delta[kVectors], out[kVectors] = {};
        for (int j = 0; j < kVectors; ++j) {
          for (int chain = 1; chain < kChains; ++chain) sums[0][j] = sums[0][j] + sums[chain][j];
          delta[j] = (load(v + j * kLanes) - decay * sums[0][j]) * beta;
        }
        for (int64_t i = 0; i < b_.k_dim; ++i) {
          float* s = state + i * stride;
          const floats key = splat(k[i]), query = splat(q[i]);
          for (int j = 0; j < kVectors; ++j) {
            const floats next = decay * load(s + j * kLanes) + key * delta[j];
            store(s + j * kLanes, next);
            out[j] = out[j] + query * next;
          }
        }
        float* to = values(piece, t) + head * b_.v_dim + column;
        for (int j = 0; j < kVectors; ++j) store(to + j * kLanes, out[j]);
      }
      if (holds)
        for (int64_t i = 0; i < b_.k_dim; ++i) std::copy_n(held + i * kColumns, kColumns, whole + i * b_.v_dim + column);
    }
    for (int64_t t = 0; t < piece.count; ++t) finish(piece, t, head);
  }

  // RMSNorm over a head, times weight and SiLU of the gate.
  void finish(const Piece& piece, int64_t t, int64_t head) {
    const float* x = values(piece, t) + head * b_.v_dim;
    const int64_t at = ((piece.token + t) * b_.v_heads + head) * b_.v_dim;
    floats squares = {};
    for (int64_t c = 0; c < b_.v_dim; c += kLanes) squares = squares + load(x + c) * load(x + c);
    const floats factor = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(b_.v_dim) + b_.eps));
    for (int64_t c = 0; c < b_.v_dim; c += kLanes)
      store(b_.out + at + c, load(x + c) * factor * load(b_.norm + c) * silu(load(b_.z + at + c)));
  }

  float* mixed(const Piece& piece, int64_t t) { return mixed_.get() + (piece.place + t) * channels_; }
  float* values(const Piece& piece, int64_t t) { return values_.get() + (piece.place + t) * value_width_; }

  const DeltaBatch& b_;
  const int64_t key_width_, channels_, value_width_;
  int64_t room_ = 0;
  std::unique_ptr<float[]> mixed_, gates_, values_;  // of the tokens of a round
};

}  // namespace
}  // namespace rhizome

void rhizome_delta_net(const rhizome::DeltaBatch* batch) { rhizome::DeltaNet(*batch).run(); }
