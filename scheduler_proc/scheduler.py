"""The scheduler: a pure state machine over requests, pages and steps.

    handle(message)  -> answers          a request arrives, is aborted, or statistics are asked for
    plan(now)        -> StepPlan | None  what the workers compute next
    commit(result)   -> answers          the tokens of the oldest step in flight are known

Continuous batching (Orca, Yu et al., OSDI 2022) with chunked prefill (Sarathi-Serve, Agrawal et al., OSDI 2024): in
every step computed tokens catch up with known tokens under a token budget, decodes first, prefill chunks after them.

Up to `steps_in_flight` plans are sent before the first one's tokens are known. A decode's input is whatever its slot
sampled last, so a plan needs no token values; a request that turns out to have ended has its later tokens discarded
in `commit`, and keeps slot and pages until the last step with it has returned.
"""

import heapq
from array import array
from collections import deque
from dataclasses import dataclass

from common.codec import Message
from common.config import SchedulerConfig
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
from scheduler_proc.admission import FullReservation
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.plan_builder import PlanBuilder
from scheduler_proc.policy import Fcfs
from scheduler_proc.request import Event, Request, Status, new_request

GROUP = "0"


class ProtocolError(RuntimeError):
    """A worker answered something that was not asked: the cluster cannot go on with it."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step in flight: its id, when it was planned (ns), all its rows, and those that get a token."""

    step_id: int
    planned: int
    rows: list[Request]
    sampled: list[Request]


