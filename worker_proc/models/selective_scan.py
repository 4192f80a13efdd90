"""Mamba-1 layers (Gu and Dao, 2023), by torch, from a state: transformers' own begin every prompt anew. Mamba,
Falcon-Mamba and Jamba have them.

The recurrence goes token by token; all that is around it takes the tokens of a chunk together.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PARTS = (
    "in_proj", "conv1d", "act", "x_proj", "dt_proj", "A_log", "D", "out_proj", "time_step_rank", "ssm_state_size",
)  # fmt: skip
_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")  # of step sizes, B and C: not in Mamba
_BLOCK = 64  # tokens whose products of states and step sizes are in memory together


class View(Protocol):
    """The states of some sequences, see `mixers.StateView`."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int) -> Tensor: ...
    def get_recurrent_state(self, layer_idx: int) -> Tensor: ...


def supports(module: nn.Module) -> bool:
    """Whether it is such a layer of a transformers model."""
    layer: Any = module
    return all(hasattr(module, name) for name in _PARTS) and bool(layer.A_log.dim() == 2)


def projection(layer: Any) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Makes of what was convolved, `[..., I]`, step sizes before softplus `[..., I]`, B and C `[..., N]`."""
    norms = [getattr(layer, name, nn.Identity()) for name in _NORMS]
    sizes = [layer.time_step_rank, layer.ssm_state_size, layer.ssm_state_size]

    def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = layer.x_proj(x).split(sizes, dim=-1)
        step, into, out_of = (norm(part) for norm, part in zip(norms, parts, strict=True))
        return layer.dt_proj(step), into, out_of

    return project


class SelectiveScan:
    """Computes such a layer with its own modules."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._rate = -layer.A_log.detach().float().exp()  # [I, N]
        self._skip = layer.D.detach().float()
        self._project = projection(layer)

    def forward(self, hidden: Tensor, view: View) -> Tensor:
        """`hidden` `[B, T, H]` of sequences whose states are `view`, which is changed, to as much."""
        layer, tokens = self._layer, hidden.shape[1]
        x, gate = layer.in_proj(hidden).chunk(2, dim=-1)  # [B, T, I]
        seen = view.update_conv_state(x.transpose(1, 2), layer.layer_idx)
        x = F.conv1d(seen, layer.conv1d.weight, layer.conv1d.bias, groups=seen.shape[1])[..., -tokens:]
        x = layer.act(x).transpose(1, 2)
        step, into, out_of = self._project(x)
        step = F.softplus(step.float())
        state = view.get_recurrent_state(layer.layer_idx)  # [B, I, N]
        made = []
        for first in range(0, tokens, _BLOCK):
            block = slice(first, first + _BLOCK)
            made.append(
                self._scan(state, x[:, block].float(), step[:, block], into[:, block].float(), out_of[:, block].float())
            )
        y = torch.cat(made, dim=1) + x.float() * self._skip
        out: Tensor = layer.out_proj((y * F.silu(gate.float())).to(hidden.dtype))
        return out

    def _scan(self, state: Tensor, x: Tensor, step: Tensor, into: Tensor, out_of: Tensor) -> Tensor:
        """`x` and `step` `[B, T, I]`, `into` and `out_of` `[B, T, N]` to `[B, T, I]`; `state` is changed."""
        kept = torch.exp(step[..., None] * self._rate)  # [B, T, I, N]
        added = (step * x)[..., None] * into[:, :, None]
        made = torch.empty_like(x)
        held = state.float()
        for token in range(x.shape[1]):
            held = kept[:, token] * held + added[:, token]
            made[:, token] = (held @ out_of[:, token, :, None])[..., 0]
        state.copy_(held)
        return made
