"""A discrete-event simulation around the scheduler: a cost model in place of workers, a workload in place of clients.

The loop does what `event_loop.py` does, in the same order: results, requests, then as many plans as may be in flight.
Nothing here decides anything about requests; all of that is the scheduler's own code.

Modelled: the worker, which executes plans in order, one at a time, and the time on every way (`Overheads`). Not
modelled: that the processes around the worker can fall behind when their own work takes longer than a step.
"""

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from common.codec import Message
from common.fields import IntArray
from common.messages import AddRequest, RequestError, StepPlan, StepResult, TokenBatch, ints
from common.sampling_params import DrawParams
from scheduler_proc.cost_model import NO_OVERHEADS, CostModel, Overheads, StepWork
from scheduler_proc.invariants import check
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.workload import SECOND, Submission, Traffic, Vocabulary

STOP_TOKEN = 0  # what the simulated model says when an answer ends before its max_tokens


class Stuck(RuntimeError):
    """Requests are left and nothing will ever happen again: a live-lock of the scheduler."""


@dataclass(slots=True)
class Record:
    """What happened to one request; nanoseconds, -1 where it has not happened. The client's clock but for
    `arrived` and `admitted`, which are the scheduler's."""

    number: int
    prompt_tokens: int
    submitted: int
    arrived: int = -1
    admitted: int = -1
    first: int = -1
    last: int = -1
    cached: int = -1
    answer: IntArray = field(default_factory=ints)
    gaps: list[int] = field(default_factory=list)  # between tokens
    finished: bool = False
    problem: str = ""  # why it was refused

    def token(self, token: int, when: int) -> None:
        if self.first < 0:
            self.first = when
        else:
            self.gaps.append(when - self.last)
        self.last = when
        self.answer.append(token)


