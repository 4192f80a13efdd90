"""What the native recurrent layers have in common: their convolutions, and calls for all rows of a step."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from worker_proc.attention.interface import ForwardBatch
from worker_proc.recurrent import RecurrentStates
from worker_proc.waves import Segments, in_waves

MOST_KERNEL = 8  # kMostKernel of native/causal_conv.h


def taps(conv: Any) -> tuple[Tensor, Tensor]:
    """The weights `[kernel, channels]` and the biases `[channels]` of a depthwise convolution, float32."""
    weight = conv.weight.detach()[:, 0].float().t().contiguous()
    return weight, torch.zeros(weight.shape[1]) if conv.bias is None else conv.bias.detach().float().contiguous()


def run_natively(
    function: Callable[[int], None],
    new_struct: Callable[[int, int], ctypes.Structure],
    batch: ForwardBatch,
    states: RecurrentStates,
    layer: int,
) -> None:
    """Call `function` with the address of a struct for each wave of a batch. `new_struct` makes it of the address of
    the wave's segments (int64 `[n, 3]`) and of their number."""

    def compute(segments: Segments) -> None:
        held = torch.tensor(segments, dtype=torch.int64)
        struct = new_struct(held.data_ptr(), len(segments))
        function(ctypes.addressof(struct))

    in_waves(batch, states, layer, compute)
