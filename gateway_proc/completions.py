"""/v1/completions: prompts as texts or token ids, one or several."""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from starlette.requests import Request

from common.async_connection import AsyncConnection
from common.logprobs import TokenLogprobs
from common.messages import MAX_CHOICES, Finish
from common.rows import Row
from gateway_proc.errors import refused, told_by_cluster
from gateway_proc.generation import Choice, Generation, Prompt, finish_reason
from gateway_proc.http import EventStream, Json, event, while_connected
from gateway_proc.logprobs import CompletionLogprobs, prompt_logprobs
from gateway_proc.params import grammar_of, sampling_params
from gateway_proc.schemas.completions import CompletionRequest
from gateway_proc.service import Service

NAMES = {"text": "prompt", "token_ids": "prompt"}


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request: how many answers are drawn of each prompt (`drawn`), and how many are shown (`n`)."""

    body: CompletionRequest
    head: dict[str, Any]  # what every answer and chunk begins with
    prompts: list[Prompt]
    echoes: list[str]  # what is put before each prompt's answers
    n: int
    drawn: int
    hide_answer: bool  # only the prompt is asked for: one token must be drawn all the same

    @property
    def as_ids(self) -> bool:
        return bool(self.body.return_tokens_as_token_ids)


async def create(service: Service, request: Request) -> Any:
    """Serve one request. Raises ApiError, and ClientGone as soon as the client leaves."""
    body = await service.reader.read(request, CompletionRequest)
    connection, info, story = service.begin(request, body)
    n = body.n or 1
    drawn = max(n, body.best_of or n)
    _check(body, n, drawn)
    hide_answer = body.max_tokens == 0
    grammar, grammar_field = grammar_of(body)
    # best_of ranks by log probabilities, which must then be asked for
    logprobs = 0 if body.logprobs is None and drawn > n else body.logprobs
    prompt_top = body.logprobs if body.prompt_logprobs is None and body.echo else body.prompt_logprobs
    params = sampling_params(
        body,
        service.defaults,
        max_tokens=1 if hide_answer else body.max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_top,
        grammar=grammar,
    )
    prompts = _prompts(body)
    head = {
        "id": f"cmpl-{story.id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model or info.names[0],
    }
    echoes = await _echoes(connection, prompts) if body.echo else [""] * len(prompts)
    plan = Plan(body, head, prompts, echoes, n, drawn, hide_answer)
    generation = service.generation(
        connection, story, body, prompts, params, n=drawn, stream=bool(body.stream),
        names={**NAMES, "grammar": grammar_field, "deadline_ms": "deadline_ms"},
    )  # fmt: skip
    if body.stream:
        return EventStream(_stream(plan, generation), story)
    return await while_connected(request.receive, _answer(plan, generation))


def _check(body: CompletionRequest, n: int, drawn: int) -> None:
    if body.best_of is not None and body.best_of < n:
        raise refused("best_of", f"must be at least n ({n}), got {body.best_of}")
    if drawn > n and body.stream:
        raise refused("best_of", "cannot be used with stream")
    if drawn > n and body.use_beam_search:
        raise refused("best_of", "cannot be used with use_beam_search")
    if drawn > MAX_CHOICES:
        raise refused("n", f"must be at most {MAX_CHOICES}")
    if body.max_tokens == 0 and not body.echo:
        raise refused("max_tokens", "must be at least 1 unless echo is true")
    if body.prompt_logprobs is not None and body.stream:
        raise refused("prompt_logprobs", "cannot be used with stream; use echo and logprobs")


def _prompts(body: CompletionRequest) -> list[Prompt]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return cast(list[Prompt], list(prompt))


async def _echoes(connection: AsyncConnection, prompts: Sequence[Prompt]) -> list[str]:
    """The prompts as texts."""
    with told_by_cluster(NAMES):
        return [p if isinstance(p, str) else await connection.detokenize(cast(list[int], p)) for p in prompts]


async def _answer(plan: Plan, generation: Generation) -> Json:
    with generation:
        answers = await generation.collect()
    choices: list[dict[str, Any]] = []
    for number, drawn in enumerate(answers):
        for choice in _best(drawn, plan.n):
            choices.append(_choice(plan, number, len(choices), choice))
    return Json({**plan.head, "choices": choices, "usage": _usage(plan, generation)})


def _usage(plan: Plan, generation: Generation) -> dict[str, Any]:
    if plan.hide_answer:  # what was drawn and is not shown does not count
        generation.usage.completion_tokens = 0
    return generation.usage.as_dict()


def _best(drawn: list[Choice], n: int) -> list[Choice]:
    """The n answers with the highest mean log probability per token; all of them where there are no more."""
    if len(drawn) <= n:
        return drawn
    return sorted(drawn, key=_mean_logprob, reverse=True)[:n]


def _mean_logprob(choice: Choice) -> float:
    return sum(entry.logprob for entry in choice.logprobs) / max(1, len(choice.logprobs))


def _choice(plan: Plan, prompt: int, index: int, choice: Choice) -> dict[str, Any]:
    echo = plan.echoes[prompt]
    shown: dict[str, Any] = {
        "index": index,
        "text": echo + ("" if plan.hide_answer else choice.text),
        "logprobs": None,
        "finish_reason": "length" if plan.hide_answer else finish_reason(choice.finish),
        "stop_reason": choice.stop_reason,
    }
    if plan.body.logprobs is not None:
        entries: list[TokenLogprobs | None] = [] if plan.hide_answer else list(choice.logprobs)
        columns = CompletionLogprobs(plan.body.logprobs, plan.as_ids)
        if plan.body.echo:
            entries = [*(choice.prompt_logprobs or ()), *entries]
        shown["logprobs"] = columns.take(entries, _first_text(echo, choice.prompt_logprobs))
    if plan.body.prompt_logprobs is not None:
        shown["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs or ())
    if plan.body.return_token_ids:
        shown["token_ids"] = choice.token_ids
    return shown


def _first_text(echo: str, entries: Sequence[TokenLogprobs | None] | None) -> str:
    """The text of a prompt's first token: what the others leave of it."""
    rest = b"".join(entry.token for entry in entries or () if entry is not None).decode(errors="replace")
    return echo.removesuffix(rest) if rest and echo.endswith(rest) else ""


