"""What a GPU can do at most, measured: how fast it copies memory, how fast it multiplies bfloat16 matrices."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

_HEAD_START = 2_000_000  # cycles, a millisecond at two gigahertz


@dataclass(frozen=True, slots=True)
class Limits:
    """`bandwidth` in bytes per second, read and written; `matrix_rate` in floating-point operations per second."""

    bandwidth: float
    matrix_rate: float


def seconds(run: Callable[[], object], repeats: int = 20, *, queued: bool = False) -> float:
    """Median time of a call on the GPU, by events, after three warm-up calls. With `queued`, the GPU is kept busy until
    its kernels have been launched, which takes the host longer than small ones run."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if queued:
            torch.cuda._sleep(_HEAD_START)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure() -> Limits:
    """The limits of the current GPU."""
    limits = Limits(_bandwidth(), _matrix_rate())
    torch.cuda.empty_cache()
    return limits


def _bandwidth() -> float:
    source = torch.randn(2**30, dtype=torch.float32, device="cuda")  # 4 GiB
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def _matrix_rate(n: int = 8192) -> float:
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * n**3 / seconds(lambda: a @ b)
