"""Products of a few rows with plain weights, and SiLU behind them.

Such a product reads weights and does little else, and those of a small model are read in two or three microseconds, as
long as it takes to launch a kernel and for its first numbers to come. So a program asks for its first weights before
the kernel before it has ended (worker_proc/cuda/overlap.py), and it is a single warp, whose sums need no barrier.
Matrix units are left alone: what they need in exchange takes longer than these few multiplications.
"""

import triton
import triton.language as tl

from worker_proc.cuda.overlap import take_turn


@triton.jit(do_not_specialize=["rows"])  # see attention_kernels.py
def few_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, inputs, outputs,
    ROWS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program i: outputs i * BLOCK_N .. of up to `ROWS` (1, 2 or 4) rows of `x` `[rows, inputs]`, to `out` `[rows,
    outputs]`.

    `weight` is `[outputs, inputs]`, with `GATED` (and one row) `[2 outputs, inputs]`, gates first: silu(gate) * up goes
    to `out`. All are contiguous. `EVEN`: `BLOCK_K` divides `inputs`. Numbers are rounded where kernels of their own
    would.
    """
    tl.static_assert(ROWS == 1 or not GATED)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    real = n < outputs
    gates = weight_ptr + n.to(tl.int64)[:, None] * inputs + at[None, :]
    ups = gates + tl.cast(outputs, tl.int64) * inputs
    w = _weights(gates, real, at, 0, inputs, EVEN)
    u = w
    if GATED:
        u = _weights(ups, real, at, 0, inputs, EVEN)
    take_turn(OVERLAP)
    y0 = tl.zeros([BLOCK_N], tl.float32)
    y1, y2, y3 = y0, y0, y0
    for start in range(0, inputs, BLOCK_K):
        following = start + BLOCK_K
        ahead = real & (following + 0 * n < inputs)
        next_w = _weights(gates, ahead, at, following, inputs, EVEN)
        next_u = next_w
        if GATED:
            next_u = _weights(ups, ahead, at, following, inputs, EVEN)
        k = start + at
        y0 += _products(w, x_ptr, 0, rows, k, inputs)
        if GATED:
            y1 += _products(u, x_ptr, 0, rows, k, inputs)
        if ROWS > 1:
            y1 += _products(w, x_ptr, 1, rows, k, inputs)
        if ROWS > 2:
            y2 += _products(w, x_ptr, 2, rows, k, inputs)
            y3 += _products(w, x_ptr, 3, rows, k, inputs)
        w, u = next_w, next_u
    dtype = out_ptr.dtype.element_ty
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=real, other=0.0).to(tl.float32)
        y0 += bias
        y1 += tl.load(bias_ptr + outputs + n, mask=real, other=0.0).to(tl.float32) if GATED else bias
        y2 += bias
        y3 += bias
    if GATED:
        gate = y0.to(dtype).to(tl.float32)
        y0 = gate / (1.0 + tl.exp(-gate)) * y1.to(dtype).to(tl.float32)
    tl.store(out_ptr + n, y0.to(dtype), mask=real)
    if ROWS > 1:
        tl.store(out_ptr + outputs + n, y1.to(dtype), mask=real)
    if ROWS > 2:
        tl.store(out_ptr + 2 * outputs + n, y2.to(dtype), mask=real)
        tl.store(out_ptr + 3 * outputs + n, y3.to(dtype), mask=real & (3 + 0 * n < rows))


@triton.jit
def _weights(weights, real, at, start, inputs, EVEN: tl.constexpr):
    """`[BLOCK_N, BLOCK_K]`, each read once by one program."""
    mask = real[:, None]
    if not EVEN:
        mask = mask & (start + at < inputs)[None, :]
    return tl.load(weights + start, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _products(w, x_ptr, row: tl.constexpr, rows, k, inputs):
    """Of a tile of weights with inputs `k` of a row, `[BLOCK_N]`."""
    x = tl.load(x_ptr + row * inputs + k, mask=(k < inputs) & (row + 0 * k < rows), other=0.0)
    return tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
