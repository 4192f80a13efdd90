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
from dataclasses import dataclass

from common.codec import Message
from common.config import SchedulerConfig
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
from scheduler_proc.admission import ADMISSIONS, Admission
from scheduler_proc.in_batch import better_off_waiting
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.measures import Measures
from scheduler_proc.plan_builder import PlanBuilder, Scored
from scheduler_proc.policy import MAX_PREFILLS, make_policy
from scheduler_proc.pressure import make_room, spare_pages
from scheduler_proc.request import Event, Request, Status
from scheduler_proc.service_rate import ServiceRate
from scheduler_proc.step_time import StepShape, StepTimeModel
from scheduler_proc.token_rows import TokenRows, logprobs_of, prompt_logprobs_of

GROUP = "0"
SCORED_TOKENS = 256  # prompt tokens that get logits in one step: bounds the worker's memory
HISTORY_TOKENS = 2**20  # tokens of histories after which a plan admits nobody else: bounds its size
LOOK_AHEAD = 32  # waiting requests passed over in one step because a prefix of theirs is being computed
MAX_GRAMMAR_CHARS_PER_STEP = 2**21  # so that the plan fits in a frame
COUNTERS = (
    "steps", "requests", "finished", "aborted", "refused", "expired", "failed", "preempted",
    "prompt_tokens", "cached_tokens", "output_tokens", "discarded_tokens", "copied_pages",
)  # fmt: skip


class ProtocolError(RuntimeError):
    """A worker answered something that was not asked: the cluster cannot go on with it."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step in flight: its id, when it was planned (ns), all its rows, those that get a token, the prompt tokens that
    it scores, and its shape."""

    step_id: int
    planned: int
    rows: list[Request]
    sampled: list[Request]
    scored: list[Scored]
    shape: StepShape


