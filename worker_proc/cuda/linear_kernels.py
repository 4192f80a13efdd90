"""Products with quantized weights in Triton: codes become numbers in registers, right before they are multiplied.

A weight is (code - zero) * scale. Codes come centred, in words (worker_proc/cuda/quantized.py): they, and their
differences from zeros, are whole numbers that bfloat16 and float16 hold exactly, as they do FP8's and FP4's; scales
multiply the sums, in float32.
Outputs are the rows of the product's first operand, so that what was widened can stay in registers: Hopper's matrix
units take the first operand from there. The second one is the batch, of 16 rows or more.
"""

import triton
import triton.language as tl

from worker_proc.cuda.widening import beside, quarters

TILE = tl.constexpr(128)


@triton.jit(do_not_specialize=["rows", "tiles", "each"])  # see attention_kernels.py
def quantized_linear_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr,
    rows, inputs, outputs, tiles, each, x_row, codes_row,
    BITS: tl.constexpr, FLOAT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (j, i, s): rows j * BLOCK_M .. of `x` `[rows, inputs]` times outputs i * BLOCK_N .., over part s of the
    inputs, `each` of `tiles` tiles of `TILE`, to `out[s]` `[rows, outputs]`.

    `codes` int32 `[outputs, tiles * TILE * BITS / 32]`, words as widening.py has them; FP8 (E4M3) or FP4 (E2M1) where
    `FLOAT`. `scales`, and `zeros` where `ZEROS`, float32 `[groups, outputs]`, one for every `GROUP` inputs: 32, 64, a
    multiple of `TILE`, or for all of them where that is 0. `EVEN`: `TILE` divides `inputs`.
    """
    WORDS: tl.constexpr = TILE * BITS // 32
    dtype = x_ptr.dtype.element_ty
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    real_m, real_n = m < rows, n < outputs
    codes_at = codes_ptr + n.to(tl.int64)[:, None] * codes_row + tl.arange(0, WORDS)[None, :]
    x_rows = x_ptr + m.to(tl.int64)[None, :] * x_row
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for tile in range(part * each, tl.minimum(part * each + each, tiles)):
        k = tile * TILE
        words = tl.load(codes_at + tile * WORDS, mask=real_n[:, None], other=0)
        q0, q1, q2, q3 = quarters(words, BITS, FLOAT, dtype)
        if ZEROS:
            q0 = _less(q0, zeros_ptr, k, 0, inputs, outputs, n, real_n, GROUP, dtype)
            q1 = _less(q1, zeros_ptr, k, 1, inputs, outputs, n, real_n, GROUP, dtype)
            q2 = _less(q2, zeros_ptr, k, 2, inputs, outputs, n, real_n, GROUP, dtype)
            q3 = _less(q3, zeros_ptr, k, 3, inputs, outputs, n, real_n, GROUP, dtype)
        if GROUP == 32:
            sums += _scaled(q0, x_rows, k, scales_ptr, inputs, outputs, n, real_m, real_n, GROUP, EVEN)
            sums += _scaled(q1, x_rows, k + 32, scales_ptr, inputs, outputs, n, real_m, real_n, GROUP, EVEN)
            sums += _scaled(q2, x_rows, k + 64, scales_ptr, inputs, outputs, n, real_m, real_n, GROUP, EVEN)
            sums += _scaled(q3, x_rows, k + 96, scales_ptr, inputs, outputs, n, real_m, real_n, GROUP, EVEN)
        elif GROUP == 64:
            low, high = beside(q0, q1), beside(q2, q3)
            sums += _scaled(low, x_rows, k, scales_ptr, inputs, outputs, n, real_m, real_n, GROUP, EVEN)
            sums += _scaled(high, x_rows, k + 64, scales_ptr, inputs, outputs, n, real_m, real_n, GROUP, EVEN)
        else:
            wide = beside(beside(q0, q1), beside(q2, q3))
            if GROUP > 0:
                sums += _scaled(wide, x_rows, k, scales_ptr, inputs, outputs, n, real_m, real_n, GROUP, EVEN)
            else:
                sums = tl.dot(wide, _inputs(x_rows, k, TILE, inputs, real_m, EVEN), sums, input_precision="ieee")
    if GROUP == 0:
        sums *= tl.load(scales_ptr + n, mask=real_n, other=0.0)[:, None]
    if BIAS:
        sums += tl.load(bias_ptr + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
    to = out_ptr + (part.to(tl.int64) * rows + m)[None, :] * outputs + n[:, None]
    tl.store(to, sums.to(out_ptr.dtype.element_ty), mask=real_n[:, None] & real_m[None, :])


@triton.jit
def _scaled(
    wide, x_rows, k, scales_ptr, inputs, outputs, n, real_m, real_n, GROUP: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """The product of `wide` `[N, K]`, which has one scale per output, with inputs `k` .. of the batch, scaled."""
    x = _inputs(x_rows, k, wide.shape[1], inputs, real_m, EVEN)
    real = real_n
    if not EVEN:
        real = real & (k + 0 * n < inputs)
    scales = tl.load(scales_ptr + (k // GROUP) * outputs + n, mask=real, other=0.0)
    return tl.dot(wide, x, input_precision="ieee") * scales[:, None]


@triton.jit
def _inputs(x_rows, k, K: tl.constexpr, inputs, real_m, EVEN: tl.constexpr):
    """A tile of the batch, `[K, rows]`."""
    at = k + tl.arange(0, K)
    mask = real_m[None, :]
    if not EVEN:
        mask = mask & (at < inputs)[:, None]
    return tl.load(x_rows + at[:, None], mask=mask, other=0.0)


@triton.jit
def _less(
    wide, zeros_ptr, k, quarter: tl.constexpr, inputs, outputs, n, real_n, GROUP: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """A quarter of a tile less its zeros."""
    at = k + 32 * quarter
    group = 0
    if GROUP > 0:
        group = at // GROUP
    zero = tl.load(zeros_ptr + group * outputs + n, mask=real_n & (at + 0 * n < inputs), other=0.0)
    return wide - zero.to(dtype)[:, None]


@triton.jit
def widen_kernel(
    codes_ptr, scales_ptr, zeros_ptr, out_ptr, inputs, outputs, codes_row,
    BITS: tl.constexpr, FLOAT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (t, i): tile t of outputs i * BLOCK_N .. as numbers, to `out` `[outputs, inputs]`; see
    `quantized_linear_kernel`."""
    WORDS: tl.constexpr = TILE * BITS // 32
    tile = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real_n = n < outputs
    at = codes_ptr + n.to(tl.int64)[:, None] * codes_row + (tile * WORDS + tl.arange(0, WORDS))[None, :]
    words = tl.load(at, mask=real_n[:, None], other=0)
    q0, q1, q2, q3 = quarters(words, BITS, FLOAT, out_ptr.dtype.element_ty)
    k = tile * TILE
    _store_quarter(q0, scales_ptr, zeros_ptr, out_ptr, k, inputs, outputs, n, real_n, GROUP, ZEROS)
    _store_quarter(q1, scales_ptr, zeros_ptr, out_ptr, k + 32, inputs, outputs, n, real_n, GROUP, ZEROS)
    _store_quarter(q2, scales_ptr, zeros_ptr, out_ptr, k + 64, inputs, outputs, n, real_n, GROUP, ZEROS)
    _store_quarter(q3, scales_ptr, zeros_ptr, out_ptr, k + 96, inputs, outputs, n, real_n, GROUP, ZEROS)


