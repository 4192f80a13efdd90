// y = x @ W.T for weights packed once, in bfloat16 with float32 accumulation.
//
// Packed layout: panels of 32 outputs; in a panel, blocks of 32 inputs; in a block, two tiles of 16 outputs; a tile is
// 16 rows, one per pair of inputs, of 16 outputs times 2 inputs. That is what AMX's TDPBF16PS wants as its second
// operand, AVX512's VDPBF16PS reads the same rows as vectors, and a panel is one run of memory, so threads stream.
//
// Every output is the sum over all inputs in ascending order by one thread, whatever the number of rows: a row's
// results do not depend on the rows beside it.
#pragma once

#include <cstdint>

#include "abi.h"
#include "bf16.h"
#include "callback.h"

namespace rhizome {

inline constexpr int kPanel = 32;      // outputs
inline constexpr int kTile = 16;
inline constexpr int kTileElements = 512;
inline constexpr int kBlockRows = 32;  // rows of x that one micro-kernel call takes at most

inline constexpr int kExactGroup = 64;  // 4-bit codes whose sum with x in fixed point is exact in float32

// How the numbers of a matrix are stored, see linear_quantized.h and linear_compressed.h.
enum class Format : int32_t {
  kBFloat16 = 0, kInt8Channel, kInt8, kInt4, kCompressed, kFloat8Channel, kFloat8, kFloat4, kInt8Both, kInt4Segments,
  kInt8Segments, kFloat4Segments
};

// How scales are held, see scale_forms.h. Matrices have none of kLess, which is what kernels make of kFactors.
enum class ScaleForm : int32_t { kFloat32 = 0, kFloat16, kFactors, kLess };

// Plain C types only: linear.py mirrors it with ctypes.
struct PackedMatrix {
  const bf16* data;     // [panels(outputs)][blocks(inputs)][2][16][16][2], aligned to 64; else codes
  const float* bias;    // [panels * 32] in the order of the packed outputs, or null
  const float* scales;  // [panels][groups][32], or null if it is not quantized; of FP4, bytes (float4.h); see `scale_form`
  const float* zeros;   // the same, whole numbers except for kInt4 in groups up to kExactGroup, or null: the middle code. With
                        // kFactors, anything but null
  int32_t inputs;
  int32_t outputs;      // packed outputs: for gate and up, both
  Format format;
  int32_t group;        // inputs that have a scale in common, a multiple of 32
  // Of compressed weights, see linear_compressed.h, or null.
  const uint8_t* high_bytes;         // [16], by code
  const uint32_t* exception_starts;  // [panels * blocks + 1]
  const uint32_t* exceptions;        // number in the block << 16 | bfloat16, in the order of blocks
  const int32_t* order;              // [inputs]: which number of a row belongs to each input, or null: its own
  ScaleForm scale_form;
};

constexpr int64_t kStreamRows = 16;  // whose results go past the caches, where other cores hold what they replace
constexpr int64_t kMaxHead = 512;  // numbers of a head that `linear_heads` can hold

inline int64_t blocks(int64_t inputs) { return (inputs + 31) / 32; }
inline int64_t panels(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

// What becomes of the sums s.
enum class Finish : int32_t {
  kStore = 0,   // out bfloat16 [rows, outputs] = s
  kStoreFloat,  // out float32 [rows, outputs] = s
  kAdd,         // out float32 [rows, outputs] += s
  kSiluMul,     // out bfloat16 [rows, outputs / 2] = silu(gate) * up; a panel is 16 gates and their 16 ups
  kGeluMul,     // the same with GELU's tanh form
  kClampedMul,  // the same with gpt-oss's form: gate * sigmoid(1.702 gate) * (up + 1), gates up to 7, ups within 7
};

// x bfloat16 [rows, inputs] with `x_stride` elements between rows; where `inputs` is no multiple of 32, the row goes on
// with zeros up to the next one.
void linear(const PackedMatrix& weights, const bf16* x, int64_t x_stride, int64_t rows, void* out, int64_t out_stride,
            Finish finish);

// Takes rows [row, row + count) of one head, its `head_dim` numbers of a row side by side, in
// memory that may be written to.
using TakeHead = Callback<int64_t, int64_t, int, bf16*>;  // head, row, count, numbers

// Whether `linear_heads` works for heads of this size.
inline bool whole_heads(int64_t head_dim) { return head_dim % kPanel == 0 && head_dim <= kMaxHead; }

// The outputs, as bfloat16, head by head: `take` gets each head of each row once, on any thread, while it is in a cache.
void linear_heads(const PackedMatrix& weights, const bf16* x, int64_t x_stride, int64_t rows, int64_t head_dim,
                  TakeHead take);

// The smallest index of the largest output of every row, and that output. A row that holds NaN gets some index.
void linear_argmax(const PackedMatrix& weights, const bf16* x, int64_t x_stride, int64_t rows, int64_t* index,
                   float* best);

// The sums [count, 32] of a panel for rows from `row` on, on any thread: columns behind the last output are 0.
using TakePanel = Callback<int64_t, int64_t, int, const float*>;  // panel, row, count, sums

// The outputs, panel by panel: `take` gets each panel for each row once.
void linear_panels(const PackedMatrix& weights, const bf16* x, int64_t x_stride, int64_t rows, TakePanel take);

// A panel of a matrix (kBFloat16 or kCompressed) as a matrix of its own.
PackedMatrix panel_of(const PackedMatrix& weights, int64_t panel);

// Row `output` of the matrix to out [inputs].
void unpack_row(const PackedMatrix& weights, int64_t output, bf16* out);

}  // namespace rhizome
