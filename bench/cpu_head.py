"""What a look in int8 saves of an output head when tokens are greedy, and when top_k keeps few, in turn in one run.

    python -m bench.cpu_head
    python -m bench.cpu_head --level generic --vocabulary 248320

Weights and hidden states are normally distributed, logits with a standard deviation of 2.
"""

import statistics
import time
from collections.abc import Callable

import click
import torch

from worker_proc.cpu.compressed import CompressedMatrix
from worker_proc.cpu.features import LEVELS, Level, cpu_features
from worker_proc.cpu.library import NativeLibrary, load_library
from worker_proc.cpu.linear import Finish, PackedMatrix
from worker_proc.cpu.machine import num_cpus
from worker_proc.cpu.matrices import MatrixForm
from worker_proc.cpu.memory import HugePages
from worker_proc.cpu.screen import HeadScreen, screen_scheme

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_TOP_KS = (1, 20, 50, 100)
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


def _take_turns(
    matrix: PackedMatrix, screen: HeadScreen, x: torch.Tensor, every: torch.Tensor, some: torch.Tensor
) -> list[float]:
    """Seconds for the likeliest tokens without and with a look, for all logits, and for those that each top_k keeps."""
    times: list[float] = []

    def timed(run: Callable[[], torch.Tensor]) -> torch.Tensor:
        begin = time.perf_counter()
        made = run()
        times.append(time.perf_counter() - begin)
        return made

    if not torch.equal(timed(lambda: matrix.argmax(x)[0]), timed(lambda: matrix.argmax(x, screen.struct)[0])):
        raise click.ClickException("the tokens differ")
    timed(lambda: matrix.linear(x, Finish.STORE_FLOAT, every))
    for count in _TOP_KS:
        screen.rest_of_filtered[:] = torch.tensor([0, 1])  # a look, whether or not the last one paid
        params = torch.tensor([[0.7], [count], [0.95], [0.0]], dtype=torch.float64).repeat(1, len(x))
        timed(lambda params=params: matrix.filtered(x, screen.struct, params, some))  # type: ignore[misc]
        kept = every.topk(count)
        if not torch.equal(some.gather(1, kept.indices), kept.values):
            raise click.ClickException("the largest logits differ")
    return times


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
    matrix, screen = head(native, (2 * hidden**-0.5 * torch.randn(vocabulary, hidden)).bfloat16())
    held = f"head {matrix.nbytes / 1e6:.0f} MB, in int8 {screen.nbytes / 1e6:.0f} MB"
    print(f"{level}, {threads} threads, {vocabulary} x {hidden}, {held}; ms")
    print("rows  likeliest  with a look  all logits" + "".join(f"{f'top_k {count}':>11}" for count in _TOP_KS))
    for rows in _ROWS:
        logits = torch.zeros(2, rows, vocabulary)
        taken = [_take_turns(matrix, screen, torch.randn(rows, hidden).bfloat16(), *logits) for _ in range(repeats)]
        one, look, every, *filtered = (statistics.median(times) * 1e3 for times in zip(*taken, strict=True))
        print(f"{rows:4} {one:10.2f} {look:12.2f} {every:11.2f}" + "".join(f"{some:11.2f}" for some in filtered))
    native.set_threads(1)


if __name__ == "__main__":
    main()
