"""Rotary position embeddings (Su et al., RoFormer, 2021) and the scaled variants of `RopeSpec`.

Computed in float32 with the operations in the order of `transformers`, so that float32 results agree to the bit.
"""

import math

import torch
from torch import Tensor

from worker_proc.models.rope_spec import RopeSpec


class Rope:
    """Angles for a step. Inverse frequencies are computed once; cos and sin once per step, not once per layer."""

    def __init__(self, spec: RopeSpec, device: torch.device | str = "cpu") -> None:
        self.inv_freq = inverse_frequencies(spec).to(device)  # float32 [dim / 2]
        self.attention_factor = spec.attention_factor

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of `positions` `[T]`, each `[T, 1, dim / 2]`."""
        angles = positions[:, None, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `dim` numbers of heads `[T, H, D]` by angles `[T, 1, dim / 2]`: number i is paired with
    i + dim / 2, as Hugging Face checkpoints expect."""
    dim = 2 * cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :dim], cos, sin), x[..., dim:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """float32 `[dim / 2]`."""
    powers = spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim)
    plain = 1.0 / powers
    match spec.kind:
        case "default" | "dynamic":  # dynamic differs beyond the trained context only, which is not served
            return plain
        case "linear":
            return plain / spec.factor
        case "proportional":  # of whole heads, whose last numbers do not turn (Gemma 4)
            return torch.where(torch.arange(len(plain)) < spec.turning, plain, 0.0) / spec.factor
        case "llama3":
            return _llama3(plain, spec)
        case "yarn":
            return _yarn(powers, spec)
        case "longrope":
            return 1.0 / (torch.tensor(spec.short_factor, dtype=torch.float32) * powers)
    raise ValueError(f"unknown rope type {spec.kind!r}")


def _llama3(plain: Tensor, spec: RopeSpec) -> Tensor:
    """Llama 3.1: long wavelengths are interpolated, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / plain
    turns = spec.original_context / wavelengths
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - blend) * plain / spec.factor + blend * plain
    scaled = torch.where(wavelengths > spec.original_context / spec.low_freq_factor, plain / spec.factor, blended)
    return torch.where(wavelengths < spec.original_context / spec.high_freq_factor, plain, scaled)


def _yarn(powers: Tensor, spec: RopeSpec) -> Tensor:
    """YaRN (Peng et al., 2023): dimensions that turn often keep their frequency, those that turn rarely are
    interpolated, with a linear ramp between."""

    def dimension(turns: float) -> float:
        return spec.dim * math.log(spec.original_context / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (spec.factor * powers) * (1 - kept) + 1.0 / powers * kept