@dataclass(slots=True)
class Meter:
    """Sums over steps."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    busy: int = 0  # ns that the worker computed
    pages: int = 0  # page * ns in use: held by running requests, not merely cached
    most_pages: int = 0

    def step(self, work: StepWork, duration: int, pages: int) -> None:
        self.steps += 1
        self.rows += work.rows
        self.tokens += work.tokens
        self.busy += duration
        self.pages += pages * duration
        self.most_pages = max(self.most_pages, pages)


class _Event(NamedTuple):
    when: int
    order: int
    # a request or a step's result comes to the scheduler, or a request's number comes back to the client
    what: AddRequest | StepResult | int


class Simulation:
    """One run. `check_every` steps the scheduler's invariants are checked; 0 is never."""

    def __init__(
        self,
        scheduler: Scheduler,
        traffic: Traffic,
        vocabulary: Vocabulary,
        cost: CostModel,
        overheads: Overheads = NO_OVERHEADS,
        check_every: int = 0,
    ):
        self.scheduler = scheduler
        self.records: dict[int, Record] = {}
        self.meter = Meter()
        self._traffic = traffic
        self._vocabulary = vocabulary
        self._cost = cost
        self._submit = _ns(overheads.submit_s)
        self._plan = _ns(overheads.plan_s)
        self._turnaround = _ns(overheads.turnaround_s)
        self._result = _ns(overheads.result_s)
        self._commit = _ns(overheads.commit_s)
        self._deliver = _ns(overheads.deliver_s)
        self._deliver_row = _ns(overheads.deliver_row_s)
        self._check_every = check_every
        self._events: list[_Event] = []
        self._order = 0
        self._worker_free = 0
        self._delivered = 0  # when the last batch reached the client: batches do not overtake each other
        self._ends: dict[int, int] = {}  # output tokens after which a request's answer ends by itself

    def run(self) -> None:
        """Until everything that the workload sends has ended. Raises Stuck when that cannot be."""
        while self._events or self._traffic.next_due is not None:
            self._turn(self._next_time())
        if not self._traffic.done:
            left = [r.number for r in self.records.values() if not r.finished and not r.problem]
            raise Stuck(f"{len(left)} requests will never end, the first is {left[0] if left else '?'}")

    def _next_time(self) -> int:
        times = [self._events[0].when] if self._events else []
        if self._traffic.next_due is not None:
            times.append(self._traffic.next_due)
        return min(times)

    def _turn(self, now: int) -> None:
        """Everything that happens at one moment."""
        results: list[StepResult] = []
        requests: list[AddRequest] = []
        while self._events and self._events[0].when <= now:
            what = heapq.heappop(self._events).what
            if isinstance(what, StepResult):
                results.append(what)
            elif isinstance(what, AddRequest):
                requests.append(what)
            else:
                record = self.records[what]
                self._traffic.ended(what, record.answer if record.finished else None, now)
        for submission in self._traffic.due(now):
            self._send(submission, now)
        if not results and not requests:
            return
        for result in results:
            self._take(self.scheduler.commit(result, now), now)
        for request in requests:
            self.records[request.rid].arrived = now
            self._take(self.scheduler.handle(request, now), now)
        sent = now + (self._commit if results else 0) + self._plan
        while (plan := self.scheduler.plan(now)) is not None:
            self._execute(plan, now, sent)

    def _send(self, submission: Submission, now: int) -> None:
        number = submission.number
        self.records[number] = Record(number, len(submission.prompt), now)
        if submission.output_tokens < submission.max_tokens:
            self._ends[number] = submission.output_tokens
        request = AddRequest(
            rid=number,
            prompt=submission.prompt,
            max_tokens=submission.max_tokens,
            stop_token_ids=ints(STOP_TOKEN),
            draw=DrawParams(),
            salt=submission.salt,
            priority=submission.priority,
        )
        self._push(now + self._submit, request)

    def _execute(self, plan: StepPlan, now: int, arrives: int) -> None:
        """The worker runs a plan when it has it and is free."""
        scheduler = self.scheduler
        step = scheduler.in_flight[-1]
        context, pairs = step.shape.context, 0
        for slot, length in zip(plan.chunk_slots, plan.chunk_lens, strict=True):
            request = scheduler.slots[slot]
            assert request is not None
            pairs += length * request.cached_len - length * (length - 1) // 2 - request.cached_len
        pairs += context  # a decode's one query reads its context; the chunks' context was taken off above
        for slot in plan.enter_slots:
            request = scheduler.slots[slot]
            assert request is not None
            record = self.records[request.rid]
            if record.admitted < 0:
                record.admitted = now
                record.cached = request.cached_prompt
        chunks, sampled = len(plan.chunk_slots), len(step.sampled)
        decoding = step.rows[chunks:]
        padded = len(decoding) * max((r.cached_len for r in decoding), default=0)
        work = StepWork(step.shape.tokens, len(step.rows), chunks, sampled, context, pairs, padded)
        duration = _ns(self._cost.seconds(work))
        started = max(arrives, self._worker_free + self._turnaround) if self.meter.steps else arrives
        ready = self._worker_free = started + duration
        pool = scheduler.kv.pool
        self.meter.step(work, duration, pool.num_pages - scheduler.kv.available)
        tokens = ints(*(self._sample(r.rid, r.generated - 1) for r in step.sampled))
        times = array("q", (started, started, ready))
        self._push(ready + self._result, StepResult(plan.step_id, plan.epoch, plan.group, tokens, times))
        if self._check_every and self.meter.steps % self._check_every == 0:
            check(scheduler)

    def _sample(self, rid: int, position: int) -> int:
        """The token of a request's output at `position`."""
        if position + 1 == self._ends.get(rid):
            return STOP_TOKEN
        return self._vocabulary.answer(rid, position)

    def _take(self, messages: Sequence[Message], now: int) -> None:
        """Deliver what the scheduler says to the client."""
        for msg in messages:
            if isinstance(msg, TokenBatch):
                when = max(self._delivered, now + self._deliver + self._deliver_row * len(msg.rids))
                self._delivered = when
                at = 0
                for i, rid in enumerate(msg.rids):
                    record = self.records[rid]
                    for token in msg.token_ids[at : at + msg.counts[i]]:
                        record.token(token, when)
                    at += msg.counts[i]
                    if msg.finish[i]:
                        record.finished = True
                        self._push(when, rid)
            elif isinstance(msg, RequestError):
                self.records[msg.rid].problem = msg.problem
                self._push(now + self._deliver, msg.rid)

    def _push(self, when: int, what: AddRequest | StepResult | int) -> None:
        self._order += 1
        heapq.heappush(self._events, _Event(when, self._order, what))


def _ns(seconds: float) -> int:
    return round(seconds * SECOND)
