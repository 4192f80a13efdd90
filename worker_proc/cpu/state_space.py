"""The Mamba-2 layers of Granite 4, Bamba and Nemotron-H (native/state_space.h), all rows of a step in one call.

The recurrence goes token by token, which makes a token's bits depend on its own context alone. Step sizes are bounded
in decodes, too, where transformers (5.23) bounds them in prompts only.
"""

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor, nn

from worker_proc.attention.interface import ForwardBatch
from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.recurrent_layer import MOST_KERNEL, run_natively, taps
from worker_proc.recurrent import RecurrentStates, StateKey

_PARTS = (
    "in_proj", "conv1d", "dt_bias", "A_log", "D", "norm", "out_proj", "num_heads", "head_dim", "n_groups",
    "ssm_state_size", "intermediate_size", "conv_dim", "time_step_limit",
)  # fmt: skip
_SCALED = "mup_vector"  # Falcon-H1 multiplies what is projected


class SpaceStruct(ctypes.Structure):
    """`SpaceBatch` of native/state_space.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("inputs", "conv_weight", "conv_bias", "rate", "dt_bias", "skip", "norm")),
        *((name, c_void_p) for name in ("conv", "state", "segments", "out", "squares")),
        *((name, c_int64) for name in ("inputs_stride", "out_stride")),
        *((name, c_int64) for name in ("num_segments", "heads", "head_dim", "groups", "state_size", "norm_groups")),
        ("kernel", c_int64),
        *((name, c_float) for name in ("eps", "least_dt", "most_dt")),
    )


def knows_sizes(head_dim: int, state_size: int, kernel: int) -> bool:
    """Whether native code computes heads of these sizes."""
    return head_dim % 16 == state_size % 16 == 0 and kernel <= MOST_KERNEL


def supports(module: nn.Module) -> bool:
    """Whether `StateSpace` computes this layer of a transformers model in bfloat16."""
    if not all(hasattr(module, name) for name in _PARTS) or hasattr(module, _SCALED):
        return False
    layer: Any = module
    group = _group(layer)
    return bool(
        layer.intermediate_size == layer.num_heads * layer.head_dim
        and layer.conv_dim == layer.intermediate_size + 2 * layer.n_groups * layer.ssm_state_size
        and layer.num_heads % layer.n_groups == 0
        and knows_sizes(layer.head_dim, layer.ssm_state_size, layer.conv1d.weight.shape[-1])
        and group % 16 == layer.intermediate_size % group == 0
        and layer.time_step_limit is not None
        and layer.conv1d.weight.dtype == torch.bfloat16
        and layer.activation == "silu"
    )


def _group(layer: Any) -> int:
    """Numbers that the norm, which comes after the gate, takes together: all of them in older transformers (5.17), and
    where they are on several ranks."""
    return int(getattr(layer.norm, "group_size", layer.intermediate_size))


class StateSpace:
    """A layer whose products are its own modules', and whose rest is native."""

    def __init__(self, layer: Any, library: NativeLibrary) -> None:
        """`layer` is one that is supported."""
        self._layer = layer
        self._run = library.functions.rhizome_state_space
        self._index: int = layer.layer_idx
        self._held = (
            *taps(layer.conv1d),
            -layer.A_log.detach().float().exp(),
            *(part.detach().float().contiguous() for part in (layer.dt_bias, layer.D, layer.norm.weight)),
        )
        heads = (layer.num_heads, layer.head_dim, layer.n_groups, layer.ssm_state_size)
        self._sizes = (*heads, layer.intermediate_size // _group(layer), layer.conv1d.weight.shape[-1])
        self._limits = (layer.norm.variance_epsilon, *layer.time_step_limit)
        self._shared: Callable[[Tensor], Tensor] | None = getattr(layer.norm, "factors", None)  # of a norm over ranks

    def forward(self, hidden: Tensor, batch: ForwardBatch, states: RecurrentStates) -> Tensor:
        """`hidden` bfloat16 `[1, T, H]`, the tokens of all rows one after another, to as much."""
        projected = self._layer.in_proj(hidden).contiguous()
        out = projected.new_empty(*hidden.shape[:-1], self._layer.intermediate_size)
        squares = None if self._shared is None else torch.empty(hidden.shape[:-1])
        conv = states.tensors[StateKey(self._index, "conv", 0)]
        state = states.tensors[StateKey(self._index, "recurrent", 0)]

        def struct(segments: int, count: int) -> SpaceStruct:
            pointers = (x.data_ptr() for x in (projected, *self._held, conv, state))
            sums = None if squares is None else squares.data_ptr()
            strides = projected.shape[-1], out.shape[-1]
            return SpaceStruct(*pointers, segments, out.data_ptr(), sums, *strides, count, *self._sizes, *self._limits)

        run_natively(self._run, struct, batch, states, self._index)
        if self._shared is not None and squares is not None:
            out = (out.float() * self._shared(squares)[..., None]).bfloat16()
        made: Tensor = self._layer.out_proj(out)
        return made
