#include "delta_net.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "causal_conv.h"
#include "parallel.h"
#include "pieces.h"
#include "rows.h"

namespace rhizome {
namespace {

// Columns of a state, of so many keys at most, that are held side by side, half of an L1 cache: rows a power of two apart would
// share the few places where such addresses go.
constexpr int64_t kMostKeys = 128;
constexpr int kHeldColumns = 32;
constexpr int64_t kLong = 4;  // tokens for which that pays
constexpr int64_t kWide = kLanes == 16 ? 128 : 64;  // columns whose sums are held in registers: whole rows come faster

class DeltaNet {
 public:
  explicit DeltaNet(const DeltaBatch& batch)
      : b_(batch),
        key_width_(batch.k_heads * batch.k_dim),
        channels_(2 * key_width_ + batch.v_heads * batch.v_dim),
        value_width_(batch.v_heads * batch.v_dim),
        stride_(float_stride(channels_)) {}

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
        recur(piece, task % b_.v_heads);
      });
    });
  }

 private:
  void reserve(int64_t tokens) {
    if (tokens <= room_) return;
    room_ = tokens;
    mixed_.reset(new float[tokens * stride_]);
    gates_.reset(new float[tokens * 2 * b_.v_heads]);
    values_.reset(new float[tokens * value_width_]);
  }

  // Convolution and SiLU of one head's channels; those of queries and keys are brought to length 1, queries scaled.
  void convolve(const Piece& piece, int64_t block) {
    const bool is_value = block >= 2 * b_.k_heads, is_query = block < b_.k_heads;
    const int64_t width = is_value ? b_.v_dim : b_.k_dim;
    const int64_t first = is_value ? 2 * key_width_ + (block - 2 * b_.k_heads) * b_.v_dim : block * b_.k_dim;
    const bf16* const from = b_.qkv + piece.token * b_.qkv_stride + first;
    float* const to = mixed(piece, 0) + first;
    rhizome::convolve(
        b_.kernel, b_.conv + (piece.row * channels_ + first) * b_.kernel, b_.conv_weight + first, channels_, width, piece.count,
        [&](int64_t t, int64_t c) { return load(from + t * b_.qkv_stride + c); },
        [&](int64_t t, int64_t c, floats sum) { store(to + t * stride_ + c, silu(sum)); });
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
        const int64_t token = piece.token + t;
        const float x = to_float(b_.a[token * b_.a_stride + h]) + b_.dt_bias[h];
        const float step = x > 20.0f ? x : std::log1p(std::exp(x));
        float* gate = gates_.get() + 2 * ((piece.place + t) * b_.v_heads + h);
        gate[0] = std::exp(b_.rate[h] * step);
        gate[1] = 1.0f / (1.0f + std::exp(-to_float(b_.b[token * b_.b_stride + h])));
      }
  }

  // A value head: the columns of its state are independent, so some of them take all tokens.
  void recur(const Piece& piece, int64_t head) {
    if (piece.count >= kLong && b_.k_dim <= kMostKeys) {
      alignas(64) float held[kMostKeys * kHeldColumns];
      for (int64_t column = 0; column < b_.v_dim; column += kHeldColumns)
        if (b_.v_dim - column >= kHeldColumns)
          recur_held<kHeldColumns>(piece, head, column, held);
        else
          recur_held<16>(piece, head, column, held);
    } else {
      for (int64_t column = 0; column < b_.v_dim;) {
        const int64_t left = b_.v_dim - column;
        float* const state = state_of(piece, head) + column;
        if (left >= kWide)
          recur_columns<kWide>(piece, head, column, state, b_.v_dim), column += kWide;
        else if (left >= 64)
          recur_columns<64>(piece, head, column, state, b_.v_dim), column += 64;
        else
          recur_columns<16>(piece, head, column, state, b_.v_dim), column += 16;
      }
    }
    for (int64_t t = 0; t < piece.count; ++t) finish(piece, t, head);
  }

  // The same where tokens are many: the columns lie side by side in the L1 cache meanwhile.
  template <int kColumns>
  void recur_held(const Piece& piece, int64_t head, int64_t column, float* held) {
    float* const from = state_of(piece, head) + column;
    for (int64_t i = 0; i < b_.k_dim; ++i) std::copy_n(from + i * b_.v_dim, kColumns, held + i * kColumns);
    recur_columns<kColumns>(piece, head, column, held, kColumns);
    for (int64_t i = 0; i < b_.k_dim; ++i) std::copy_n(held + i * kColumns, kColumns, from + i * b_.v_dim);
  }

  // S = decay * S + k (beta * (v - decay * S^T k))^T, out = S^T q. Numbers of S are read once for a token: while it changes
  // them, they are multiplied with the next one's key.
  template <int kColumns>
  void recur_columns(const Piece& piece, int64_t head, int64_t column, float* state, int64_t stride) {
    constexpr int kVectors = kColumns / kLanes;
    const int64_t first_key = key_width_ + (b_.first_head + head) / b_.alike % b_.k_heads * b_.k_dim;
    const float* k = mixed(piece, 0) + first_key;
    floats sums[kVectors] = {};
    for (int64_t i = 0; i < b_.k_dim; ++i)
      for (int j = 0; j < kVectors; ++j) sums[j] += splat(k[i]) * load(state + i * stride + j * kLanes);
    for (int64_t t = 0; t < piece.count; ++t) {
      const float* const v = mixed(piece, t) + 2 * key_width_ + head * b_.v_dim + column;
      const float* const gate = gates_.get() + 2 * ((piece.place + t) * b_.v_heads + head);
      const Token token{k, k - key_width_, t + 1 < piece.count ? mixed(piece, t + 1) + first_key : nullptr, gate[0]};
      floats delta[kVectors], out[kVectors] = {};
      for (int j = 0; j < kVectors; ++j) {
        delta[j] = (load(v + j * kLanes) - splat(gate[0]) * sums[j]) * splat(gate[1]);
        sums[j] = floats{};
      }
      token.next != nullptr ? change<kVectors, true>(token, delta, state, stride, out, sums)
                            : change<kVectors, false>(token, delta, state, stride, out, sums);
      float* const to = values(piece, t) + head * b_.v_dim + column;
      for (int j = 0; j < kVectors; ++j) store(to + j * kLanes, out[j]);
      k = token.next;
    }
  }

  struct Token {
    const float *k, *q, *next;  // the next one's key, or null
    float decay;
  };

  template <int kVectors, bool kNext>
  void change(const Token& token, const floats* delta, float* state, int64_t stride, floats* out, floats* sums) const {
    const floats decay = splat(token.decay);
    const float *const k = token.k, *const q = token.q, *const next = token.next;
    floats difference[kVectors], read[kVectors] = {}, seen[kVectors] = {};  // in registers, whatever the state's memory is
    for (int j = 0; j < kVectors; ++j) difference[j] = delta[j];
    const int64_t keys = b_.k_dim;
    for (int64_t i = 0; i < keys; ++i, state += stride) {
      const floats key = splat(k[i]), query = splat(q[i]), after = splat(kNext ? next[i] : 0.0f);
      for (int j = 0; j < kVectors; ++j) {
        const floats now = decay * load(state + j * kLanes) + key * difference[j];
        store(state + j * kLanes, now);
        read[j] += query * now;
        if constexpr (kNext) seen[j] += after * now;
      }
    }
    for (int j = 0; j < kVectors; ++j) out[j] = read[j], sums[j] = seen[j];
  }

  // RMSNorm over a head, times weight and SiLU of the gate.
  void finish(const Piece& piece, int64_t t, int64_t head) {
    const float* x = values(piece, t) + head * b_.v_dim;
    const bf16* const gate = b_.z + (piece.token + t) * b_.z_stride + head * b_.v_dim;
    bf16* const to = b_.out + (piece.token + t) * b_.out_stride + head * b_.v_dim;
    floats squares = {};
    for (int64_t c = 0; c < b_.v_dim; c += kLanes) squares = squares + load(x + c) * load(x + c);
    const floats factor = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(b_.v_dim) + b_.eps));
    for (int64_t c = 0; c < b_.v_dim; c += kLanes)
      store(to + c, load(x + c) * factor * load(b_.norm + c) * silu(load(gate + c)));
  }

  float* state_of(const Piece& piece, int64_t head) const {
    return b_.state + (piece.row * b_.v_heads + head) * b_.k_dim * b_.v_dim;
  }
  float* mixed(const Piece& piece, int64_t t) { return mixed_.get() + (piece.place + t) * stride_; }
  float* values(const Piece& piece, int64_t t) { return values_.get() + (piece.place + t) * value_width_; }

  const DeltaBatch& b_;
  const int64_t key_width_, channels_, value_width_, stride_;  // the last one from token to token of `mixed_`
  int64_t room_ = 0;
  std::unique_ptr<float[]> mixed_, gates_, values_;  // of the tokens of a round
};

}  // namespace

void copy_states(const DeltaBatch& batch, const int64_t* copies, int64_t count) {
  const int64_t head = batch.k_dim * batch.v_dim, state = batch.v_heads * head;
  const int64_t conv = (2 * batch.k_heads * batch.k_dim + batch.v_heads * batch.v_dim) * batch.kernel;
  parallel_for(count * (batch.v_heads + 1), [&](int64_t task, int) {
    const int64_t* const copy = copies + 2 * (task / (batch.v_heads + 1));
    const int64_t part = task % (batch.v_heads + 1);
    if (part == batch.v_heads)
      std::copy_n(batch.conv + copy[0] * conv, conv, batch.conv + copy[1] * conv);
    else
      std::copy_n(batch.state + copy[0] * state + part * head, head, batch.state + copy[1] * state + part * head);
  });
}

}  // namespace rhizome

void rhizome_delta_net(const rhizome::DeltaBatch* batch) { rhizome::DeltaNet(*batch).run(); }
