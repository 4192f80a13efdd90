"""What the machine can do at most, measured in the run that is held against it."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.linear import Format, PackedMatrix
from worker_proc.cpu.memory import HugePages

_SECONDS = 0.3
_IN_BYTES = (Format.INT4_SEGMENTS, Format.INT8_SEGMENTS, Format.FLOAT4_SEGMENTS)


def seconds(run: Callable[[], object], least: float = _SECONDS) -> float:
    """Median time of a call, over as many calls as fit in `least` seconds, at least three."""
    times, begin = [], time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < least:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class Limits:
    """What all threads do together, per second: bytes that they read, and operations with bfloat16 (or float32, where
    there is no bfloat16) and with bytes, or codes of 4 bits alone; 0 where they are not multiplied as such. And the
    seconds in which a cache line goes from one thread to another, which tells how far apart their cores are: in a
    virtual machine that may change from minute to minute."""

    bandwidth: float
    operations: float
    with_bytes: float
    hand_over: float

    def __str__(self) -> str:
        tera = [f"{rate / 1e12:.2f}" for rate in (self.operations, self.with_bytes) if rate]
        apart = f"cores {self.hand_over * 1e9:.0f} ns apart"
        return f"{self.bandwidth / 1e9:.1f} GB/s and {' and '.join(tera)} Tops/s, {apart}"

    def product(self, matrix: PackedMatrix, rows: float, copies: float = 1.0) -> float:
        """Seconds that a product takes at least."""
        operations = 2 * matrix.outputs * matrix.inputs * rows
        return max(copies * matrix.nbytes / self.bandwidth, operations / self._rate(matrix))

    def _rate(self, matrix: PackedMatrix) -> float:
        held = Format(matrix.struct.format)
        if held in _IN_BYTES or (held == Format.INT8_BOTH and matrix.native.exact(held)):
            return self.with_bytes
        if held == Format.INT8_CHANNEL and matrix.native.exact(held):
            return self.with_bytes / 2  # two rows of bytes for each
        return self.operations


def limits(native: NativeLibrary) -> Limits:
    """The rates of this machine, measured."""
    block = HugePages(2**29).take(2**29, torch.uint8)
    block.fill_(1)
    reading = seconds(lambda: native.functions.rhizome_read(block.data_ptr(), len(block)))

    def rate(function: Callable[[int], float], rounds: int = 1000) -> float:
        done = function(rounds)
        return done and done / seconds(lambda: function(rounds))

    functions = native.functions
    rates = rate(functions.rhizome_multiply), rate(functions.rhizome_multiply_bytes)
    return Limits(len(block) / reading, *rates, 1 / rate(functions.rhizome_hand_over, 20_000))
