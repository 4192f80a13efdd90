"""Requests through a real scheduler and a real model runner, one step after the other, without processes."""

from array import array
from collections.abc import Sequence

from common.logprobs import Logprobs
from common.messages import AddRequest, RequestError, StepPlan, StepResult, TokenBatch, ints
from common.sampling_params import DrawParams
from scheduler_proc.invariants import check
from scheduler_proc.scheduler import Scheduler
from worker_proc.model_runner import ModelRunner


class Request:
    """What a request asks, and what it got."""

    def __init__(self, prompt: list[int], draw: DrawParams, max_tokens: int):
        self.prompt, self.draw, self.max_tokens = prompt, draw, max_tokens
        self.tokens: list[int] = []
        self.logprobs = Logprobs.empty()
        self.prompt_logprobs = Logprobs.empty()


def serve(scheduler: Scheduler, runner: ModelRunner, requests: Sequence[Request]) -> dict[str, int]:
    """Serve all requests at once, with every invariant checked after each step; returns the scheduler's counters."""
    for rid, request in enumerate(requests):
        message = AddRequest(rid, ints(*request.prompt), request.max_tokens, ints(), request.draw)
        assert scheduler.handle(message, rid + 1) == []
    plans: list[StepPlan] = []
    while scheduler.has_work:
        while (plan := scheduler.plan(99)) is not None:
            plans.append(plan)
        plan = plans.pop(0)
        out = runner.execute(plan)
        result = StepResult(
            plan.step_id, plan.epoch, plan.group, ints(*out.tokens), array("q"), out.logprobs, out.prompt_logprobs,
            accepted=ints(*out.accepted),
        )  # fmt: skip
        for answer in scheduler.commit(result, 99):
            assert not isinstance(answer, RequestError), answer
            take(requests, answer)
        check(scheduler)
    return scheduler.stats()


def take(requests: Sequence[Request], batch: TokenBatch) -> None:
    """Give each request its part of the batch; a request's id is its place."""
    scores = batch.logprobs.by_row() if batch.logprobs else {}
    prompts = batch.prompt_logprobs.by_row() if batch.prompt_logprobs else {}
    at = 0
    for row, (rid, count) in enumerate(zip(batch.rids, batch.counts, strict=True)):
        requests[rid].tokens += batch.token_ids[at : at + count]
        at += count
        requests[rid].logprobs.extend(scores.get(row, Logprobs.empty()))
        requests[rid].prompt_logprobs.extend(prompts.get(row, Logprobs.empty()))
