// Attention over a paged KV cache. K and V are read from the pages in place, streaming (flash attention: Dao et al.,
// 2022), once per KV head for all its query heads, and, where rows of the batch have the same pages at the same
// positions, once for all those rows (shared prefixes: Juravsky et al., 2024).
//
// A context is cut into blocks of kAttentionBlock tokens at fixed positions, whose partial results are merged in
// ascending order. So the bits of a token's output depend on its own context alone: neither on the other rows, nor on
// how a prompt was cut into chunks, nor on the number of threads, nor on whether blocks were shared or split over them.
//
// Plain C types only: attention.py mirrors both structs with ctypes.
#pragma once

#include <cstdint>

#include "abi.h"

namespace rhizome {

constexpr int kAttentionBlock = 256;

// Element types of q, k, v and out. All arithmetic is float32 but for products of two bfloat16.
enum : int32_t { kFloat32 = 0, kBFloat16 = 1 };

// What all layers of a step have in common. Rows are requests; row r has the tokens q_starts[r] .. q_starts[r + 1] - 1
// of the step, and they are the last of its kv_lens[r] tokens in the cache (this step's included).
struct AttentionBatch {
  int32_t num_rows;
  int32_t num_heads;     // query heads, a multiple of num_kv_heads; query head h reads KV head h / (heads per KV head)
  int32_t num_kv_heads;
  int32_t k_dim;         // head size of q and k
  int32_t v_dim;         // head size of v and out
  int32_t page_size;
  int32_t dtype;         // of q and out, and of the pages but for:
  int32_t kv_int8;       // 1: pages hold int8, and each token and head has a scale
  int64_t k_page_stride, k_token_stride, k_head_stride;  // elements; a head's numbers are contiguous
  int64_t v_page_stride, v_token_stride, v_head_stride;
  const int32_t* page_table;  // [num_rows, table_stride]
  int64_t table_stride;
  const int32_t* q_starts;    // [num_rows + 1]
  const int32_t* kv_lens;     // [num_rows]
  const int32_t* plan;        // from rhizome_attention_plan for this very batch, or null: nothing is shared or split
  void* workspace;            // rhizome_attention_workspace bytes, aligned to 64; holds nothing between calls
};

struct AttentionLayer {
  const void* q;        // [tokens, num_heads, k_dim], heads contiguous
  int64_t q_stride;     // elements from one token to the next
  const void* k_pages;  // this layer's
  const void* v_pages;
  void* out;            // [tokens, num_heads, v_dim], heads contiguous
  int64_t out_stride;   // elements from one token to the next
  float scale;
  float softcap;        // scores become softcap * tanh(score / softcap); 0: none
  int32_t window;       // a query at position p sees positions > p - window; 0: no window
  int32_t reserved;     // 0
  const float* k_scales;  // [pages, num_kv_heads, page_size] where pages hold int8
  const float* v_scales;
  const float* sinks;     // [num_heads]: one more score of every query, without a value; null: none
};

}  // namespace rhizome

// Finds what decode rows can share, and cuts long contexts where there are too few rows for the threads. Reads shapes,
// page_table, q_starts and kv_lens. Writes at most `capacity` numbers to `plan` and returns how many a plan of this
// batch can have at most (so call it with capacity 0 first; with too little capacity nothing is written).
// share = 0: every row on its own.
RHIZOME_EXPORT int64_t rhizome_attention_plan(const rhizome::AttentionBatch* batch, int32_t* plan, int64_t capacity,
                                              int share);

// Bytes of workspace for a batch, its plan included, with the thread pool as it is now.
RHIZOME_EXPORT int64_t rhizome_attention_workspace(const rhizome::AttentionBatch* batch);

// out = attention of one layer. K and V of this step's tokens must be in the pages already.
RHIZOME_EXPORT void rhizome_attention(const rhizome::AttentionBatch* batch, const rhizome::AttentionLayer* layer);

// Stores k [tokens, num_kv_heads, k_dim] and v [tokens, num_kv_heads, v_dim] (strides in elements from one token to the
// next, heads contiguous) at slots[t] = page * page_size + offset. Uses shapes, strides and dtypes of `batch` only.
RHIZOME_EXPORT void rhizome_kv_write(const rhizome::AttentionBatch* batch, int64_t tokens, const void* k,
                                     int64_t k_stride, const void* v, int64_t v_stride, const int64_t* slots,
                                     void* k_pages, void* v_pages, float* k_scales, float* v_scales);
