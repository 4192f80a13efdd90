// Attention over a paged KV cache on the CPU: the C interface. Everything here is plain C, called through ctypes and by
// the fused decoder. K and V are read from the pages in place (flash attention: Dao et al., 2022; flash decoding: Dao
// et al., 2023), once per KV head for all its query heads, and, where rows of the batch have the same pages at the same
// positions, once for all those rows (cascade: Ye et al., 2024; Juravsky et al., 2024).
//
// A context is cut into blocks of RZ_ATTENTION_BLOCK tokens at fixed positions, whose partial results are merged in
// ascending order. So the bits of a row's output depend on that row alone: neither on the other rows, nor on the number
// of threads, nor on whether its blocks were shared.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { RZ_ATTENTION_BLOCK = 256 };

// Element types of q, k, v and out. All arithmetic is float32 except products of two bfloat16.
enum { RZ_FLOAT32 = 0, RZ_BFLOAT16 = 1 };

// Instruction sets, each including those before it. A level above what the machine has is lowered to what it has.
enum { RZ_LEVEL_GENERIC = 0, RZ_LEVEL_AVX2 = 1, RZ_LEVEL_AVX512 = 2, RZ_LEVEL_AMX = 3 };

// The highest level of this machine (and lets the process use AMX, where it has it).
int rz_attention_level(void);

// What all layers of a step have in common. Rows are requests; row r has the tokens q_starts[r] .. q_starts[r + 1] - 1
// of the step, at least one, and they are the last of its kv_lens[r] tokens in the cache (this step's included).
typedef struct {
    int32_t num_rows;
    int32_t num_heads;     // query heads, a multiple of num_kv_heads; query head h reads KV head h / (heads per KV head)
    int32_t num_kv_heads;
    int32_t k_dim;         // head size of q and k, 1 .. 1024
    int32_t v_dim;         // head size of v and out, 1 .. 1024
    int32_t page_size;
    int32_t dtype;         // RZ_FLOAT32 or RZ_BFLOAT16
    int32_t level;         // at most this level is used
    int64_t k_page_stride, k_token_stride, k_head_stride;  // elements; the head size itself is contiguous
    int64_t v_page_stride, v_token_stride, v_head_stride;
    const int32_t *page_table;  // [num_rows, table_stride]
    int64_t table_stride;
    const int32_t *q_starts;    // [num_rows + 1]
    const int32_t *kv_lens;     // [num_rows]
    const int32_t *plan;        // from rz_attention_plan for this very batch, or NULL: nothing is shared or split
    void *workspace;            // rz_attention_workspace bytes, aligned to 64; reused by all layers, holds no state
} rz_attention_batch;

typedef struct {
    const void *q;             // [tokens, num_heads, k_dim], heads contiguous
    int64_t q_stride;          // elements from one token to the next
    const void *k_pages;       // this layer's pages
    const void *v_pages;
    void *out;                 // [tokens, num_heads * v_dim]
    int64_t out_stride;        // elements from one token to the next
    float scale;
    float softcap;             // scores become softcap * tanh(score / softcap); 0: none
    int32_t window;            // a query at position p sees positions > p - window; 0: no window
} rz_attention_layer;

// Find what decode rows can share, and cut long rows where there are too few rows for the threads. Looks only at
// shapes, page_table, q_starts and kv_lens. Writes at most `capacity` int32 to `plan` and returns how many a plan has
// (call it with capacity 0 for the bound that this batch cannot exceed). With share = 0 every row is on its own.
int64_t rz_attention_plan(const rz_attention_batch *batch, int32_t *plan, int64_t capacity, int share);

// Bytes of workspace for a batch (its plan included), with the thread pool as it is now.
int64_t rz_attention_workspace(const rz_attention_batch *batch);

// out = attention. K and V of this step's tokens must be in the pages already. Returns 0, or -1 when a number in
// `batch` is out of range (nothing is written then).
int rz_attention(const rz_attention_batch *batch, const rz_attention_layer *layer);

// Store k [tokens, num_kv_heads, k_dim] and v [tokens, num_kv_heads, v_dim] (token strides in elements, heads
// contiguous) at slots[t] = page * page_size + offset. Uses dtype, the shape and the strides of `batch` only.
void rz_attention_write(const rz_attention_batch *batch, int64_t tokens, const void *k, int64_t k_stride,
                        const void *v, int64_t v_stride, const int64_t *slots, void *k_pages, void *v_pages);

#ifdef __cplusplus
}
#endif
