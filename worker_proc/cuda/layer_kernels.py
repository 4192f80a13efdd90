"""What a decoder layer does beside its matrix products, in three Triton kernels: each reads its inputs once."""

import triton
import triton.language as tl

from worker_proc.cuda.kv_codes import head_codes, head_scale
from worker_proc.cuda.overlap import take_turn


@triton.jit
def add_rms_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, out_ptr, width, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program t: x[t] += delta[t], in place; out[t] = RMSNorm(x[t]) * weight. All rows are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    take_turn(OVERLAP)
    x = tl.load(x_ptr + row * width + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + row * width + at, mask=mask, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)  # the sum as later layers will read it
        tl.store(x_ptr + row * width + at, x.to(x_ptr.dtype.element_ty), mask=mask)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(out_ptr + row * width + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr"])  # see attention_kernels.py
def rope_store_kernel(
    qkv_ptr, q_ptr, k_pages_ptr, v_pages_ptr, k_scales_ptr, v_scales_ptr, positions_ptr, slots_ptr, frequencies_ptr,
    q_norm_ptr, k_norm_ptr, attention_factor, eps, heads, kv_heads,
    k_page_stride, k_head_stride, v_page_stride, v_head_stride,
    PAGE: tl.constexpr, DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, NORM: tl.constexpr, INT8: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (t, h) takes head h of `qkv` `[T, Hq + 2 Hkv, DIM]`: queries are normed (where `NORM`), rotated and go to
    `q` `[T, Hq, DIM]`, keys the same to their page, values to theirs as they are; with `INT8` both as codes, and
    their scales to `k_scales`, `v_scales` `[pages, Hkv, PAGE]`."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, HALF_BLOCK)
    mask = at < DIM // 2
    source = qkv_ptr + (token * (heads + 2 * kv_heads) + head) * DIM + at
    slot = tl.load(slots_ptr + token)
    page, offset = slot // PAGE, slot % PAGE
    angle = tl.load(positions_ptr + token).to(tl.float32) * tl.load(frequencies_ptr + at, mask=mask, other=0.0)
    cos, sin = tl.cos(angle) * attention_factor, tl.sin(angle) * attention_factor
    take_turn(OVERLAP)
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + DIM // 2, mask=mask, other=0.0)
    if head >= heads + kv_heads:
        kv_head = head - heads - kv_heads
        to = v_pages_ptr + page * v_page_stride + kv_head * v_head_stride + offset * DIM + at
        if INT8:
            _store_codes(first, second, to, v_scales_ptr + (page * kv_heads + kv_head) * PAGE + offset, mask, DIM)
        else:
            tl.store(to, first, mask=mask)
            tl.store(to + DIM // 2, second, mask=mask)
    else:
        x, y = first.to(tl.float32), second.to(tl.float32)
        is_query = head < heads
        if NORM:
            scale = 1.0 / tl.sqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / DIM + eps)
            weights = k_norm_ptr
            if is_query:
                weights = q_norm_ptr
            x = x * scale * tl.load(weights + at, mask=mask, other=0.0).to(tl.float32)
            y = y * scale * tl.load(weights + DIM // 2 + at, mask=mask, other=0.0).to(tl.float32)
        first, second = (x * cos - y * sin).to(q_ptr.dtype.element_ty), (y * cos + x * sin).to(q_ptr.dtype.element_ty)
        kv_head = head - heads
        to_page = k_pages_ptr + page * k_page_stride + kv_head * k_head_stride + offset * DIM + at
        to_query = q_ptr + (token * heads + head) * DIM + at
        if is_query:
            tl.store(to_query, first, mask=mask)
            tl.store(to_query + DIM // 2, second, mask=mask)
        elif INT8:
            to_scale = k_scales_ptr + (page * kv_heads + kv_head) * PAGE + offset
            _store_codes(first, second, to_page, to_scale, mask, DIM)
        else:
            tl.store(to_page, first, mask=mask)
            tl.store(to_page + DIM // 2, second, mask=mask)


@triton.jit
def _store_codes(first, second, to, to_scale, mask, DIM: tl.constexpr):
    """Both halves of a head as int8 codes with one scale."""
    x, y = first.to(tl.float32), second.to(tl.float32)
    scale = head_scale(tl.maximum(tl.max(tl.abs(x), 0), tl.max(tl.abs(y), 0)))
    tl.store(to_scale, scale)
    tl.store(to, head_codes(x, scale), mask=mask)
    tl.store(to + DIM // 2, head_codes(y, scale), mask=mask)


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Program (t, i): block i of out[t] = silu(gate) * up, of `gate_up` `[T, 2 width]`, gate first."""
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(gate_up_ptr + row * 2 * width + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty), mask=mask)
