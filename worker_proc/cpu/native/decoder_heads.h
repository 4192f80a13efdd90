// How a step of the decoder gets its queries, keys and values.
#pragma once

#include <cstdint>
#include <cstring>

#include "decoder.h"
#include "decoder_buffers.h"
#include "decoder_last.h"
#include "kv_int8.h"
#include "norm.h"
#include "rows.h"
#include "stopwatch.h"

namespace rhizome {

// What becomes of the heads of a token: queries are normed, rotated and kept, keys and values go to their pages, gates stay.
class Rotation {
 public:
  // `last` says which tokens the rows are of; null: row by row.
  Rotation(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers, const DecoderLayer& layer,
           const LastTokens* last)
      : model_(model), step_(step), buffers_(buffers), layer_(layer), pages_(*step.attention[layer.batch]), last_(last),
        whole_(layer.rotated == layer.head_dim),
        past_(kWritesPast && step.tokens >= kStreamRows && whole_ && layer.head_dim == 128 && aligned(buffers.qkv) &&
              aligned(layer.k_pages) && aligned(layer.v_pages)) {}

  // Head `head` of queries, keys, values and gates one after another, of a row: its numbers, which may be where queries
  // and gates are kept, and are not wanted afterwards.
  void take(int64_t head, int64_t row, bf16* numbers) const {
    const int64_t dim = layer_.head_dim, token = last_ == nullptr ? row : last_->token(row);
    bf16* const own = buffers_.qkv + row * buffers_.qkv_stride + head * dim;
    if (head < model_.heads) return turn(numbers, layer_.query_rope, layer_.q_norm, token, past_, own);
    if (head >= model_.heads + 2 * layer_.kv_heads) {
      if (numbers != own) memcpy(own, numbers, dim * sizeof(bf16));
      return;
    }
    head -= model_.heads;
    const bool is_key = head < layer_.kv_heads;
    if (!is_key) head -= layer_.kv_heads;
    const int64_t page = step_.slots[token] / pages_.page_size, offset = step_.slots[token] % pages_.page_size;
    const int64_t at = is_key ? page * pages_.k_page_stride + offset * pages_.k_token_stride + head * pages_.k_head_stride
                              : page * pages_.v_page_stride + offset * pages_.v_token_stride + head * pages_.v_head_stride;
    void* const memory = is_key ? layer_.k_pages : layer_.v_pages;
    if (!is_key && layer_.v_norm != nullptr)
      norm_and_rotate(numbers, layer_.v_norm, model_.norm_eps, nullptr, nullptr, dim, 0, numbers);
    if (pages_.kv_int8) {
      if (is_key) turn(numbers, layer_.rope, layer_.k_norm, token, false, numbers);
      float* const scales = is_key ? layer_.k_scales : layer_.v_scales;
      scales[(page * layer_.kv_heads + head) * pages_.page_size + offset] =
          quantize_head(numbers, dim, static_cast<int8_t*>(memory) + at);
    } else if (is_key) {
      turn(numbers, layer_.rope, layer_.k_norm, token, past_, static_cast<bf16*>(memory) + at);
    } else if (past_) {
      copy_lines<true>(numbers, dim, static_cast<bf16*>(memory) + at);
    } else {
      copy_lines<false>(numbers, dim, static_cast<bf16*>(memory) + at);
    }
  }

 private:
  static bool aligned(const void* memory) { return reinterpret_cast<uintptr_t>(memory) % 64 == 0; }

  void turn(const bf16* numbers, int64_t rope, const float* norm, int64_t token, bool past, bf16* to) const {
    const int64_t dim = layer_.head_dim;
    const int64_t row = (rope * step_.tokens + token) * (model_.rotated / 2);
    const float* const cos = buffers_.cos + row;
    const float* const sin = buffers_.sin + row;
    if (past)
      norm_and_rotate_lines<128, true>(numbers, norm, model_.norm_eps, cos, sin, to);
    else if (whole_ && dim == 128)
      norm_and_rotate_lines<128, false>(numbers, norm, model_.norm_eps, cos, sin, to);
    else if (whole_ && dim == 64)
      norm_and_rotate_lines<64, false>(numbers, norm, model_.norm_eps, cos, sin, to);
    else
      norm_and_rotate(numbers, norm, model_.norm_eps, cos, sin, dim, layer_.rotated, to);
  }

  const DecoderModel& model_;
  const DecoderStep& step_;
  const Buffers& buffers_;
  const DecoderLayer& layer_;
  const AttentionBatch& pages_;
  const LastTokens* const last_;
  const bool whole_;  // heads are rotated
  const bool past_;  // they are many, so that they need not go to a cache
};

// Projects to queries, keys and values, and puts them where attention finds them: of all tokens, or of the `last` ones.
inline void project_heads(const DecoderModel& model, const DecoderStep& step, const Buffers& buffers,
                          const DecoderLayer& layer, const LastTokens* last) {
  const Rotation rotation(model, step, buffers, layer, last);
  const int64_t rows = last == nullptr ? step.tokens : last->count(), dim = layer.head_dim;
  if (whole_heads(dim)) {
    const Stopwatch time(step.op_ns, kQkv);
    linear_heads(layer.qkv, buffers.normed, buffers.normed_stride, rows, dim,
                 [&](int64_t head, int64_t row, int count, bf16* numbers) {
                   for (int i = 0; i < count; ++i) rotation.take(head, row + i, numbers + i * dim);
                 });
    return;
  }
  {
    const Stopwatch time(step.op_ns, kQkv);
    linear(layer.qkv, buffers.normed, buffers.normed_stride, rows, buffers.qkv, buffers.qkv_stride, Finish::kStore);
  }
  const Stopwatch time(step.op_ns, kRotate);
  for_rows(rows, 2 * buffers.qkv_stride, [&](int64_t row) {
    bf16* const from = buffers.qkv + row * buffers.qkv_stride;
    for (int64_t head = 0; head < layer.qkv.outputs / dim; ++head) rotation.take(head, row, from + head * dim);
  });
}

}  // namespace rhizome
