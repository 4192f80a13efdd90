"""The Gated DeltaNet layers of Qwen3-Next and Qwen 3.5 (native/delta_net.h), all rows of a step in one call.

The recurrence goes token by token. That takes less time than a layer's products, and makes a token's bits depend on its
own context alone: not on the batch, nor on how prompts are cut into chunks.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor, nn

from worker_proc.attention.interface import ForwardBatch
from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.recurrent_layer import MOST_KERNEL, run_natively, taps
from worker_proc.recurrent import RecurrentStates, StateKey

_SEPARATE = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # Qwen 3.5
_TOGETHER = ("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering")  # Qwen3-Next
_COMMON = ("conv1d", "A_log", "dt_bias", "norm", "out_proj", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")


class DeltaStruct(ctypes.Structure):
    """`DeltaBatch` of native/delta_net.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "z", "b", "a", "conv_weight", "rate", "dt_bias", "norm", "conv")),
        *((name, c_void_p) for name in ("state", "segments", "out")),
        *((name, c_int64) for name in ("qkv_stride", "z_stride", "b_stride", "a_stride", "out_stride")),
        *((name, c_int64) for name in ("num_segments", "k_heads", "v_heads", "k_dim", "v_dim", "kernel")),
        *((name, c_int64) for name in ("first_head", "alike")),
        ("eps", c_float),
    )


def knows_sizes(k_dim: int, v_dim: int, kernel: int) -> bool:
    """Whether native code computes such layers."""
    return k_dim % 16 == 0 and v_dim % 16 == 0 and kernel <= MOST_KERNEL


def supports(module: nn.Module) -> bool:
    """Whether `DeltaNet` computes this layer of a transformers model in bfloat16."""
    if not all(hasattr(module, name) for name in _COMMON):
        return False
    if not any(all(hasattr(module, name) for name in names) for names in (_SEPARATE, _TOGETHER)):
        return False
    layer: Any = module
    return bool(
        knows_sizes(layer.head_k_dim, layer.head_v_dim, layer.conv1d.weight.shape[-1])
        and layer.num_v_heads % layer.num_k_heads == 0
        and layer.conv1d.bias is None
        and layer.conv1d.weight.dtype == torch.bfloat16
        and layer.activation == layer.norm.activation == "silu"
    )


class DeltaNet:
    """A layer whose products are its own modules', and whose rest is native."""

    def __init__(self, layer: Any, library: NativeLibrary) -> None:
        """`layer` is one that is supported, and packed already if it is to be."""
        self._layer = layer
        self._run = library.functions.rhizome_delta_net
        self._index: int = layer.layer_idx
        rest = (-layer.A_log.detach().float().exp(), layer.dt_bias, layer.norm.weight)
        self._weights = (taps(layer.conv1d)[0], *(part.detach().float().contiguous() for part in rest))
        self._eps = float(layer.norm.variance_epsilon)

    def forward(self, hidden: Tensor, batch: ForwardBatch, states: RecurrentStates) -> Tensor:
        """`hidden` bfloat16 `[1, T, H]`, the tokens of all rows one after another, to as much."""
        layer = self._layer
        projected = self._project(hidden)  # [1, T, n] each
        out = hidden.new_empty(*hidden.shape[:-1], layer.num_v_heads * layer.head_v_dim)
        inputs = [x.data_ptr() for x in (*projected, *self._weights)]
        strides = [x.stride(1) for x in projected]
        conv = states.tensors[StateKey(self._index, "conv", 0)]
        state = states.tensors[StateKey(self._index, "recurrent", 0)]

        def struct(segments: int, count: int) -> DeltaStruct:
            return DeltaStruct(
                *inputs, conv.data_ptr(), state.data_ptr(), segments, out.data_ptr(), *strides,
                out.shape[-1], count, layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim,
                conv.shape[-1], 0, layer.num_v_heads // layer.num_k_heads, self._eps,
            )  # fmt: skip

        run_natively(self._run, struct, batch, states, self._index)
        made: Tensor = layer.out_proj(out)
        return made

    def _project(self, hidden: Tensor) -> Sequence[Tensor]:
        """qkv, z, b and a."""
        layer = self._layer
        if hasattr(layer, _SEPARATE[0]):
            return tuple(getattr(layer, name)(hidden).contiguous() for name in _SEPARATE)
        parts = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
        query, key, value, z, b, a = (part.reshape(*hidden.shape[:-1], -1).contiguous() for part in parts)
        return torch.cat((query, key, value), dim=-1), z, b, a
