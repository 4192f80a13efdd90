"""Products with quantized weights in Triton: codes become numbers in registers, right before they are multiplied.

A weight is (code - zero) * scale. Codes come centred (worker_proc/cuda/quantized.py): they, and their differences from
zeros, are whole numbers that bfloat16 and float16 hold exactly, as they do FP8's and FP4's; scales multiply the sums,
in float32.
Outputs are the rows of the product's first operand, so that what was widened can stay in registers: Hopper's matrix
units take the first operand from there. The second one is the batch, of 16 rows or more.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "tiles", "each"])  # see attention_kernels.py
def quantized_linear_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr,
    rows, inputs, outputs, tiles, each, x_row, codes_row,
    BITS: tl.constexpr, FLOAT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (j, i, s): rows j * BLOCK_M .. of `x` `[rows, inputs]` times outputs i * BLOCK_N .., over part s of the
    inputs, `each` of `tiles` tiles of BLOCK_K, to `out[s]` `[rows, outputs]`.

    `codes` int8 `[outputs, tiles * BLOCK_K * BITS / 8]`; in 4 bits, the lower halves of a tile's bytes are its first
    BLOCK_K / 2 inputs; FP8 (E4M3) or FP4 (E2M1) where `FLOAT`. `scales`, and `zeros` where `ZEROS`, float32 `[groups,
    outputs]`, one for every `GROUP` inputs, a multiple of BLOCK_K, or for all of them where that is 0. `EVEN`: BLOCK_K
    divides `inputs`.
    """
    WIDTH: tl.constexpr = BLOCK_K * BITS // 8
    dtype = x_ptr.dtype.element_ty
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    real_m, real_n = m < rows, n < outputs
    at = tl.arange(0, WIDTH)
    codes_at = codes_ptr + n.to(tl.int64)[:, None] * codes_row + at[None, :]
    x_at = x_ptr + m.to(tl.int64)[None, :] * x_row + at[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for tile in range(part * each, tl.minimum(part * each + each, tiles)):
        k = tile * BLOCK_K
        codes = tl.load(codes_at + tile * WIDTH, mask=real_n[:, None], other=0)
        group = 0
        if GROUP > 0:
            group = k // GROUP
        zero = 0.0
        if ZEROS:
            zero = tl.load(zeros_ptr + group * outputs + n, mask=real_n, other=0.0)[:, None].to(dtype)
        x = _inputs(x_at + k, k + at, inputs, real_m, EVEN)
        if BITS == 4:
            if FLOAT:
                low = _float4(codes, dtype)
            else:
                low = _whole((codes << 4).to(tl.int8) >> 4, zero, ZEROS, dtype)  # the sign comes with the shift
            product = tl.dot(low, x, input_precision="ieee")
            x = _inputs(x_at + k + WIDTH, k + WIDTH + at, inputs, real_m, EVEN)
            if FLOAT:
                high = _float4(codes >> 4, dtype)
            else:
                high = _whole(codes >> 4, zero, ZEROS, dtype)
            product = tl.dot(high, x, product, input_precision="ieee")
        elif FLOAT:
            product = tl.dot(_float8(codes, dtype), x, input_precision="ieee")
        else:
            product = tl.dot(_whole(codes, zero, ZEROS, dtype), x, input_precision="ieee")
        if GROUP > 0:
            product *= tl.load(scales_ptr + group * outputs + n, mask=real_n, other=0.0)[:, None]
        sums += product
    if GROUP == 0:
        sums *= tl.load(scales_ptr + n, mask=real_n, other=0.0)[:, None]
    if FLOAT and BITS == 8:
        sums *= 256.0
    if BIAS:
        sums += tl.load(bias_ptr + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
    to = out_ptr + (part.to(tl.int64) * rows + m)[None, :] * outputs + n[:, None]
    tl.store(to, sums.to(out_ptr.dtype.element_ty), mask=real_n[:, None] & real_m[None, :])


@triton.jit
def _inputs(x_at, k, inputs, real_m, EVEN: tl.constexpr):
    """A tile of the batch, `[inputs, rows]`."""
    mask = real_m[None, :]
    if not EVEN:
        mask = mask & (k < inputs)[:, None]
    return tl.load(x_at, mask=mask, other=0.0)


@triton.jit
def _whole(codes, zero, ZEROS: tl.constexpr, dtype: tl.constexpr):
    """`codes` (int8) less their zeros."""
    wide = codes.to(dtype)
    if ZEROS:
        wide = (wide - zero).to(dtype)
    return wide


@triton.jit
def _float8(codes, dtype: tl.constexpr):
    """2^-8 of what `codes` (int8) stand for in FP8: seven bits further to the left, they are float16 of that size. On
    every GPU, also those without instructions for FP8."""
    bits = (codes.to(tl.int16) << 7) & -0x4001
    return bits.to(tl.float16, bitcast=True).to(dtype)


@triton.jit
def _float4(codes, dtype: tl.constexpr):
    """What the lower halves of `codes` (int8) stand for in FP4: moved to where float16 has its bits, they are 2^-14 of
    that. It is made up for here, exactly: matrix units need not take numbers below float16's normal ones."""
    wide = codes.to(tl.int16)
    bits = ((wide & 7) << 9) | ((wide & 8) << 12)
    return (bits.to(tl.float16, bitcast=True) * 16384.0).to(dtype)


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
