"""A discrete-event simulation around the scheduler: a cost model in place of workers, a workload in place of clients.

The loop does what `event_loop.py` does, in the same order: results, requests, then as many plans as may be in flight.
Nothing here decides anything about requests; all of that is the scheduler's own code.

Modelled: the worker, which executes plans in order, one at a time, and the time on every way (`Overheads`). Not
modelled: that the processes around the worker can fall behind when their own work takes longer than a step.
"""

import heapq
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from common.codec import Message
from common.fields import IntArray
from common.messages import AddRequest, RequestError, StepPlan, StepResult, TokenBatch, ints
from common.sampling_params import DrawParams
from scheduler_proc.cost_model import NO_OVERHEADS, CostModel, Overheads, StepWork
from scheduler_proc.invariants import check
from scheduler_proc.scheduler import GROUP, Scheduler
from scheduler_proc.steady import Steady
from scheduler_proc.step import Step
from scheduler_proc.workload import SECOND, Submission, Traffic, Vocabulary

FOREVER = 2**63
LEAST_LEAP = 3  # steps: looking for fewer takes longer than they do
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
    marks: tuple[int, ...] = ()  # of the step with the first token: planned, taken by the worker, ready, committed
    finished: bool = False
    problem: str = ""  # why it was refused

    def token(self, token: int, when: int, times: Sequence[int], start: int = 0) -> None:
        """A token comes to the client; `times` are its batch's, on a clock that showed `start` at the beginning."""
        if self.first < 0:
            self.first = when
            self.marks = tuple(times[i] - start for i in (0, 1, 3, 4))
        else:
            self.gaps.append(when - self.last)
        self.last = when
        self.answer.append(token)

    def several(self, tokens: IntArray, whens: Sequence[int], between: Sequence[int]) -> None:
        """Further tokens, one at each of `whens`; `between` are the differences of those."""
        self.gaps.append(whens[0] - self.last)
        self.gaps.extend(between)
        self.last = whens[-1]
        self.answer.extend(tokens)


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
    """One run. `check_every` steps the scheduler's invariants are checked; 0 is never. With `leaps`, and nothing to
    check, steps in a row that only decode the same requests are taken together (steady.py): the same, sooner. A page
    takes `transfer_s` to the host tier or back."""

    def __init__(
        self,
        scheduler: Scheduler,
        traffic: Traffic,
        vocabulary: Vocabulary,
        cost: CostModel,
        overheads: Overheads = NO_OVERHEADS,
        check_every: int = 0,
        leaps: bool = True,
        transfer_s: float = 0.0,
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
        self._submit_busy = _ns(overheads.submit_busy_s)
        self._arrival = _ns(overheads.arrival_s)
        self._disturbed = 0  # ns by which the next step takes longer
        self._transfer_s = transfer_s
        self._check_every = check_every
        self._leaps = leaps and not check_every and vocabulary.first > STOP_TOKEN
        self._events: list[_Event] = []
        self._order = 0
        self._worker_free = 0
        self._delivered = 0  # when the last batch reached the client: batches do not overtake each other
        self._ends: dict[int, int] = {}  # output tokens after which a request's answer ends by itself

    def run(self) -> None:
        """Until everything that the workload sends has ended. Raises Stuck when that cannot be."""
        while self._events or self._traffic.next_due is not None:
            self._turn(self._next_time())
            if self._leaps:
                self._leap()
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
            stop_token_ids=ints(STOP_TOKEN) if number in self._ends else ints(),
            draw=DrawParams(),
            salt=submission.salt,
            priority=submission.priority,
        )
        busy = now < self._worker_free
        self._disturbed += self._arrival * busy
        self._push(now + self._submit + self._submit_busy * busy, request)

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
        duration = _ns(self._cost.seconds(work) + self._transfers(plan)) + self._disturbed
        self._disturbed = 0
        started = max(arrives, self._worker_free + self._turnaround) if self.meter.steps else arrives
        ready = self._worker_free = started + duration
        pool = scheduler.kv.pool
        self.meter.step(work, duration, pool.num_pages - scheduler.kv.available)
        tokens, accepted = self._draw(plan, step)
        times = array("q", (started, started, ready))
        result = StepResult(plan.step_id, plan.epoch, plan.group, tokens, times, accepted=accepted)
        self._push(ready + self._result, result)
        if self._check_every and self.meter.steps % self._check_every == 0:
            check(scheduler)

    def _transfers(self, plan: StepPlan) -> float:
        """Seconds in which the worker moves pages to and from the host. What goes down is counted as well, as on a CPU,
        though a GPU computes meanwhile."""
        if not plan.copies or not self._transfer_s:
            return 0.0
        end = self.scheduler.kv.pool.num_pages
        return self._transfer_s * sum(
            max(pair) >= end for pair in zip(plan.copies[::2], plan.copies[1::2], strict=True)
        )

    def _draw(self, plan: StepPlan, step: Step) -> tuple[IntArray, IntArray]:
        """The tokens of a step, and how many guesses were right where there were some."""
        if not step.guesses:
            return ints(*(self._sample(r.rid, r.generated - 1) for r in step.sampled)), ints()
        tokens, accepted = ints(), ints()
        ends = dict(zip(plan.chunk_slots, accumulate(plan.chunk_lens), strict=True))
        for request, count in zip(step.sampled, step.guesses, strict=True):
            first = request.generated - 1 - count
            guesses = plan.chunk_tokens[ends[request.slot] - count : ends[request.slot]] if count else ints()
            right = 0
            tokens.append(self._sample(request.rid, first))
            while right < count and tokens[-1] == guesses[right]:
                right += 1
                tokens.append(self._sample(request.rid, first + right))
            if count:
                accepted.append(right)
        return tokens, accepted

    def _sample(self, rid: int, position: int) -> int:
        """The token of a request's output at `position`."""
        if position + 1 == self._ends.get(rid):
            return STOP_TOKEN
        return self._vocabulary.answer(rid, position)

    def _leap(self) -> None:
        """Take steps together as long as nothing happens but results of steps that decode the same requests."""
        flying, others = [], []
        for event in self._events:
            if isinstance(event.what, StepResult):
                flying.append((event.when, event.order, *event.what.times[1:]))
            else:
                others.append(event)
        if self._disturbed or len(flying) != self.scheduler.config.steps_in_flight:
            return
        until = min((event.when for event in others), default=FOREVER)
        if self._traffic.next_due is not None:
            until = min(until, self._traffic.next_due)
        if min(flying)[0] >= until or (steady := Steady.of(self.scheduler)) is None:
            return
        rows = steady.rows
        count = len(rows)
        told = [len(r.tokens) - r.prompt_len for r in rows]
        ends = self._ends
        most = min(ends.get(r.rid, FOREVER) - 1 - n for r, n in zip(rows, told, strict=True))
        most = min(most, steady.most)
        if most < LEAST_LEAP:
            return
        steps = deque(sorted(flying))  # when their results come, event order, begin and end of computing
        longest, deliver = steady.longest, self._deliver + self._deliver_row * count
        pool, kv, meter, cost = self.scheduler.kv.pool, self.scheduler.kv, self.meter, self._cost
        whens: list[int] = []
        now = steps[0][0]
        while len(whens) < most and now < until and steady.has_room():
            if len(steps) > 1 and steps[1][0] <= now:
                break  # two results at one moment
            _, _, started, ready = steps.popleft()
            steady.commit((ready - started) / 1e9)
            self._delivered = max(self._delivered, now + deliver)
            whens.append(self._delivered)
            shape = steady.plan(now)
            longest += 1
            work = StepWork(count, count, 0, count, shape.context, shape.context, count * longest)
            duration = _ns(cost.seconds(work))
            started = max(now + self._commit + self._plan, self._worker_free + self._turnaround)
            self._worker_free = started + duration
            meter.step(work, duration, pool.num_pages - kv.available)
            self._order += 1
            steps.append((self._worker_free + self._result, self._order, started, self._worker_free))
            now = steps[0][0]
        if not whens:
            return
        taken = len(whens)
        tokens = [self._vocabulary.answers(r.rid, n, taken) for r, n in zip(rows, told, strict=True)]
        steady.end(tokens)
        between = list(map(int.__sub__, whens[1:], whens))
        for request, own in zip(rows, tokens, strict=True):
            self.records[request.rid].several(own, whens, between)
        self._events = others
        flying_now = zip(steps, self.scheduler.in_flight, strict=True)
        for ahead, ((when, order, started, ready), step) in enumerate(flying_now):
            sampled = array("i", [self._sample(r.rid, n + taken + ahead) for r, n in zip(rows, told, strict=True)])
            times = array("q", (started, started, ready))
            result = StepResult(step.step_id, self.scheduler.epoch, GROUP, sampled, times)
            self._events.append(_Event(when, order, result))
        heapq.heapify(self._events)

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
                        record.token(token, when, msg.times)
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
