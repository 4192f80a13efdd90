"""Measure what steps and the ways between processes cost on a real cluster, and fit the simulator's cost model.

Every shape is known here without asking the scheduler, because the requests are chosen so that no prompt is ever cut
into chunks: prompts alone, several at once, prompts onto a cached prefix, batches that only decode, and one short
prompt beside a batch.
Times come from the stamps that travel with each batch (CLOCK_MONOTONIC of one machine). Means, not medians, make the
costs: what a run takes is made of all steps and all ways, the slow ones too.
"""

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from scipy.optimize import nnls

from bench.clusters import machine
from bench.replay import greedy
from common.config import SchedulerConfig
from common.connection import Connection, Row
from common.messages import Finish
from scheduler_proc.cost_model import Costs, LinearCost, Overheads, StepWork
from scheduler_proc.workload import Text, Vocabulary

PLANNED, RECEIVED, _STARTED, READY, COMMITTED = range(5)  # of the stamps; the client's own comes last
BIN = 10  # decode steps averaged into one point of the fit


@dataclass(slots=True)
class Samples:
    """What was measured, in seconds."""

    steps: dict[tuple[object, ...], list[tuple[StepWork, float]]] = field(default_factory=dict)  # by point of the plan
    # steps that only decode, by batch and whether a request came meanwhile; the requests that came
    beside: list[tuple[int, bool, float]] = field(default_factory=list)
    comers: list[int] = field(default_factory=list)
    submit: list[float] = field(default_factory=list)
    submit_busy: list[float] = field(default_factory=list)  # while the worker computes
    plan: list[float] = field(default_factory=list)
    result: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)
    turnaround: list[float] = field(default_factory=list)
    deliver: list[tuple[int, float]] = field(default_factory=list)  # rows, seconds

    def __add__(self, other: "Samples") -> "Samples":
        joint = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "steps"}
        keys = self.steps | other.steps
        return Samples(steps={k: self.steps.get(k, []) + other.steps.get(k, []) for k in keys}, **joint)

    def slower_than(self, other: "Samples") -> float:
        """By how much the same points took longer here than there: the median over them, 0.1 for 10 %."""
        ratios = [_median(taken) / _median(other.steps[key]) for key, taken in self.steps.items() if key in other.steps]
        return statistics.median(ratios) - 1

    def step(self, point: tuple[object, ...], work: StepWork, stamps: Sequence[int]) -> None:
        self.steps.setdefault(point, []).append((work, (stamps[READY] - stamps[RECEIVED]) / 1e9))
        self.result.append((stamps[COMMITTED] - stamps[READY]) / 1e9)
        self.deliver.append((work.samples, (stamps[-1] - stamps[COMMITTED]) / 1e9))


@dataclass(slots=True)
class _Seen:
    """One step as the client saw it: its stamps, and (request, output position) of its rows."""

    stamps: list[int]
    cached: int  # of its first row's prompt
    rows: list[tuple[int, int]] = field(default_factory=list)


def _collect(connection: Connection, positions: dict[int, int]) -> Iterator[_Seen]:
    """Steps in order, each once it is complete, until all requests in `positions` have ended; to them, requests may
    be added meanwhile. `positions` holds the output tokens that each has."""
    last: _Seen | None = None
    while positions:
        for row in connection.poll(10):
            if not isinstance(row, Row):
                raise SystemExit(f"refused: {row.problem}")
            if last is None or last.stamps[PLANNED] != row.times[PLANNED]:
                if last is not None:
                    yield last
                last = _Seen([*row.times, row.received_ns], row.cached_tokens)
            last.stamps[-1] = row.received_ns
            last.rows.append((row.rid, positions[row.rid]))
            positions[row.rid] += 1
            if row.finish is not Finish.NONE:
                del positions[row.rid]
        if not positions and last is not None:
            yield last  # to which a request may be added as to any other
            last = None


