"""Histograms that travel as flat counters in Stats, and what is measured with them.

A histogram named `tokenizer.ttft` travels as `tokenizer.ttft/0`, `/1`, ... (how many values fell into each bucket, the
last being everything above all bounds) and `tokenizer.ttft/sum` (in millionths). Counters only grow, so the difference
of two answers is what happened in between.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

SUM_UNIT = 1_000_000

# The bounds are those of vLLM, so that dashboards made for it fit. Times are in seconds.
_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_PER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_TOKENS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))
BOUNDS: Mapping[str, tuple[float, ...]] = {
    "tokenizer.ttft": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
        160.0, 640.0, 2560.0,
    ),
    "tokenizer.itl": _PER_TOKEN,
    "tokenizer.token_time": _PER_TOKEN,
    "tokenizer.e2e": _LATENCY,
    "tokenizer.prefill": _LATENCY,
    "tokenizer.decode": _LATENCY,
    "tokenizer.inference": _LATENCY,
    "tokenizer.prompt_tokens": _TOKENS,
    "tokenizer.output_tokens": _TOKENS,
    "tokenizer.longest_answer": _TOKENS,
    "tokenizer.max_tokens": _TOKENS,
    "tokenizer.computed_tokens": _TOKENS,
    "tokenizer.choices": (1.0, 2.0, 5.0, 10.0, 20.0),
    "scheduler.queue": _LATENCY,
    "scheduler.preemptions": (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0),
    "scheduler.step": (
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    ),
    "scheduler.step_tokens": (
        1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
    ),
}  # fmt: skip


class Histogram:
    """Counts values by bucket: bucket i holds what is at most `bounds[i]` and more than the bound before it."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]):
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += round(value * SUM_UNIT) * times

    def flat(self, name: str) -> dict[str, int]:
        """As counters, by name."""
        return {f"{name}/{i}": count for i, count in enumerate(self._counts)} | {f"{name}/sum": self._sum}


def histogram(name: str) -> Histogram:
    """An empty one with the bounds for that name."""
    return Histogram(BOUNDS[name])


def cumulative(values: Mapping[str, int], name: str) -> tuple[list[tuple[float, int]], float] | None:
    """What Stats say of a histogram as Prometheus wants it: pairs of a bound and how many values are at most that (the
    last bound is infinity), and the sum of all values. None where they say nothing."""
    if f"{name}/sum" not in values:
        return None
    pairs, total = [], 0
    for i, bound in enumerate((*BOUNDS[name], float("inf"))):
        total += values.get(f"{name}/{i}", 0)
        pairs.append((bound, total))
    return pairs, values[f"{name}/sum"] / SUM_UNIT
