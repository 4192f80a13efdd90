"""The scheduler: a pure state machine over requests, pages and steps.

    handle(message, now) -> answers          a request arrives, is aborted, or statistics are asked for
    plan(now)            -> StepPlan | None  what the workers compute next
    commit(result, now)  -> answers          the tokens of the oldest step in flight are known

Continuous batching (Orca, Yu et al., OSDI 2022) with chunked prefill (Sarathi-Serve, Agrawal et al., OSDI 2024): in
every step computed tokens catch up with known tokens under a token budget, decodes first, prefill chunks after them.

Up to `steps_in_flight` plans are sent before the first one's tokens are known. A decode's input is whatever its slot
sampled last, so a plan needs no token values; a request that turns out to have ended has its later tokens discarded
in `commit`, and keeps slot and pages until the last step with it has returned.

Under pressure, in this order: evict unlocked leaves, stop admitting, preempt (lowest priority, then newest first; the
pages stay in the tree as long as nobody needs them), refuse new requests.
"""

import heapq
from array import array
from collections import deque

from common.codec import Message
from common.config import SchedulerConfig
from common.fields import IntArray
from common.logprobs import Logprobs
from common.messages import (
    Abort,
    AddRequest,
    ErrorCode,
    Finish,
    GetStats,
    RequestError,
    Stats,
    StepPlan,
    StepResult,
    TokenBatch,
    ints,
)
from common.sampling_params import MAX_TOKEN_ID
from scheduler_proc.admission import Admission
from scheduler_proc.intake import never_fits, request_of
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.measures import Measures
from scheduler_proc.plan_builder import PlanBuilder
from scheduler_proc.planner import Planner
from scheduler_proc.policy import make_policy
from scheduler_proc.quarantine import Quarantine, verdict
from scheduler_proc.request import Event, Request, Status
from scheduler_proc.residents import Residents
from scheduler_proc.service_rate import ServiceRate
from scheduler_proc.speculation import make_speculation
from scheduler_proc.step import Start, Step
from scheduler_proc.step_time import StepShape, StepTimeModel
from scheduler_proc.token_rows import TokenRows, drawn_rows, prompt_logprobs_of

GROUP = "0"
_FEW_DEADLINES = 64  # not worth tidying
STATE_STATS = ("total_snapshots", "used_snapshots", "saved_snapshots", "loaded_snapshots")
HOST_STATS = ("host_total_pages", "host_used_pages", "offloaded_pages", "loaded_pages", "host_dropped_pages")


class ProtocolError(RuntimeError):
    """A worker answered something that was not asked: the cluster cannot go on with it."""


