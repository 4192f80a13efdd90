"""Native draws and scores on two threads, packed weights, tests of kernels for other processors."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.linear import Finish, PackedMatrix, Pairing
from worker_proc.cpu.sampling import NativeDraws

ROOT = Path(__file__).parents[1]
# whose products know weights in 12 bits
_VECTORS = {"avx2", "asimd", "bf16"}  # x86, Arm, Arm as tests emulate it
COMPRESSING = [level for level in cpu_features().levels() if level != "generic" or cpu_features().flags & _VECTORS]
# whose products of int8 are faster than those of bfloat16
SCREENING = [level for level in COMPRESSING if cpu_features().machine == "x86_64" and level != "armbf16"]


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


def check_bits_in_any_batch(level: Level, matrix: Any, x: Tensor, outputs: int, data: st.DataObject) -> None:
    """Rows multiplied alone, or few at a time and by one thread, are those of all of `x` at once by two."""
    native, rows = load_library(level), x.shape[0]
    native.set_threads(2)
    whole = matrix.linear(x, Finish.STORE_FLOAT, torch.empty(rows, outputs))
    native.set_threads(1)
    for _ in range(5):
        first = data.draw(st.integers(0, rows - 1))
        count = data.draw(st.integers(1, rows - first))
        part = matrix.linear(x[first : first + count], Finish.STORE_FLOAT, torch.empty(count, outputs))
        assert torch.equal(part, whole[first : first + count])


def check_emulated(option: str, level: Level, names: Sequence[str]) -> None:
    """The tests of a level in the tests of these names pass, with an option that emulates its instructions."""
    files = (f"tests/worker/test_{name}.py" for name in names)
    command = [sys.executable, "-m", "pytest", "-q", option, "-p", "no:cacheprovider", "-k", level, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed is not None, done.stdout[-5000:] + done.stderr[-1000:]
    assert int(passed[1]) >= 100  # of all files: nobody has renamed what -k looks for