class Scheduler:
    """See the module's docstring. `context_len` bounds prompt and output together, in tokens."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, context_len: int, *, epoch: int = 0):
        self._config = config
        self._context_len = context_len
        self._epoch = epoch
        self.kv = kv
        self.admission = FullReservation(kv)
        self.waiting = Fcfs()
        self.slots: list[Request | None] = [None] * config.max_running
        self.requests: dict[int, Request] = {}  # every request that has not been answered for good
        self.in_flight: deque[Step] = deque()
        self._prefilling: list[Request] = []
        self._free_slots = list(range(config.max_running))  # a heap, so that slots stay dense
        self._left: list[int] = []  # slots freed since the last plan
        self._next_step = 0
        self._counters = dict.fromkeys(
            ("steps", "requests", "finished", "aborted", "refused", "prompt_tokens", "cached_tokens", "output_tokens"),
            0,
        )

    # ---- events ---------------------------------------------------------------------------------------------------

    def handle(self, msg: Message) -> list[Message]:
        """Apply one message from the tokenizer. Returns answers for the detokenizer."""
        match msg:
            case AddRequest():
                return self._add(msg)
            case Abort(rid=rid):
                return self._abort(rid)
            case GetStats(query=query):
                return [Stats(query, {f"scheduler.{name}": value for name, value in self.stats().items()})]
        raise TypeError(f"the scheduler does not handle {type(msg).__name__}")

    def _add(self, msg: AddRequest) -> list[Message]:
        refusal = self._refusal(msg)
        if refusal is not None:
            self._counters["refused"] += 1
            return [refusal]
        room = min(self._context_len, self.kv.pool.num_pages * self.kv.page_size) - len(msg.prompt)
        request = new_request(msg.rid, msg.prompt, min(msg.max_tokens, room), frozenset(msg.stop_token_ids), msg.draw)
        self.requests[msg.rid] = request
        self.waiting.add(request)
        self._counters["requests"] += 1
        return []

    def _refusal(self, msg: AddRequest) -> RequestError | None:
        pool_tokens = self.kv.pool.num_pages * self.kv.page_size
        length = len(msg.prompt)
        if msg.rid in self.requests:
            return RequestError(msg.rid, ErrorCode.INTERNAL, "this request id is in use", "rid")
        if length == 0:
            return RequestError(msg.rid, ErrorCode.INVALID, "the prompt is empty", "prompt", 1)
        for limit, name in ((self._context_len, "context window"), (pool_tokens, "KV cache")):
            if length + 1 > limit:
                problem = f"the prompt has {length} tokens and the {name} holds {limit}, one of them for the answer"
                return RequestError(msg.rid, ErrorCode.TOO_LONG, problem, "prompt", limit)
        if len(self.waiting) >= self._config.max_waiting:
            problem = f"the queue is full ({self._config.max_waiting} requests)"
            return RequestError(msg.rid, ErrorCode.OVERLOADED, problem, "", self._config.max_waiting, 1.0)
        return None

    def _abort(self, rid: int) -> list[Message]:
        request = self.requests.get(rid)
        if request is None:
            return []  # it has just finished
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        self._end(request, Event.ABORT)
        self._counters["aborted"] += 1
        batch = TokenBatch(ints(rid), ints(0), ints(), bytes([Finish.ABORT]), ints(request.cached_prompt), array("q"))
        return [batch]

    # ---- planning -------------------------------------------------------------------------------------------------

    def plan(self, now: int) -> StepPlan | None:
        """The next step, or None when nothing can be computed or enough steps are in flight. `now` in ns."""
        if len(self.in_flight) >= self._config.steps_in_flight:
            return None
        step = PlanBuilder(self._config.max_running)
        self._plan_decodes(step)
        budget = self._config.max_batch_tokens - step.num_tokens
        if step.num_tokens:
            budget = min(budget, self._config.chunk_tokens)  # beside decodes, keep their inter-token latency short
        budget = self._plan_chunks(step, budget)
        self._plan_admissions(step, budget)
        if step.num_tokens == 0:
            return None
        step.leave(self._left)
        self._left = []
        for request in step.rows:
            request.steps_in_flight += 1
        self.in_flight.append(Step(self._next_step, now, step.rows, step.sampled))
        plan = step.build(self._next_step, self._epoch, GROUP)
        self._next_step += 1
        self._counters["steps"] += 1
        return plan

    def _plan_decodes(self, step: PlanBuilder) -> None:
        for request in self.slots:
            if (
                request is not None
                and request.status is Status.DECODING
                and request.generated < request.max_tokens  # the length limit never lags behind steps in flight
            ):
                self._extend(step, request, 1)
                step.decode(request)
                request.pending += 1

    def _plan_chunks(self, step: PlanBuilder, budget: int) -> int:
        for request in tuple(self._prefilling):
            if budget <= 0:
                break
            budget -= self._plan_chunk(step, request, budget)
        return budget

    def _plan_admissions(self, step: PlanBuilder, budget: int) -> None:
        while budget > 0 and self._free_slots and (request := self.waiting.head()) is not None:
            if not self.admission.try_admit(request):
                break
            self.waiting.remove(request)
            request.on(Event.ADMIT)
            request.slot = heapq.heappop(self._free_slots)
            self.slots[request.slot] = request
            request.cached_prompt = request.cached_len
            self._counters["prompt_tokens"] += request.prompt_len
            self._counters["cached_tokens"] += request.cached_prompt
            self._prefilling.append(request)
            step.enter(request)
            budget -= self._plan_chunk(step, request, budget)

    def _plan_chunk(self, step: PlanBuilder, request: Request, budget: int) -> int:
        length = min(request.extend_len, budget)
        start = request.cached_len
        self._extend(step, request, length)
        last = request.extend_len == 0
        step.chunk(request, request.tokens[start : start + length], samples=last)
        if last:
            request.on(Event.PREFILL_PLANNED)
            request.pending += 1
            self._prefilling.remove(request)
        return length

    def _extend(self, step: PlanBuilder, request: Request, tokens: int) -> None:
        pages = self.kv.grow(request, request.cached_len + tokens)
        self.admission.held(len(pages))
        step.append_pages(request, pages)
        request.cached_len += tokens

    # ---- results --------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: int) -> list[Message]:
        """Take in the tokens of the oldest step. Raises ProtocolError when the result is not that step's."""
        if not self.in_flight or (result.step_id, result.epoch) != (self.in_flight[0].step_id, self._epoch):
            raise ProtocolError(f"result of step {result.step_id} of epoch {result.epoch} was not awaited")
        step = self.in_flight[0]
        if len(result.tokens) != len(step.sampled):
            raise ProtocolError(f"step {step.step_id} has {len(step.sampled)} rows, got {len(result.tokens)} tokens")
        self.in_flight.popleft()
        rids, tokens, cached, finish = ints(), ints(), ints(), bytearray()
        for request in step.rows:
            request.steps_in_flight -= 1
        for request, token in zip(step.sampled, result.tokens, strict=True):
            request.pending -= 1
            if request.ended:
                continue  # it ended while this step ran: nobody may see the token
            first = len(request.tokens) == request.prompt_len
            request.tokens.append(token)
            reason = self._finish_reason(request, token)
            rids.append(request.rid)
            tokens.append(token)
            cached.append(request.cached_prompt)
            finish.append(reason)
            if reason is not Finish.NONE:
                self._end(request, Event.FINISH)
                self._counters["finished"] += 1
            elif first:
                self.kv.publish(request)
        for request in step.rows:
            self._release_if_over(request)
        self._counters["output_tokens"] += len(rids)
        if not rids:
            return []
        times = array("q", (step.planned, *result.times, now))
        return [TokenBatch(rids, ints(*[1] * len(rids)), tokens, bytes(finish), cached, times)]

    def _finish_reason(self, request: Request, token: int) -> Finish:
        if token in request.stop_token_ids:
            return Finish.STOP
        if len(request.tokens) - request.prompt_len >= request.max_tokens:
            return Finish.LENGTH
        return Finish.NONE

    def _end(self, request: Request, event: Event) -> None:
        if request.status is Status.PREFILLING:
            self._prefilling.remove(request)
        request.on(event)
        del self.requests[request.rid]
        self._release_if_over(request)

    def _release_if_over(self, request: Request) -> None:
        """Give slot and pages back once the request has ended and no step in flight touches them."""
        if not request.ended or request.steps_in_flight or request.slot < 0:
            return
        self.admission.end(request)
        self.kv.release(request)
        self.slots[request.slot] = None
        heapq.heappush(self._free_slots, request.slot)
        self._left.append(request.slot)
        request.slot = -1

    # ---- seeing it ------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.requests) or bool(self.in_flight)

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