class Scheduler:
    """See the module's docstring. `context_len` bounds prompt and output together, in tokens."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, context_len: int, *, epoch: int = 0):
        self.config = config
        self.context_len = context_len
        self.epoch = epoch
        self.kv = kv
        self.admission: Admission = ADMISSIONS[config.admission]()
        self.waiting = make_policy(config.policy, kv, config.ageing_s)
        self.step_time = StepTimeModel()
        self.measures = Measures()
        self.slots: list[Request | None] = [None] * config.max_running
        self.requests: dict[int, Request] = {}  # every request that has not been answered for good
        self.in_flight: deque[Step] = deque()
        self._prefilling: list[Request] = []
        self._free_slots = list(range(config.max_running))  # a heap, so that slots stay dense
        self._left: list[int] = []  # slots freed since the last plan
        self._deadlines: list[tuple[int, int]] = []  # a heap of (when, rid)
        self._service = ServiceRate()
        self._next_step = 0
        self._next_seq = 1
        self._counters = dict.fromkeys(COUNTERS, 0)

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
        refusal = self._refusal(msg)
        if refusal is not None:
            self._counters["refused"] += 1
            return [refusal]
        prompt_len = len(msg.prompt) - msg.generated
        room = min(self.context_len, self.kv.pool.num_pages * self.kv.page_size) - prompt_len
        request = Request(
            rid=msg.rid,
            tokens=array("i", msg.prompt),
            prompt_len=prompt_len,
            max_tokens=min(msg.max_tokens, room),
            stop_token_ids=frozenset(msg.stop_token_ids),
            draw=msg.draw,
            salt=msg.salt,
            priority=msg.priority,
            deadline=now + msg.deadline_ms * 10**6 if msg.deadline_ms else 0,
            grammar=msg.grammar,
            ignore_eos=msg.ignore_eos,
            arrival=now,
            seq=self._next_seq,
            scored=msg.scored,
        )
        self._next_seq += 1
        self.requests[msg.rid] = request
        self.waiting.add(request)
        if request.deadline:
            heapq.heappush(self._deadlines, (request.deadline, request.rid))
        self._counters["requests"] += 1
        return []

    def _refusal(self, msg: AddRequest) -> RequestError | None:
        pool_tokens = self.kv.pool.num_pages * self.kv.page_size
        length = len(msg.prompt)
        if msg.rid in self.requests:
            return RequestError(msg.rid, ErrorCode.INTERNAL, "this request id is in use", "rid")
        if length == 0:
            return RequestError(msg.rid, ErrorCode.INVALID, "the prompt is empty", "prompt", 1)
        for limit, name in ((self.context_len, "context window"), (pool_tokens, "KV cache")):
            if length + 1 > limit:
                problem = f"the prompt has {length} tokens and the {name} holds {limit}, one of them for the answer"
                return RequestError(msg.rid, ErrorCode.TOO_LONG, problem, "prompt", limit)
        if len(self.waiting) >= self.config.max_waiting and not msg.again:
            problem = f"the queue is full ({self.config.max_waiting} requests)"
            wait = self._service.seconds_for(len(self.waiting))
            return RequestError(msg.rid, ErrorCode.OVERLOADED, problem, "", self.config.max_waiting, wait)
        return None

    def _abort(self, rid: int) -> list[Message]:
        request = self.requests.get(rid)
        if request is None:
            return []  # it has just finished
        self._end(request, Event.ABORT)
        self._counters["aborted"] += 1
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
            self._counters["expired"] += 1
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
        if len(self.in_flight) >= self.config.steps_in_flight:
            return None
        step = PlanBuilder(self.config.max_running)
        preempted = self._plan_decodes(step)
        budget = self._prefill_budget(step)
        if not preempted:
            self._admit(step, budget, now)
        for request in self.waiting.chunk_order(list(self._prefilling)):
            if budget <= 0:
                break
            room = SCORED_TOKENS - step.num_scored_tokens if request.unscored else budget
            if room > 0:
                budget -= self._plan_chunk(step, request, min(budget, room))
        self._share_prefills(step)
        if step.num_tokens == 0:
            return None
        if not preempted:
            self.admission.after_step()
        step.leave(self._left)
        self._left = []
        for request in step.rows:
            request.steps_in_flight += 1
        shape = StepShape(step.num_tokens, sum(r.cached_len for r in step.rows))
        self.in_flight.append(Step(self._next_step, now, step.rows, step.sampled, step.scored, shape))
        plan = step.build(self._next_step, self.epoch, GROUP)
        self._next_step += 1
        self._counters["steps"] += 1
        return plan

    @property
    def _running(self) -> list[Request]:
        """Requests that hold pages and will compute more."""
        return [r for r in self.holders() if r.is_running]

    def _plan_decodes(self, step: PlanBuilder) -> bool:
        """Plan one token for each decoding request that can have a page; True when somebody was preempted for it."""
        ready = [
            r
            for r in self.slots
            # the length limit never lags behind steps in flight
            if r is not None and r.status is Status.DECODING and r.generated < r.max_tokens
        ]
        preempted = spare_pages(self.kv, ready) < 0
        if preempted:
            ready = make_room(ready, self.kv, self.holders, self._preempt)
        for request in ready:
            step.append_pages(request, self.kv.grow(request, request.cached_len + 1))
            step.decode(request)
            request.cached_len += 1
            request.pending += 1
        return preempted

    def _preempt(self, victim: Request) -> None:
        if victim.status is Status.PREFILLING:
            self._prefilling.remove(victim)
        victim.on(Event.PREEMPT)
        victim.preemptions += 1
        self._counters["preempted"] += 1
        self._settle(victim)
        self.admission.after_preemption(self._running)

    def _prefill_budget(self, step: PlanBuilder) -> int:
        """Tokens that prefill chunks may take in this step."""
        budget = self.config.max_batch_tokens - step.num_tokens
        if step.num_tokens == 0:
            return budget  # nobody decodes: only memory limits the chunk
        if self.config.itl_target_ms > 0:
            context = sum(r.cached_len for r in step.rows)
            known = self.step_time.tokens_within(self.config.itl_target_ms / 1e3, context)
            if known is not None:
                least = min(16, self.config.chunk_tokens)  # so that prompts advance at any target
                return min(budget, max(least, known - step.num_tokens))
        return min(budget, self.config.chunk_tokens)

    def _admit(self, step: PlanBuilder, budget: int, now: int) -> None:
        """Start waiting requests while they fit and there is budget that running prefills leave."""
        planned = sum(r.extend_len for r in self._prefilling)
        admitted: list[Request] = []
        looked = 0
        for request in self.waiting.order(now):
            several = self.waiting.concurrent_prefills and len(self._prefilling) < MAX_PREFILLS
            if budget <= 0 or not self._free_slots or (planned >= budget and not several) or looked > LOOK_AHEAD:
                break
            if step.grammar_chars > MAX_GRAMMAR_CHARS_PER_STEP:
                break
            if self._shares_soon(request):
                looked += 1
                continue
            if step.num_history_tokens > HISTORY_TOKENS or not self._try_admit(step, request):
                break
            admitted.append(request)
            planned += request.extend_len
        for request in admitted:
            self.waiting.remove(request)
            self.measures.admitted(request, now)

    def _shares_soon(self, request: Request) -> bool:
        gain = self.config.in_batch_gain
        return self.kv.prefix_cache and better_off_waiting(request, self.kv, self._prefilling, gain)

    def _try_admit(self, step: PlanBuilder, request: Request) -> bool:
        source, partial = self.kv.lock_prefix(request)
        room = self.kv.pages_for(len(request.tokens)) - len(request.pages)
        if room > self.kv.available or not self.admission.fits(self.kv, self._running, request):
            self.kv.unlock_prefix(request)
            return False
        copy = self.kv.take_room(request, source, partial)
        if copy is not None:
            step.copy(*copy)
            self._counters["copied_pages"] += 1
        request.on(Event.ADMIT)
        request.slot = heapq.heappop(self._free_slots)
        self.slots[request.slot] = request
        if request.cached_prompt < 0:
            request.cached_prompt = min(request.cached_len, request.prompt_len - 1)
            self._counters["prompt_tokens"] += request.prompt_len
            self._counters["cached_tokens"] += request.cached_prompt
        self._prefilling.append(request)
        step.enter(request)
        return True

    def _plan_chunk(self, step: PlanBuilder, request: Request, budget: int) -> int:
        length = min(request.extend_len, budget)
        start = request.cached_len
        request.cached_len += length
        last = request.extend_len == 0
        step.chunk(request, request.tokens[start : start + length], samples=last)
        if request.unscored:
            begin, end = max(start, request.scored), min(start + length, request.prompt_len - 1)
            if begin < end:
                step.score(request, begin, end)
        if last:
            request.on(Event.PREFILL_PLANNED)
            request.pending += 1
            self._prefilling.remove(request)
        return length

    # ---- results --------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: int) -> list[Message]:
        """Take in the tokens of the oldest step. Raises ProtocolError when the result is not that step's."""
        if not self.in_flight or (result.step_id, result.epoch) != (self.in_flight[0].step_id, self.epoch):
            raise ProtocolError(f"result of step {result.step_id} of epoch {result.epoch} was not awaited")
        step = self.in_flight[0]
        if len(result.tokens) != len(step.sampled):
            raise ProtocolError(f"step {step.step_id} has {len(step.sampled)} rows, got {len(result.tokens)} tokens")
        try:
            logprobs, scores = logprobs_of(result, step.sampled), prompt_logprobs_of(result, step.scored)
        except ValueError as error:
            raise ProtocolError(f"step {step.step_id}: {error}") from None
        self.in_flight.popleft()
        if len(result.times) == 3:
            seconds = (result.times[2] - result.times[1]) / 1e9
            self.step_time.learn(step.shape, seconds)
            self.measures.step(step.shape.tokens, seconds)
        for request in step.rows:
            request.steps_in_flight -= 1
        failed = dict(zip(result.failed, result.problems, strict=True))
        errors: list[Message] = []
        rows = TokenRows()
        for scored, entries in zip(step.scored, scores, strict=True):
            if not scored.request.ended:
                scored.request.scored = scored.end
                rows.score(scored.request, entries)
        for row, (request, token) in enumerate(zip(step.sampled, result.tokens, strict=True)):
            request.pending -= 1
            if request.ended:
                self._counters["discarded_tokens"] += 1
                continue  # it ended while this step ran: nobody may see the token
            if row in failed:
                errors.append(self._fail(request, failed[row]))
            else:
                self._take_token(rows, request, token, logprobs.get(row), now)
        for request in step.rows:
            self._settle(request)
        self._counters["output_tokens"] += rows.num_tokens
        return [*rows.batch(step.planned, *result.times, now), *errors]

    def _fail(self, request: Request, problem: str) -> RequestError:
        """The grammar of a request could not be followed: its token is for nobody."""
        self._counters["failed"] += 1
        self._end(request, Event.ABORT)
        return RequestError(request.rid, ErrorCode.INVALID, problem, "params.grammar")

    def _take_token(self, rows: TokenRows, request: Request, token: int, logprobs: Logprobs | None, now: int) -> None:
        request.tokens.append(token)
        if request.draw.prompt_logprobs is not None and request.prompt_len == 1 and len(request.tokens) == 2:
            rows.score(request, Logprobs.empty())  # nothing to score, but whoever asked awaits an answer
        reason = self._finish_reason(request, token)
        rows.add(request, token, reason, logprobs)
        if reason is not Finish.NONE:
            self._end(request, Event.FINISH)
            self._service.finished(now)
            self._counters["finished"] += 1

    def _share_prefills(self, step: PlanBuilder) -> None:
        """Publish what prompts compute in this step, chunk by chunk, so that the next one can share it: workers execute
        steps in order."""
        for request in step.rows:
            if request.status is Status.PREFILLING or len(request.tokens) == request.prompt_len:
                self.kv.publish(request)

    def _finish_reason(self, request: Request, token: int) -> Finish:
        if token in request.stop_token_ids:
            return Finish.STOP
        if len(request.tokens) - request.prompt_len >= request.max_tokens:
            return Finish.LENGTH
        return Finish.NONE

    def _end(self, request: Request, event: Event) -> None:
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is Status.PREFILLING:
            self._prefilling.remove(request)
        request.on(event)
        del self.requests[request.rid]
        self._settle(request)

    def _settle(self, request: Request) -> None:
        """Once no step in flight touches an ended or preempted request, take slot and pages back."""
        preempted = request.status is Status.PREEMPTED
        if request.steps_in_flight or request.slot < 0 or not (request.ended or preempted):
            return
        self.kv.release(request)
        self.slots[request.slot] = None
        heapq.heappush(self._free_slots, request.slot)
        self._left.append(request.slot)
        request.slot = -1
        if preempted:
            request.on(Event.REQUEUE)
            self.waiting.add(request)

    # ---- after a loss ---------------------------------------------------------------------------------------------

    def reset(self, epoch: int) -> None:
        """The workers have lost everything: forget all KV and the steps in flight, and queue every running request
        again with the tokens that it has. Plans of the new `epoch` start at step 0."""
        self.epoch = epoch
        self._next_step = 0
        self.in_flight.clear()
        self._prefilling.clear()
        self._left.clear()
        self._free_slots = list(range(self.config.max_running))
        self.kv.forget()
        holders = self.holders()
        self.slots = [None] * self.config.max_running
        for request in holders:
            request.pages, request.node, request.shared_pages = [], None, 0
            request.slot, request.cached_len, request.pending, request.steps_in_flight = -1, 0, 0, 0
            if request.ended:
                continue
            if request.status is not Status.PREEMPTED:
                request.on(Event.PREEMPT)
            request.on(Event.REQUEUE)
            self.waiting.add(request)

    # ---- seeing it ------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.requests) or bool(self.in_flight)

    def holders(self) -> list[Request]:
        """Every request that holds a slot, ended ones with steps in flight too."""
        return [r for r in self.slots if r is not None]

    def stats(self) -> dict[str, int]:
        """Gauges and counters by name; free + evictable + locked + held pages are the total."""
        tree, pool = self.kv.tree, self.kv.pool
        return {
            "waiting": len(self.waiting),
            "running": sum(r is not None for r in self.slots),
            "in_flight": len(self.in_flight),
            "total_pages": pool.num_pages,
            "free_pages": pool.free,
            "evictable_pages": tree.evictable,
            "locked_pages": tree.num_pages - tree.evictable,
            "held_pages": pool.num_pages - pool.free - tree.num_pages,
            "evicted_pages": tree.evicted,
            **self._counters,
        }
