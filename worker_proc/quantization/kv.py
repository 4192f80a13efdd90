"""K and V in int8: the definition that the native kernels are tested against."""

import torch
from torch import Tensor

_LEAST = 1e-30  # a head with smaller scales is all zeros


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` `[..., D]` to codes int8 `[..., D]` and scales float32 `[...]`: the largest magnitude becomes 127."""
    wide = x.float()
    scales = wide.abs().amax(dim=-1) / 127
    scales = torch.where(scales < _LEAST, 0, scales)
    inverse = torch.where(scales == 0, 0, 1 / scales)
    return (wide * inverse[..., None]).round_().to(torch.int8), scales


def dequantize_heads(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`[..., D]`, computed in float32 and rounded to `dtype`."""
    return (codes.float() * scales[..., None]).to(dtype)