class Scheduler:
    """See the module's docstring. `context_len` bounds prompt and output together, in tokens. Raises ValueError when
    the configuration is not for such a model."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        context_len: int,
        *,
        epoch: int = 0,
        vocab_size: int = MAX_TOKEN_ID + 1,
    ):
        if kv.snapshots is not None and config.speculation != "off":
            raise ValueError("wrong guesses cannot be taken back from the states of recurrent layers")
        self.config = config
        self.context_len = context_len
        self.vocab_size = vocab_size
        self.epoch = epoch
        self.kv = kv
        self.waiting = make_policy(config.policy, kv, config.ageing_s)
        self.step_time = StepTimeModel()
        self.measures = Measures()
        self.residents = Residents(config.max_running, kv, self.waiting)
        self.quarantine = Quarantine()
        self.speculation = make_speculation(config)
        self.planner = Planner(
            config, kv, self.waiting, self.residents, self.step_time, self.speculation, self.measures, self.quarantine
        )
        self.requests: dict[int, Request] = {}  # every request that has not been answered for good
        self.in_flight: deque[Step] = deque()
        self._deadlines: list[tuple[int, int]] = []  # a heap of (when, rid); of some that have ended, too
        self._service = ServiceRate()
        self._next_step = 0
        self._next_seq = 1
        self._idle = True  # there was nothing to plan since the last result

    # ---- events ---------------------------------------------------------------------------------------------------

    def handle(self, msg: Message, now: int) -> list[Message]:
        """Apply one message from the tokenizer. Returns answers for the detokenizer. `now` in ns."""
        match msg:
            case AddRequest():
                return self._add(msg, now)
            case Abort(rid=rid):
                return self._abort(rid)
            case GetStats(query=query):
                counters = {f"scheduler.{name}": value for name, value in self.stats().items()}
                return [Stats(query, counters | self.measures.flat())]
        raise TypeError(f"the scheduler does not handle {type(msg).__name__}")

    def _add(self, msg: AddRequest, now: int) -> list[Message]:
        problem = self._refusal(msg, now)
        if problem is not None:
            self.measures.counts["refused"] += 1
            return [problem]
        request = request_of(msg, self._next_seq, min(self.context_len, self._pool_tokens), now)
        self._next_seq += 1
        if not self.requests:
            self._service.begins(now)
        self.requests[msg.rid] = request
        self.waiting.add(request)
        if request.deadline:
            heapq.heappush(self._deadlines, (request.deadline, request.rid))
        self.measures.counts["requests"] += 1
        return []

    @property
    def _pool_tokens(self) -> int:
        return self.kv.pool.num_pages * self.kv.page_size

    def _refusal(self, msg: AddRequest, now: int) -> RequestError | None:
        if msg.rid in self.requests:
            return RequestError(msg.rid, ErrorCode.INTERNAL, "this request id is in use", "rid")
        problem = never_fits(msg, self.context_len, self._pool_tokens, self.vocab_size)
        problem = problem or self.quarantine.refusal(msg, now)
        if problem is None and len(self.waiting) >= self.config.max_waiting and not msg.waited_ms:
            text = f"the queue is full ({self.config.max_waiting} requests)"
            wait = self._service.seconds_for(len(self.waiting))
            return RequestError(msg.rid, ErrorCode.OVERLOADED, text, "", self.config.max_waiting, wait)
        return problem

    def _abort(self, rid: int) -> list[Message]:
        request = self.requests.get(rid)
        if request is None:
            return []  # it has just finished
        self._end(request, Event.ABORT)
        self.measures.counts["aborted"] += 1
        cached = max(0, request.cached_prompt)
        return [TokenBatch(ints(rid), ints(0), ints(), bytes([Finish.ABORT]), ints(cached), array("q"))]

    def expire(self, now: int) -> list[Message]:
        """End requests whose deadline has passed, each with an error."""
        answers: list[Message] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            when, rid = heapq.heappop(self._deadlines)
            request = self.requests.get(rid)
            if request is None or request.deadline != when:
                continue
            self._end(request, Event.ABORT)
            self.measures.counts["expired"] += 1
            allowed = (when - request.arrival) // 10**6
            problem = f"not finished {allowed} ms after it arrived, which was its deadline"
            answers.append(RequestError(rid, ErrorCode.DEADLINE, problem, "deadline_ms", allowed))
        return answers

    @property
    def next_deadline(self) -> int | None:
        """When `expire` has something to do at the earliest (ns)."""
        return self._deadlines[0][0] if self._deadlines else None

    # ---- planning -------------------------------------------------------------------------------------------------

    def plan(self, now: int) -> StepPlan | None:
        """The next step, or None when nothing can be computed or enough steps are in flight. `now` in ns."""
        if len(self.in_flight) >= self.config.steps_in_flight or self._better_wait():
            return None
        step = PlanBuilder(self.config.max_running)
        self.planner.fill(step, now)
        if step.num_tokens == 0:
            self._idle = not self.in_flight
            return None
        step.leave(self.residents.take_left())
        step.copy(self.kv.take_copies())
        rows, context = step.rows, 0
        for request in rows:
            request.steps_in_flight += 1
            context += request.cached_len
        shape = StepShape(step.num_tokens, context, step.plain)
        start = Start.AHEAD if self.in_flight else Start.IDLE if self._idle else Start.AFTER
        number, guesses = self._next_step, step.guesses
        flying = Step(number, now, rows, step.sampled, step.scored, shape, guesses, start)
        self.in_flight.append(flying)
        self._idle = False
        self.measures.guessed(guesses)
        plan = step.build(self._next_step, self.epoch, GROUP)
        self._next_step += 1
        self.measures.counts["steps"] += 1
        return plan

    def _better_wait(self) -> bool:
        """What follows guesses cannot be planned, and a step for everybody else would take as long as one for all."""
        if not self.in_flight:
            return False
        return bool(self.in_flight[-1].guesses) or self.speculation.better_wait(self.residents)

    # ---- results --------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: int) -> list[Message]:
        """Take in the tokens of the oldest step. Raises ProtocolError when the result is not that step's."""
        if not self.in_flight or (result.step_id, result.epoch) != (self.in_flight[0].step_id, self.epoch):
            raise ProtocolError(f"result of step {result.step_id} of epoch {result.epoch} was not awaited")
        step = self.in_flight[0]
        try:
            drawn, scores = drawn_rows(result, step), prompt_logprobs_of(result, step.scored)
        except ValueError as error:
            raise ProtocolError(f"step {step.step_id}: {error}") from None
        self.in_flight.popleft()
        if len(result.times) == 3:
            seconds = (result.times[2] - result.times[1]) / 1e9
            self.step_time.learn(step.shape, seconds)
            self.measures.step(step.shape.tokens, seconds)
        self.speculation.done(step, result, now)
        for request in step.rows:
            request.steps_in_flight -= 1
        errors: list[Message] = []
        rows = TokenRows()
        for scored, entries in zip(step.scored, scores, strict=True):
            if not scored.request.ended:
                scored.request.scored = scored.end
                rows.score(scored.request, entries)
        for request, guesses, tokens, logprobs, problem in drawn:
            request.pending -= 1 + guesses
            if guesses:
                request.cached_len -= guesses + 1 - len(tokens)  # after a wrong guess keys and values are wrong, too
                self.measures.accepted(len(tokens) - 1)
            if request.ended:
                self.measures.counts["discarded_tokens"] += len(tokens)
                continue  # it ended while this step ran: nobody may see the tokens
            if problem:
                errors.append(self._fail(request, problem))
            else:
                self._take_tokens(rows, request, tokens, logprobs, now)
        for request in step.rows:
            if not request.is_running:
                self.residents.settle(request)
        self.measures.counts["output_tokens"] += rows.num_tokens
        return [*rows.batch(step.planned, *result.times, now), *errors]

    def _fail(self, request: Request, problem: str) -> RequestError:
        """The grammar of a request could not be followed: its token is for nobody."""
        self.measures.counts["failed"] += 1
        self._end(request, Event.ABORT)
        return RequestError(request.rid, ErrorCode.INVALID, problem, "params.grammar")

    def _take_tokens(
        self, rows: TokenRows, request: Request, tokens: IntArray, logprobs: Logprobs | None, now: int
    ) -> None:
        if request.draw.prompt_logprobs is not None and len(request.tokens) == 1:
            rows.score(request, Logprobs.empty())  # nothing to score, but whoever asked awaits an answer
        reason, taken, end = Finish.NONE, 0, request.prompt_len + request.max_tokens
        for token in tokens:
            request.tokens.append(token)
            taken += 1
            if request.guesser is not None:
                self.speculation.took(request)
            if token in request.stop_token_ids:
                reason = Finish.STOP
                break
            if len(request.tokens) >= end:
                reason = Finish.LENGTH
                break
        if taken < len(tokens):
            self.measures.counts["discarded_tokens"] += len(tokens) - taken
            tokens = tokens[:taken]
        rows.add(request, tokens, reason, logprobs.first(taken) if logprobs is not None else None)
        if reason is not Finish.NONE:
            self._end(request, Event.FINISH)
            self._service.finished(now)
            self.planner.chunks.finished(len(request.tokens) - request.prompt_len)
            self.measures.counts["finished"] += 1
        elif (
            self.quarantine
            and self.quarantine.acquit(request)
            and self.quarantine  # by others
            and request.status is Status.DECODING
        ):
            request.on(Event.PREEMPT)  # it makes room for the next suspect

    def _end(self, request: Request, event: Event) -> None:
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is Status.PREFILLING:
            self.residents.prefilling.remove(request)
        request.on(event)
        self.quarantine.acquit(request)
        del self.requests[request.rid]
        self.measures.ended(request)
        self.residents.settle(request)
        if len(self._deadlines) > 2 * len(self.requests) + _FEW_DEADLINES:  # most are of requests that have ended
            self._deadlines = [(r.deadline, r.rid) for r in self.requests.values() if r.deadline]
            heapq.heapify(self._deadlines)

    def skip(self, steps: int, tokens: int) -> None:
        """So many steps with so many tokens have been planned and committed elsewhere (steady.py)."""
        self._next_step += steps
        self.measures.counts["steps"] += steps
        self.measures.counts["output_tokens"] += tokens

    # ---- after a loss ---------------------------------------------------------------------------------------------

    def reset(self, epoch: int, now: int, *, crashed: bool) -> list[Message]:
        """The workers have lost everything: forget all KV and the steps in flight, and queue every running request
        again with the tokens that it has. Plans of the new `epoch` start at step 0. `crashed`: they did not end because
        they were told to, so what they were computing is suspected (see quarantine.py). Returns the errors of
        those that are found guilty."""
        culprits: list[Request] = []
        if crashed:
            rows = {request.rid: request for step in self.in_flight for request in step.rows}
            culprits = self.quarantine.suspect(rows.values(), self.requests.values(), now)
            self.measures.counts["suspected"] += len(rows)
        self.epoch = epoch
        self._next_step = 0
        self.in_flight.clear()
        self._idle = True
        self.kv.forget()
        self.residents.evacuate()
        for culprit in culprits:
            self._end(culprit, Event.ABORT)
        self.measures.counts["condemned"] += len(culprits)
        return [verdict(culprit.rid) for culprit in culprits]

    # ---- seeing it ------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.requests) or bool(self.in_flight)

    @property
    def admission(self) -> Admission:
        return self.planner.admission

    @property
    def slots(self) -> list[Request | None]:
        return self.residents.slots

    def holders(self) -> list[Request]:
        """Every request that holds a slot, ended ones with steps in flight too."""
        return self.residents.holders()

    def _host_stats(self) -> dict[str, int]:
        tier = self.kv.tier
        if tier is None:
            return dict.fromkeys(HOST_STATS, 0)
        pages = tier.pool.num_pages
        values = (pages, pages - tier.pool.free, tier.offloaded, tier.loaded, tier.dropped)
        return dict(zip(HOST_STATS, values, strict=True))

    def _state_stats(self) -> dict[str, int]:
        snapshots = self.kv.snapshots
        if snapshots is None:
            return dict.fromkeys(STATE_STATS, 0)
        values = (snapshots.total, snapshots.used, snapshots.saved, snapshots.loaded)
        return dict(zip(STATE_STATS, values, strict=True))

    def stats(self) -> dict[str, int]:
        """Gauges and counters by name; free + evictable + locked + held pages are the total."""
        tree, pool = self.kv.tree, self.kv.pool
        return {
            "waiting": len(self.waiting),
            "running": len(self.holders()),
            "in_flight": len(self.in_flight),
            "suspects": len(self.quarantine),
            "total_pages": pool.num_pages,
            "free_pages": pool.free,
            "evictable_pages": tree.evictable,
            "locked_pages": tree.num_pages - tree.evictable,
            "held_pages": pool.num_pages - pool.free - tree.num_pages,
            "evicted_pages": tree.evicted,
            **self._host_stats(),
            **self._state_stats(),
            **self.measures.counts,
        }
