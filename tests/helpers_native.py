"""Native draws and scores on two threads, packed weights."""

from collections.abc import Iterator

import torch
from torch import Tensor

from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.linear import PackedMatrix, Pairing
from worker_proc.cpu.sampling import NativeDraws

# whose products know weights in 12 bits
_VECTORS = {"avx2", "asimd", "bf16"}  # x86, Arm, Arm as tests emulate it
COMPRESSING = [level for level in cpu_features().levels() if level != "generic" or cpu_features().flags & _VECTORS]


def native_draws(level: Level) -> Iterator[NativeDraws]:
    """For a fixture: of one level, until the tests that use it are done."""
    library = load_library(level)
    library.set_threads(2)
    yield NativeDraws(library)
    library.set_threads(1)


def packed(level: Level, weight: Tensor, paired: bool = False) -> PackedMatrix:
    """`weight` `[outputs, inputs]`, packed in two pieces; if `paired`, its halves are gates and ups."""
    outputs, inputs = weight.shape
    memory = torch.zeros(PackedMatrix.packed_size(outputs, inputs, paired=paired), dtype=torch.bfloat16)
    matrix = PackedMatrix(load_library(level), memory, outputs, inputs, paired=paired)
    if paired:
        gate, up = weight.chunk(2)
        matrix.pack(gate, 0, Pairing.GATE)
        matrix.pack(up, 0, Pairing.UP)
    else:
        cut = outputs // 3
        matrix.pack(weight[:cut], 0)
        matrix.pack(weight[cut:], cut)
    return matrix