class Calibration:
    """A fixed plan of measurements; `run` goes through it once."""

    def __init__(
        self,
        connection: Connection,
        config: SchedulerConfig,
        context_len: int,
        kv_tokens: int,
        vocabulary: Vocabulary,
    ):
        self._connection = connection
        self._context_len = context_len
        self._kv_tokens = kv_tokens
        self._chunk_tokens = config.chunk_tokens
        self._budget = config.max_batch_tokens
        self._vocabulary = vocabulary
        self._numbers = itertools.count()
        self._rng = random.Random(0)
        self.samples = Samples()

    def run(self, batches: Sequence[int], decode_steps: int) -> None:
        most = min(self._context_len - decode_steps, self._budget)
        for length in _ladder(8, most):
            for _ in range(3):
                self.prompts(1, length)
        for count, length in itertools.product((2, 4), _ladder(16, self._budget // 4)):
            self.prompts(count, min(length, most))
        for prefix in _ladder(128, most // 2):
            self.extensions(prefix, _ladder(16, most // 2))
        for batch in batches:
            # while the last prompts are prefilled, chunk by chunk, the first requests decode already
            room = min(self._context_len, self._kv_tokens * 3 // 4 // batch) - decode_steps
            longest = int(room / (1 + batch / self._chunk_tokens))
            for short, long in ((8, 16), (8, longest // 2), (8, longest), (longest * 3 // 4, longest)):
                self.decodes(batch, short, long, decode_steps + batch * long // self._chunk_tokens)
        for batch, length in itertools.product(batches, _ladder(16, self._chunk_tokens)):
            self.mixed(batch, length, 4)

    def _prompt(self, length: int) -> Sequence[int]:
        return self._vocabulary.tokens(Text(next(self._numbers), length))

    def prompts(self, count: int, length: int) -> None:
        """So many prompts at once, nothing else: whole prompts in one or more steps."""
        params, positions, sent = greedy(1), {}, {}
        prompts = [self._prompt(length) for _ in range(count)]
        for prompt in prompts:
            now = _now()
            rid = self._connection.submit(prompt, params)
            positions[rid], sent[rid] = 0, now
        for i, step in enumerate(_collect(self._connection, positions)):
            rows = len(step.rows)
            work = StepWork(rows * length, rows, rows, rows, rows * length, rows * length * (length + 1) // 2, 0)
            self.samples.step(("prompts", rows, length), work, step.stamps)
            if count == 1 and i == 0:
                self.samples.submit.append((step.stamps[PLANNED] - sent[step.rows[0][0]]) / 1e9)
                self.samples.plan.append((step.stamps[RECEIVED] - step.stamps[PLANNED]) / 1e9)

    def extensions(self, prefix: int, lengths: Sequence[int]) -> None:
        """Prompts that begin with a cached prefix, one after another: a chunk that reads what is there already, as
        every chunk of a long prompt but the first does."""
        shared = Text(next(self._numbers), prefix)
        start = self._vocabulary.tokens(shared)
        for length in (0, *lengths):
            prompt = start + self._vocabulary.tokens(Text(next(self._numbers), length or 1))
            positions = {self._connection.submit(prompt, greedy(1)): 0}
            for step in _collect(self._connection, positions):
                if step.cached == prefix and length:
                    pairs = length * prefix + length * (length + 1) // 2
                    work = StepWork(length, 1, 1, 1, prefix + length, pairs, 0)
                    self.samples.step(("extends", prefix, length), work, step.stamps)

    def decodes(self, batch: int, shortest: int, longest: int, tokens: int) -> None:
        """Requests of evenly spread lengths that decode together; steps with a prefill in them are left out."""
        params = greedy(tokens)
        lengths = [longest - (longest - shortest) * i // batch for i in range(batch)]
        submitted = [(self._connection.submit(self._prompt(length), params), length) for length in lengths]
        length_of = dict(submitted)
        steps = [
            step
            for step in _collect(self._connection, dict.fromkeys(length_of, 0))
            if len(step.rows) == batch and all(position > 0 for _, position in step.rows)
        ]
        for step in steps:
            contexts = [length_of[rid] + position for rid, position in step.rows]
            context = sum(contexts)
            work = StepWork(batch, batch, 0, batch, context, context, batch * max(contexts))
            self.samples.step(("decodes", batch, shortest, longest, step.rows[0][1] // BIN), work, step.stamps)
        in_time = 2e9 * statistics.median(self.samples.plan)
        for before, after in itertools.pairwise(steps):
            if before.stamps[READY] - after.stamps[PLANNED] > in_time:  # its plan was there before the worker was free
                self.samples.turnaround.append((after.stamps[RECEIVED] - before.stamps[READY]) / 1e9)
        for before, after in zip(steps, steps[2:], strict=False):
            if after.stamps[PLANNED] >= before.stamps[COMMITTED]:
                self.samples.commit.append((after.stamps[PLANNED] - before.stamps[COMMITTED]) / 1e9)

    def mixed(self, batch: int, length: int, times: int) -> None:
        """A batch that decodes, and one prompt after another of a single chunk that comes at any moment beside it."""
        start = 16
        prompts = [self._prompt(start) for _ in range(batch)]
        extra = [self._prompt(length) for _ in range(times)]
        tokens = 16 + batch * start // self._chunk_tokens + 8 * times
        running = [self._connection.submit(prompt, greedy(tokens)) for prompt in prompts]
        positions = dict.fromkeys(running, 0)
        chunk, sent, since = -1, 0, 0
        before: _Seen | None = None
        for step in _collect(self._connection, positions):
            seen = dict(step.rows)
            decoding = [position for rid, position in step.rows if rid != chunk]
            contexts = [start + position for position in decoding]
            context, padded = sum(contexts), len(decoding) * max(contexts, default=0)
            steady = len(decoding) == batch and min(decoding) > 0
            if steady and chunk not in seen:
                # all steps from the decision to send on: those that were running then would be the longer ones
                self.samples.beside.append((batch, chunk >= 0, (step.stamps[READY] - step.stamps[RECEIVED]) / 1e9))
            if chunk in seen:
                if steady and before is not None:
                    pairs = context + length * (length + 1) // 2
                    work = StepWork(batch + length, batch + 1, 1, batch + 1, context + length, pairs, padded)
                    self.samples.step(("mixed", batch, length), work, step.stamps)
                    self.samples.comers.append(1)
                    # it reached the scheduler between these two plans, and was sent at any moment between others
                    between = (before.stamps[PLANNED] + step.stamps[PLANNED]) / 2
                    self.samples.submit_busy.append((between - sent) / 1e9)
                chunk, since = -1, 0
            since += 1
            if (
                chunk < 0
                and extra
                and len(seen) >= batch
                and min(seen.values()) > 2
                and since > 2
                and before is not None
            ):
                period = step.stamps[READY] - before.stamps[READY]
                time.sleep(self._rng.random() * period / 1e9)
                prompt, sent = extra.pop(), _now()
                chunk = self._connection.submit(prompt, greedy(1))
                positions[chunk] = 0
            before = step


def _median(taken: Sequence[tuple[StepWork, float]]) -> float:
    return statistics.median(seconds for _, seconds in taken)


def _mean(seconds: Sequence[float]) -> float:
    """Without pauses of the machine: more than five times the median. 0 when nothing was measured."""
    if not seconds:
        return 0.0
    limit = 5 * statistics.median(seconds)
    return statistics.fmean(s for s in seconds if s <= limit)


def _longer(seconds: Sequence[float], than: float) -> float:
    """By how much the mean of `seconds` is more; 0 when they scatter too much to say, as between long steps."""
    if len(seconds) < 2 or statistics.stdev(seconds) / len(seconds) ** 0.5 > than:
        return 0.0
    return max(0.0, statistics.fmean(seconds) - than)


def _lengthened(samples: Samples) -> float:
    """By how much a request that comes lengthens the steps that it comes beside, against others of the same batch; 0
    when that is less than twice its standard error, as between long steps."""
    longer = variance = 0.0
    for batch in {batch for batch, *_ in samples.beside}:
        calm, busy = ([s for b, came, s in samples.beside if b == batch and came is which] for which in (False, True))
        if len(calm) > 1 and len(busy) > 1:
            longer += len(busy) * (statistics.fmean(busy) - statistics.fmean(calm))
            variance += len(busy) * statistics.variance(busy)
            variance += len(busy) ** 2 / len(calm) * statistics.variance(calm)
    return longer / len(samples.comers) if longer > 2 * variance**0.5 else 0.0


def _ladder(low: int, high: int) -> list[int]:
    """Powers of two times `low` up to `high`, and `high`."""
    steps = itertools.takewhile(lambda n: n < high, (low << i for i in itertools.count()))
    return [*steps, high]


def _now() -> int:
    return time.monotonic_ns()


def fit(samples: Samples, model: str) -> tuple[Costs, list[tuple[str, float, float]]]:
    """The costs, and for each kind and size of step what was measured and what the fit says, in seconds.

    Non-negative least squares over the means of the points, each divided by its expected time, so that short steps
    count as much as long ones. Means and not medians, because throughput is made of all steps, the slow ones too; but
    a sample of more than three times its point's median is a pause of the machine and is left out.
    """
    points = []
    for key, taken in sorted(samples.steps.items(), key=lambda item: str(item[0])):
        limit = 3 * _median(taken)
        kept = [(work, seconds) for work, seconds in taken if seconds <= limit]
        features = np.mean([LinearCost.features(work) for work, _ in kept], axis=0)
        points.append((key, features, statistics.fmean(seconds for _, seconds in kept), len(kept)))
    times = np.array([seconds for _, _, seconds, _ in points])
    counts = np.sqrt([count for *_, count in points])
    matrix = np.array([features for _, features, _, _ in points])
    scale = matrix.max(axis=0)  # so that the columns are comparable numbers
    expected = times
    for _ in range(4):  # dividing by what was measured would make samples that are too short count most
        weights = counts / expected
        solution, _ = nnls(matrix / scale * weights[:, None], times * weights)
        expected = matrix @ (solution / scale)
    coefficients = solution / scale
    cost = LinearCost(*map(float, coefficients))
    by_rows: dict[int, list[float]] = {}
    for rows, seconds in samples.deliver:
        by_rows.setdefault(rows, []).append(seconds)
    slope, intercept = statistics.linear_regression(list(by_rows), [_mean(taken) for taken in by_rows.values()])
    submit = _mean(samples.submit)
    overheads = Overheads(
        submit_s=submit,
        submit_busy_s=_longer(samples.submit_busy, submit),
        plan_s=_mean(samples.plan),
        turnaround_s=_mean(samples.turnaround),
        result_s=_mean(samples.result),
        commit_s=_mean(samples.commit),
        deliver_s=max(0.0, intercept),
        deliver_row_s=max(0.0, slope),
        arrival_s=_lengthened(samples),
    )
    shown = [(" ".join(map(str, key)), seconds, float(features @ coefficients)) for key, features, seconds, _ in points]
    return Costs(cost, overheads, f"{model} on {machine()}"), shown
