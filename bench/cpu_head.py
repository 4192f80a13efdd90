"""What a look in int8 saves of an output head when tokens are greedy, in turn and in the same run.

    python -m bench.cpu_head
    python -m bench.cpu_head --level generic --vocabulary 248320

Weights and hidden states are normally distributed.
"""

import statistics
import time

import click
import torch

from worker_proc.cpu.compressed import CompressedMatrix
from worker_proc.cpu.features import LEVELS, Level, cpu_features
from worker_proc.cpu.library import NativeLibrary, load_library
from worker_proc.cpu.linear import PackedMatrix
from worker_proc.cpu.machine import num_cpus
from worker_proc.cpu.matrices import MatrixForm
from worker_proc.cpu.memory import HugePages
from worker_proc.cpu.screen import HeadScreen, screen_scheme

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_PIECE = 8192  # outputs that are packed together


def head(native: NativeLibrary, weight: torch.Tensor) -> tuple[PackedMatrix, HeadScreen]:
    """A head as a large model has it, in 12 bits where that is fast, and its screen."""
    outputs, inputs = weight.shape
    form, scheme = MatrixForm(outputs, inputs, compress=native.compresses_well), screen_scheme(native, outputs, inputs)
    if scheme is None:
        raise click.ClickException("heads of this size are not screened here")
    memory = HugePages(form.room() + HeadScreen.room(outputs, inputs, scheme))
    matrix, screen = form.make(native, memory), HeadScreen(native, memory, outputs, inputs, scheme)
    for first in range(0, outputs, _PIECE):
        for packed in (matrix, screen):
            packed.pack(weight[first : first + _PIECE], first)
    screen.seal()
    if isinstance(matrix, CompressedMatrix):
        matrix.seal()
    return matrix, screen


@click.command()
@click.option("--level", type=click.Choice(LEVELS), default=cpu_features().levels()[0])
@click.option("--threads", type=int, default=num_cpus())
@click.option("--vocabulary", type=int, default=151936)
@click.option("--hidden", type=int, default=1024)
@click.option("--repeats", type=int, default=25)
def main(level: Level, threads: int, vocabulary: int, hidden: int, repeats: int) -> None:
    native = load_library(level)
    native.set_threads(threads)
    torch.manual_seed(0)
    matrix, screen = head(native, torch.randn(vocabulary, hidden).bfloat16())
    held = f"head {matrix.nbytes / 1e6:.0f} MB, in int8 {screen.nbytes / 1e6:.0f} MB"
    print(f"{level}, {threads} threads, {vocabulary} x {hidden}, {held}\nrows  all products ms  with a look ms  time")
    for rows in _ROWS:
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeats):
            x = torch.randn(rows, hidden).bfloat16()
            found = []
            for run, taken in zip((matrix.argmax, lambda x: matrix.argmax(x, screen.struct)), times, strict=True):
                begin = time.perf_counter()
                found.append(run(x)[0])
                taken.append(time.perf_counter() - begin)
            if not torch.equal(*found):
                raise click.ClickException("the tokens differ")
        whole, look = (statistics.median(taken) * 1e3 for taken in times)
        print(f"{rows:4} {whole:16.2f} {look:15.2f} {look / whole - 1:+5.0%}")
    native.set_threads(1)


if __name__ == "__main__":
    main()
