"""The kernels of layer_kernels.py on tensors."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from worker_proc.cuda.attention import scales_of
from worker_proc.cuda.few_rows import few_rows_linear, suits_few_rows
from worker_proc.cuda.layer_kernels import add_rms_norm_kernel, rope_store_kernel, silu_mul_kernel
from worker_proc.cuda.overlap import options
from worker_proc.kv_cache import KVCache
from worker_proc.models.layers import Linear, RMSNorm

_SILU_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Rotation:
    """`frequencies` float32 `[dim / 2]` on the device."""

    frequencies: Tensor
    attention_factor: float


def add_rms_norm(x: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
    """`x` `[T, hidden]` += `delta`, in place; returns the norm of the sum."""
    out = torch.empty_like(x)
    width = x.shape[1]
    add_rms_norm_kernel[(len(x),)](
        x, x if delta is None else delta, norm.weight, out, width, norm.eps,
        delta is not None, triton.next_power_of_2(width), **options(x.device, len(x)),
    )  # fmt: skip
    return out


def multiply(x: Tensor, linear: Linear) -> Tensor:
    """`linear` of `x` `[T, inputs]`, by what is quickest."""
    return few_rows_linear(x, linear) if suits_few_rows(x, linear) else linear(x)


def multiply_gated(x: Tensor, linear: Linear) -> Tensor:
    """What `silu_mul` makes of `linear` of `x` `[T, inputs]`."""
    return few_rows_linear(x, linear, gated=True) if suits_few_rows(x, linear, gated=True) else silu_mul(linear(x))


def rope_store(
    qkv: Tensor, heads: int, cache: KVCache, layer: int, positions: Tensor, slot_mapping: Tensor, rotation: Rotation,
    q_norm: RMSNorm | None, k_norm: RMSNorm | None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Rotated queries `[T, Hq, D]` of `qkv` `[T, Hq + 2 Hkv, D]`, in `out` where it is given; its keys and values go to
    the cache."""
    tokens, all_heads, dim = qkv.shape
    kv_heads = (all_heads - heads) // 2
    q = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device) if out is None else out
    k_pages, v_pages = cache.k[layer], cache.v[layer]
    none = rotation.frequencies
    rope_store_kernel[tokens, all_heads](
        qkv, q, k_pages, v_pages, *scales_of(cache, layer), positions, slot_mapping, rotation.frequencies,
        none if q_norm is None else q_norm.weight, none if k_norm is None else k_norm.weight,
        rotation.attention_factor, 0.0 if q_norm is None else q_norm.eps, heads, kv_heads,
        k_pages.stride(0), k_pages.stride(1), v_pages.stride(0), v_pages.stride(1),
        cache.page_size, dim, triton.next_power_of_2(dim // 2), q_norm is not None and k_norm is not None,
        cache.spec.int8, **options(qkv.device, tokens),
    )  # fmt: skip
    return q


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[T, 2 I]`, gate first, as `[T, I]`."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    silu_mul_kernel[tokens, triton.cdiv(width, _SILU_BLOCK)](
        gate_up, out, width, _SILU_BLOCK, **options(out.device, tokens)
    )
    return out
