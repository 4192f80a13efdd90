"""The Mamba-1 layers of Mamba, Falcon-Mamba and Jamba (native/selective_scan.h), all rows of a step in two calls, with
the projections to step sizes, B and C between them.

The recurrence goes token by token, which makes a token's bits depend on its own context alone.
"""

import ctypes
from ctypes import c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor, nn

from worker_proc.attention.interface import ForwardBatch
from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.recurrent_layer import MOST_KERNEL, taps
from worker_proc.models import selective_scan
from worker_proc.models.selective_scan import projection
from worker_proc.recurrent import RecurrentStates, StateKey
from worker_proc.waves import Segments, in_waves

_MOST_STATES = 64  # kMostStates of native/selective_scan.h


class _ScanStruct(ctypes.Structure):
    """`ScanBatch` of native/selective_scan.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("projected", "conv_weight", "conv_bias", "rate", "skip", "conv", "state")),
        *((name, c_void_p) for name in ("segments", "mixed", "steps", "into", "out_of", "out")),
        *((name, c_int64) for name in ("num_segments", "channels", "states", "kernel")),
    )


def supports(module: nn.Module) -> bool:
    """Whether `NativeScan` computes this layer of a transformers model in bfloat16."""
    if not selective_scan.supports(module):
        return False
    layer: Any = module
    channels, states = layer.A_log.shape
    return bool(
        channels % 16 == 0
        and states <= _MOST_STATES
        and layer.conv1d.weight.shape[-1] <= MOST_KERNEL
        and layer.conv1d.weight.dtype == torch.bfloat16
        and type(layer.act).__name__ in ("SiLU", "SiLUActivation")
    )


class NativeScan:
    """A layer whose products are its own modules', and whose rest is native."""

    def __init__(self, layer: Any, library: NativeLibrary) -> None:
        """`layer` is one that is supported."""
        self._layer = layer
        self._project = projection(layer)
        self._convolve = library.functions.rhizome_scan_convolve
        self._scan = library.functions.rhizome_selective_scan
        self._index: int = layer.layer_idx
        rate = -layer.A_log.detach().float().exp()
        self._held = (*taps(layer.conv1d), rate.t().contiguous(), layer.D.detach().float().contiguous())
        self._sizes = (*rate.shape, layer.conv1d.weight.shape[-1])

    def forward(self, hidden: Tensor, batch: ForwardBatch, states: RecurrentStates) -> Tensor:
        """`hidden` bfloat16 `[1, T, H]`, the tokens of all rows one after another, to as much."""
        projected = self._layer.in_proj(hidden).contiguous()
        mixed, out = (projected.new_empty(hidden.shape[1], self._sizes[0]) for _ in range(2))
        conv, state = (states.tensors[StateKey(self._index, kind, 0)] for kind in ("conv", "recurrent"))

        def compute(segments: Segments) -> None:
            held = torch.tensor(segments, dtype=torch.int64)
            struct = _ScanStruct(
                *(x.data_ptr() for x in (projected, *self._held, conv, state, held, mixed)),
                None, None, None, out.data_ptr(), len(segments), *self._sizes,
            )  # fmt: skip
            self._convolve(ctypes.addressof(struct))
            made = self._made_of(mixed, segments)
            struct.steps, struct.into, struct.out_of = (x.data_ptr() for x in made)
            self._scan(ctypes.addressof(struct))

        in_waves(batch, states, self._index, compute)
        result: Tensor = self._layer.out_proj(out[None])
        return result

    def _made_of(self, mixed: Tensor, segments: Segments) -> list[Tensor]:
        """Step sizes `[T, I]`, B and C `[T, N]`, without meaning for tokens that are in none of the segments."""
        if sum(tokens for _, _, tokens in segments) == len(mixed):
            return [part.contiguous() for part in self._project(mixed)]
        index = torch.cat([torch.arange(first, first + tokens) for _, first, tokens in segments])
        parts = self._project(mixed[index])
        return [part.new_zeros(len(mixed), part.shape[1]).index_copy_(0, index, part) for part in parts]
