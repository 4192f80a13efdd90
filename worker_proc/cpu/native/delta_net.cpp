#include "delta_net.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "causal_conv.h"
#include "parallel.h"
#include "pieces.h"
#include "room.h"
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
        stride_(float_stride(2 * batch.k_dim + 2 * batch.v_dim + 2)) {}

  // One thread does all that a key head and its value heads need: what another core has written last may be far away.
  void run() const {
    for_parts(b_.segments, b_.num_segments, b_.k_heads, [&](const int64_t* segment, int64_t key) {
      for (int64_t begin = 0; begin < segment[2]; begin += kPieceTokens)
        take({segment[0], segment[1] + begin, std::min(kPieceTokens, segment[2] - begin), 0}, key);
    });
  }

 private:
  // The numbers of a token and of a value head; those of the next token are `stride_` further.
  struct Numbers {
    float *q, *k, *v, *out, *gate;  // the last one: how much of the state is left, how much of the difference is written
  };

  void take(const Piece& piece, int64_t key) const {
    static thread_local std::vector<float> memory;
    float* const q = room_in(memory, piece.count * stride_);
    float* const k = q + b_.k_dim, *const v = k + b_.k_dim, *const out = v + b_.v_dim;
    const Numbers first{q, k, v, out, out + b_.v_dim};
    convolve(piece, key * b_.k_dim, b_.k_dim, q);
    convolve(piece, key_width_ + key * b_.k_dim, b_.k_dim, k);
    bring_to(1.0f / std::sqrt(static_cast<float>(b_.k_dim)), piece, q);
    bring_to(1.0f, piece, k);
    for (int64_t head = 0; head < b_.v_heads; ++head) {
      if ((b_.first_head + head) / b_.alike % b_.k_heads != key) continue;
      convolve(piece, 2 * key_width_ + head * b_.v_dim, b_.v_dim, v);
      make_gates(piece, head, first.gate);
      recur(piece, head, first);
      for (int64_t t = 0; t < piece.count; ++t) finish(piece.token + t, head, out + t * stride_);
    }
  }

  // Convolution and SiLU of the channels from `first` on.
  void convolve(const Piece& piece, int64_t first, int64_t width, float* to) const {
    const bf16* const from = b_.qkv + piece.token * b_.qkv_stride + first;
    rhizome::convolve(
        b_.kernel, b_.conv + (piece.row * channels_ + first) * b_.kernel, b_.conv_weight + first, channels_, width, piece.count,
        [&](int64_t t, int64_t c) { return load(from + t * b_.qkv_stride + c); },
        [&](int64_t t, int64_t c, floats sum) { store(to + t * stride_ + c, silu(sum)); });
  }

  // Queries and keys are brought to a length.
  void bring_to(float length, const Piece& piece, float* x) const {
    for (int64_t t = 0; t < piece.count; ++t, x += stride_) {
      floats squares = {};
      for (int64_t c = 0; c < b_.k_dim; c += kLanes) squares = squares + load(x + c) * load(x + c);
      const floats factor = splat(length / std::sqrt(sum(squares) + 1e-6f));
      for (int64_t c = 0; c < b_.k_dim; c += kLanes) store(x + c, load(x + c) * factor);
    }
  }

  void make_gates(const Piece& piece, int64_t head, float* gate) const {
    for (int64_t token = piece.token; token < piece.token + piece.count; ++token, gate += stride_) {
      const float x = to_float(b_.a[token * b_.a_stride + head]) + b_.dt_bias[head];
      const float step = x > 20.0f ? x : std::log1p(std::exp(x));
      gate[0] = std::exp(b_.rate[head] * step);
      gate[1] = 1.0f / (1.0f + std::exp(-to_float(b_.b[token * b_.b_stride + head])));
    }
  }

  // A value head: the columns of its state are independent, so some of them take all tokens.
  void recur(const Piece& piece, int64_t head, const Numbers& first) const {
    float* const state = b_.state + (piece.row * b_.v_heads + head) * b_.k_dim * b_.v_dim;
    if (piece.count >= kLong && b_.k_dim <= kMostKeys) {
      alignas(64) float held[kMostKeys * kHeldColumns];
      for (int64_t column = 0; column < b_.v_dim; column += kHeldColumns)
        if (b_.v_dim - column >= kHeldColumns)
          recur_held<kHeldColumns>(piece.count, first, column, state + column, held);
        else
          recur_held<16>(piece.count, first, column, state + column, held);
    } else {
      for (int64_t column = 0; column < b_.v_dim;) {
        const int64_t left = b_.v_dim - column;
        if (left >= kWide)
          recur_columns<kWide>(piece.count, first, column, state + column, b_.v_dim), column += kWide;
        else if (left >= 64)
          recur_columns<64>(piece.count, first, column, state + column, b_.v_dim), column += 64;
        else
          recur_columns<16>(piece.count, first, column, state + column, b_.v_dim), column += 16;
      }
    }
  }

  // The same where tokens are many: the columns lie side by side in the L1 cache meanwhile.
  template <int kColumns>
  void recur_held(int64_t tokens, const Numbers& first, int64_t column, float* state, float* held) const {
    for (int64_t i = 0; i < b_.k_dim; ++i) std::copy_n(state + i * b_.v_dim, kColumns, held + i * kColumns);
    recur_columns<kColumns>(tokens, first, column, held, kColumns);
    for (int64_t i = 0; i < b_.k_dim; ++i) std::copy_n(held + i * kColumns, kColumns, state + i * b_.v_dim);
  }

  // S = decay * S + k (beta * (v - decay * S^T k))^T, out = S^T q. Numbers of S are read once for a token: while it changes
  // them, they are multiplied with the next one's key.
  template <int kColumns>
  void recur_columns(int64_t tokens, const Numbers& first, int64_t column, float* state, int64_t stride) const {
    constexpr int kVectors = kColumns / kLanes;
    const float* k = first.k;
    floats sums[kVectors] = {};
    for (int64_t i = 0; i < b_.k_dim; ++i)
      for (int j = 0; j < kVectors; ++j) sums[j] += splat(k[i]) * load(state + i * stride + j * kLanes);
    for (int64_t t = 0; t < tokens; ++t) {
      const float* const v = first.v + t * stride_ + column;
      const float* const gate = first.gate + t * stride_;
      const Token token{k, first.q + t * stride_, t + 1 < tokens ? k + stride_ : nullptr, gate[0]};
      floats delta[kVectors], out[kVectors] = {};
      for (int j = 0; j < kVectors; ++j) {
        delta[j] = (load(v + j * kLanes) - splat(gate[0]) * sums[j]) * splat(gate[1]);
        sums[j] = floats{};
      }
      token.next != nullptr ? change<kVectors, true>(token, delta, state, stride, out, sums)
                            : change<kVectors, false>(token, delta, state, stride, out, sums);
      float* const to = first.out + t * stride_ + column;
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
  void finish(int64_t token, int64_t head, const float* x) const {
    const bf16* const gate = b_.z + token * b_.z_stride + head * b_.v_dim;
    bf16* const to = b_.out + token * b_.out_stride + head * b_.v_dim;
    floats squares = {};
    for (int64_t c = 0; c < b_.v_dim; c += kLanes) squares = squares + load(x + c) * load(x + c);
    const floats factor = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(b_.v_dim) + b_.eps));
    for (int64_t c = 0; c < b_.v_dim; c += kLanes)
      store(to + c, load(x + c) * factor * load(b_.norm + c) * silu(load(gate + c)));
  }

  const DeltaBatch& b_;
  const int64_t key_width_, channels_, stride_;  // the last one from token to token of what a thread holds
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