@triton.jit
def _store_quarter(
    wide, scales_ptr, zeros_ptr, out_ptr, k, inputs, outputs, n, real_n, GROUP: tl.constexpr, ZEROS: tl.constexpr
):  # fmt: skip
    group = 0
    if GROUP > 0:
        group = k // GROUP
    real = real_n & (k + 0 * n < inputs)
    numbers = wide.to(tl.float32)
    if ZEROS:
        numbers -= tl.load(zeros_ptr + group * outputs + n, mask=real, other=0.0)[:, None]
    numbers *= tl.load(scales_ptr + group * outputs + n, mask=real, other=0.0)[:, None]
    at = k + tl.arange(0, 32)
    to = out_ptr + n.to(tl.int64)[:, None] * inputs + at[None, :]
    tl.store(to, numbers.to(out_ptr.dtype.element_ty), mask=real_n[:, None] & (at < inputs)[None, :])


@triton.jit(do_not_specialize=["splits", "rows"])  # see attention_kernels.py
def sum_parts_kernel(
    parts_ptr, bias_ptr, out_ptr, splits, rows, outputs, BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (j, i): block i of row j of `out` `[rows, outputs]` is the sum of `parts` float32 `[splits, rows,
    outputs]`, in their order, and the bias."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = n < outputs
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(splits):
        total += tl.load(parts_ptr + (part * rows + row) * outputs + n, mask=real, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + n, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * outputs + n, total.to(out_ptr.dtype.element_ty), mask=real)
