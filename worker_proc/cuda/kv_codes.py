"""K and V become int8 codes as in worker_proc/quantization/kv.py, to the last bit, for the kernels that store them."""

import triton
import triton.language as tl


@triton.jit
def head_scale(largest):
    """The scale of a head whose largest magnitude is `largest` (float32): 0 where it is all zeros."""
    scale = tl.div_rn(largest, 127.0)
    return tl.where(scale < 1e-30, 0.0, scale)


@triton.jit
def head_codes(x, scale):
    """`x` (float32) as int8 codes."""
    inverse = tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale)))
    # The product is rounded before anything is added to it, which the compiler would fuse otherwise; adding and taking
    # away 1.5 * 2**23 rounds to the nearest whole number, halves to the even one.
    rounded = (tl.fma(x, inverse, 0.0) + 12582912.0) - 12582912.0
    return rounded.to(tl.int32).to(tl.int8)
