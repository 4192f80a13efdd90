"""What a run was like, in numbers: a report from records, as a dictionary and as text."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Self

from scheduler_proc.simulation import Record

NS = 1e-9
LATENCIES = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "queueing_s")


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds. Percentiles are interpolated linearly between ranks; all are 0 when there is nothing to count."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, ns: Iterable[int]) -> Self:
        values = sorted(ns)
        if not values:
            return cls()
        return cls(sum(values) / len(values) * NS, *(_percentile(values, q) * NS for q in (0.5, 0.9, 0.99)))


def _percentile(values: Sequence[int], q: float) -> float:
    at = (len(values) - 1) * q
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


PARTS = ("plan", "take", "compute", "commit", "deliver")


def _parts(done: Sequence[Record]) -> dict[str, float]:
    """The mean TTFT in the parts that PARTS names."""
    ways = [(r.submitted, *r.marks, r.first) for r in done]
    gaps = [[after - before for before, after in pairwise(way)] for way in ways]
    return {name: sum(gap) / len(gap) * NS for name, gap in zip(PARTS, zip(*gaps, strict=True), strict=False)}


@dataclass(frozen=True, slots=True)
class Report:
    """Times in seconds. `duration_s` runs from the first request sent to the last token received.

    `ttft_s` and `e2e_s` are from sending to the first and the last token, `itl_s` between tokens, `tpot_s` a request's
    mean of them, `queueing_s` from arrival at the scheduler until the first step is planned with it. `ttft_parts_s` are
    means: until the step with the first token is planned, until the worker takes it, until its tokens are ready, until
    the scheduler has them, until the client has them.
    """

    requests: int
    finished: int
    refused: int
    first_refusal: str
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    hit_rate: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: Latency
    itl_s: Latency
    tpot_s: Latency
    e2e_s: Latency
    queueing_s: Latency
    ttft_parts_s: dict[str, float]

    @classmethod
    def of(cls, records: Sequence[Record]) -> Self:
        done = [r for r in records if r.finished]
        refusals = [r.problem for r in records if r.problem]
        prompt, output = sum(r.prompt_tokens for r in done), sum(len(r.answer) for r in done)
        cached = sum(r.cached for r in done)
        duration = (max(r.last for r in done) - min(r.submitted for r in records)) * NS if done else 0.0
        return cls(
            requests=len(records),
            finished=len(done),
            refused=len(refusals),
            first_refusal=refusals[0] if refusals else "",
            duration_s=duration,
            prompt_tokens=prompt,
            cached_tokens=cached,
            output_tokens=output,
            hit_rate=cached / prompt if prompt else 0.0,
            output_tokens_per_s=output / duration if duration else 0.0,
            total_tokens_per_s=(prompt + output) / duration if duration else 0.0,
            ttft_s=Latency.of(r.first - r.submitted for r in done),
            itl_s=Latency.of(gap for r in done for gap in r.gaps),
            tpot_s=Latency.of(round((r.last - r.first) / (len(r.answer) - 1)) for r in done if len(r.answer) > 1),
            e2e_s=Latency.of(r.last - r.submitted for r in done),
            queueing_s=Latency.of(r.admitted - r.arrived for r in done if r.admitted >= 0),
            ttft_parts_s=_parts(done),
        )


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """A report, and what only the simulator sees. `kv_usage_*` are shares of the pool held by running requests,
    weighted by time; `speedup` is simulated over real time. Only `wall_s` and `speedup` differ from run to run."""

    report: Report
    steps: int
    mean_batch: float
    mean_step_tokens: float
    worker_busy: float
    preemptions: int
    evicted_pages: int
    copied_pages: int
    offloaded_pages: int
    loaded_pages: int
    discarded_tokens: int
    kv_usage_mean: float
    kv_usage_peak: float
    wall_s: float

    @property
    def speedup(self) -> float:
        return self.report.duration_s / self.wall_s if self.wall_s else 0.0

    def as_dict(self) -> dict[str, object]:
        values = asdict(self)
        return {**values.pop("report"), **values, "speedup": self.speedup}


def as_text(r: SimulationReport) -> str:
    """Several lines for one run."""
    b = r.report
    lines = [
        f"requests      {b.finished} finished of {b.requests}" + (f", {b.refused} refused" if b.refused else ""),
        f"tokens        {b.prompt_tokens} prompt ({b.hit_rate:.1%} from the cache), {b.output_tokens} output",
        f"throughput    {b.output_tokens_per_s:.1f} output tokens/s, {b.total_tokens_per_s:.1f} tokens/s in all",
        f"steps         {r.steps}, {r.mean_batch:.1f} requests and {r.mean_step_tokens:.1f} tokens each, "
        f"worker busy {r.worker_busy:.1%}",
        f"KV cache      {r.kv_usage_mean:.1%} in use on average, {r.kv_usage_peak:.1%} at most, "
        f"{r.evicted_pages} pages evicted, {r.copied_pages} copied",
        *([f"host tier     {r.offloaded_pages} pages down, {r.loaded_pages} up"] if r.offloaded_pages else []),
        f"preemptions   {r.preemptions}, {r.discarded_tokens} tokens discarded",
        f"time          {b.duration_s:.3f} s simulated in {r.wall_s:.3f} s: {r.speedup:.0f} times real time",
        "",
        f"{'milliseconds':<12}  {'mean':>10} {'p50':>10} {'p90':>10} {'p99':>10}",
    ]
    if b.first_refusal:
        lines.insert(1, f"refusal       {b.first_refusal}")
    for name in LATENCIES:
        latency: Latency = getattr(b, name)
        numbers = " ".join(f"{1e3 * v:10.2f}" for v in (latency.mean, latency.p50, latency.p90, latency.p99))
        lines.append(f"{name.removesuffix('_s'):<12}  {numbers}")
    return "\n".join(lines)


def as_table(names: Sequence[str], rows: Sequence[tuple[Sequence[str], SimulationReport]]) -> str:
    """One line per run: the values of the compared options `names`, then the report."""
    head = [
        *names, "out tok/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "E2E p99", "queue p99",
        "hits", "preempt", "batch", "KV peak", "time, s", "x real",
    ]  # fmt: skip
    table = [head]
    for values, r in rows:
        b = r.report
        ms = (b.ttft_s.p50, b.ttft_s.p99, b.itl_s.p50, b.itl_s.p99, b.e2e_s.p99, b.queueing_s.p99)
        latencies = [f"{1e3 * v:.1f}" for v in ms]
        counts = [f"{b.hit_rate:.1%}", str(r.preemptions), f"{r.mean_batch:.1f}", f"{r.kv_usage_peak:.1%}"]
        ends = [f"{b.duration_s:.2f}", f"{r.speedup:.0f}"]
        table.append([*values, f"{b.output_tokens_per_s:.1f}", *latencies, *counts, *ends])
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return "\n".join([*lines, "", "latencies in milliseconds"])
