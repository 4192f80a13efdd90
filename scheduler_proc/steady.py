"""Steps that only decode the same requests, taken together: for the simulator, which meets thousands of them in a row.

What `Scheduler.commit` and `Scheduler.plan` would do in each such step is known beforehand. `Steady` does the part that
depends on the order of steps (pages, the learned step time, admission's ratio) step by step, and the rest at the end.
A differential test (tests/unit/test_steady.py) holds it to what single steps do.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from common.fields import IntArray
from scheduler_proc.request import Request
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.step_time import StepShape


class Steady:
    """`of` says whether a scheduler is in such a state. Then, for each step, `commit` and `plan`; last of all `end`.

    `rows` decode, in the order of their slots. At most `most` steps may follow, so that no request reaches its limit;
    `longest` is the longest context among them now, in tokens.
    """

    def __init__(self, scheduler: Scheduler, rows: list[Request]):
        self.rows = rows
        self._shapes = deque(step.shape for step in scheduler.in_flight)
        self.most = min(min(r.remaining, r.remaining + r.pending - 1) for r in rows)  # to plan, to commit
        self.longest = max(r.cached_len for r in rows)
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._count = len(rows)
        self._context = sum(r.cached_len for r in rows)
        self._steps = 0
        size = self._kv.page_size
        # in which step from now on each request begins a page, in the order in which plans give them
        self._page_ends = [(len(r.pages) * size - r.cached_len, i) for i, r in enumerate(rows)]
        heapq.heapify(self._page_ends)
        # in which step each one comes to the end of a page, where its state may be kept
        tracked = [(-(r.cached_len + 1) % size, i) for i, r in enumerate(rows) if r.track is not None]
        self._state_ends = sorted(tracked)
        self._planned: deque[tuple[int, StepShape]] = deque(maxlen=len(scheduler.in_flight))

    @classmethod
    def of(cls, scheduler: Scheduler) -> "Steady | None":
        if type(scheduler) is not Scheduler:
            return None  # a subclass, such as one that records, wants to see every step
        if scheduler.config.speculation != "off":
            return None  # it learns from every token and every step
        residents, in_flight = scheduler.residents, scheduler.in_flight
        if len(in_flight) != scheduler.config.steps_in_flight or residents.prefilling or residents.changed:
            return None
        if not residents.full and len(scheduler.waiting):
            return None
        rows = in_flight[0].rows
        if any(step.rows != rows or step.sampled != rows or step.scored for step in in_flight):
            return None
        if residents.holders() != rows or residents.decoding() != rows:
            return None
        if any(len(r.tokens) <= r.prompt_len for r in rows):
            return None  # its prompt's last page is published with the next plan
        steady = cls(scheduler, rows)
        return steady if steady.most > 0 else None

    def has_room(self) -> bool:
        """Whether the next step finds its pages without preemption."""
        ends = self._page_ends
        if ends[0][0] > self._steps:
            return True
        kv = self._kv
        available = kv.available if kv.tier is None else kv.pool.free  # what goes to the host takes a plan and time
        return sum(when == self._steps for when, _ in ends) <= available

    def commit(self, seconds: float) -> None:
        """The oldest step in flight has taken so long."""
        shape = self._shapes.popleft()
        self._scheduler.step_time.learn(shape, seconds)
        self._scheduler.measures.step(shape.tokens, seconds)

    def plan(self, now: int) -> StepShape:
        """The next step, planned at `now` (ns)."""
        ends, rows = self._page_ends, self.rows
        while ends[0][0] == self._steps:
            request = rows[ends[0][1]]
            self._kv.grow(request, request.cached_len + self._steps + 1)
            heapq.heapreplace(ends, (self._steps + self._kv.page_size, ends[0][1]))
        self._steps += 1
        self._follow_answers()
        self._context += self._count
        shape = StepShape(self._count, self._context)
        self._shapes.append(shape)
        self._planned.append((now, shape))
        self._scheduler.planner.admission.after_step()
        return shape

    def _follow_answers(self) -> None:
        """As Planner does, after so many steps."""
        ends, least_gain, busy = self._state_ends, self._scheduler.config.in_batch_gain, list[int]()
        while ends and ends[0][0] < self._steps:
            request = self.rows[ends[0][1]]
            number = self._kv.follow_answer(request, request.cached_len + self._steps, least_gain, busy)
            busy += [number] if number is not None else []
            heapq.heapreplace(ends, (ends[0][0] + self._kv.page_size, ends[0][1]))

    def end(self, tokens: Sequence[IntArray]) -> None:
        """All steps are taken: `tokens` are the new ones of each row, as many as there were steps."""
        scheduler, steps = self._scheduler, self._steps
        for request, own in zip(self.rows, tokens, strict=True):
            request.tokens.extend(own)
            request.cached_len += steps
        first = scheduler.in_flight[-1].step_id + 1 + steps - len(self._planned)
        for number, (now, shape) in enumerate(self._planned, first):
            last = scheduler.in_flight[-1]
            scheduler.in_flight.popleft()
            scheduler.in_flight.append(replace(last, step_id=number, planned=now, shape=shape))
        scheduler.skip(steps, steps * self._count)
