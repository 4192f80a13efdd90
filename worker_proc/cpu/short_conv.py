"""The gated short convolutions of LFM2 (native/short_conv.h), all rows of a step in one call."""

import ctypes
from ctypes import c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor, nn

from worker_proc.attention.interface import ForwardBatch
from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.recurrent_layer import MOST_KERNEL, run_natively, taps
from worker_proc.recurrent import RecurrentStates, StateKey

_PARTS = ("conv", "in_proj", "out_proj", "conv_kernel_size")
_NOT_THIS = ("conv1d", "A_log", "norm")  # of other layers with convolutions


class ConvStruct(ctypes.Structure):
    """`ConvBatch` of native/short_conv.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("inputs", "weight", "bias", "conv", "segments", "out")),
        *((name, c_int64) for name in ("inputs_stride", "out_stride", "num_segments", "channels", "kernel")),
    )


def knows_sizes(channels: int, kernel: int) -> bool:
    """Whether native code computes such layers."""
    return channels % 16 == 0 and kernel <= MOST_KERNEL


def supports(module: nn.Module) -> bool:
    """Whether `ShortConv` computes this layer of a transformers model in bfloat16."""
    if not all(hasattr(module, name) for name in _PARTS) or any(hasattr(module, name) for name in _NOT_THIS):
        return False
    conv: Any = module.conv
    return bool(
        type(module).__name__.endswith("ShortConv")
        and isinstance(conv, nn.Conv1d)
        and conv.weight.dtype == torch.bfloat16
        and conv.groups == conv.in_channels == conv.out_channels
        and knows_sizes(conv.in_channels, conv.kernel_size[0])
    )


class ShortConv:
    """A layer whose products are its own modules', and whose rest is native."""

    def __init__(self, layer: Any, library: NativeLibrary) -> None:
        """`layer` is one that is supported."""
        self._layer = layer
        self._run = library.functions.rhizome_short_conv
        self._index: int = layer.layer_idx
        self._weight, self._bias = taps(layer.conv)

    def forward(self, hidden: Tensor, batch: ForwardBatch, states: RecurrentStates) -> Tensor:
        """`hidden` bfloat16 `[1, T, H]`, the tokens of all rows one after another, to as much."""
        inputs = self._layer.in_proj(hidden).contiguous()
        out = inputs.new_empty(*inputs.shape[:-1], len(self._bias))
        conv = states.tensors[StateKey(self._index, "conv", 0)]

        def struct(segments: int, count: int) -> ConvStruct:
            pointers = (x.data_ptr() for x in (inputs, self._weight, self._bias, conv))
            strides = inputs.shape[-1], out.shape[-1]
            return ConvStruct(*pointers, segments, out.data_ptr(), *strides, count, *conv.shape[1:])

        run_natively(self._run, struct, batch, states, self._index)
        made: Tensor = self._layer.out_proj(out)
        return made