async def _stream(plan: Plan, generation: Generation) -> AsyncIterator[bytes]:
    options = plan.body.stream_options
    with_usage = bool(options and options.include_usage)
    continuous = bool(options and options.continuous_usage_stats)
    writers: dict[int, _ChoiceWriter] = {}
    with generation:
        async for rows in generation.rows():
            events = []
            for prompt, row in rows:
                index = prompt * plan.n + row.choice
                writer = writers.get(index)
                if writer is None:
                    writer = writers[index] = _ChoiceWriter(plan, index, plan.echoes[prompt])
                choice = writer.take(row)
                if choice is not None or continuous:
                    chunk = {**plan.head, "choices": [choice] if choice else []}
                    if with_usage or continuous:
                        chunk["usage"] = _usage(plan, generation) if continuous else None
                    events.append(event(chunk))
            if events:
                yield b"".join(events)
        if with_usage:
            yield event({**plan.head, "choices": [], "usage": _usage(plan, generation)})


class _ChoiceWriter:
    """The chunks of one choice."""

    def __init__(self, plan: Plan, index: int, echo: str):
        self._plan = plan
        self._index = index
        self._echo = echo
        self._begun = False
        top = plan.body.logprobs
        self._columns = None if top is None else CompletionLogprobs(top, plan.as_ids)

    def take(self, row: Row) -> dict[str, Any] | None:
        """What a chunk says of a row; None where there is nothing to say yet."""
        plan = self._plan
        text = "" if plan.hide_answer else row.text
        entries: list[TokenLogprobs | None] = [] if plan.hide_answer else list(row.logprobs or ())
        first = ""
        if not self._begun:
            self._begun = True
            text = self._echo + text
            if plan.body.echo and row.prompt_logprobs:
                entries = [*row.prompt_logprobs, *entries]
                first = _first_text(self._echo, row.prompt_logprobs)
        ended = row.finish is not Finish.NONE
        if not (text or entries or ended or plan.body.return_token_ids):
            return None
        choice: dict[str, Any] = {
            "index": self._index,
            "text": text,
            "logprobs": self._columns.take(entries, first) if self._columns else None,
            "finish_reason": ("length" if plan.hide_answer else finish_reason(row.finish)) if ended else None,
            "stop_reason": row.stop_reason,
        }
        if plan.body.return_token_ids:
            choice["token_ids"] = list(row.token_ids)
        return choice
