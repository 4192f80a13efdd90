"""/v1/completions: prompts as texts or token ids, one or several."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

from starlette.requests import Request

from common.messages import Finish
from common.openai_logprobs import CompletionLogprobs, Scored, prompt_logprobs
from common.rows import Row
from gateway_proc.echoes import Echo, echoes_of
from gateway_proc.errors import refused
from gateway_proc.generation import Choice, Generation, Prompt, finish_reason
from gateway_proc.http import EventStream, Json, event, while_connected
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
    echoes: list[Echo]  # what is put before each prompt's answers
    n: int
    drawn: int

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
    prompt_only = body.max_tokens == 0
    grammar, grammar_field = grammar_of(body)
    # best_of ranks by log probabilities, which must then be asked for
    logprobs = 0 if body.logprobs is None and drawn > n else body.logprobs
    tops = [top for top in (body.prompt_logprobs, body.logprobs if body.echo else None) if top is not None]
    params = sampling_params(
        body,
        service.defaults,
        max_tokens=1 if prompt_only else body.max_tokens,
        logprobs=logprobs,
        prompt_logprobs=max(tops, default=None),
        grammar=grammar,
    )
    prompts = _prompts(body)
    head = {
        "id": f"cmpl-{story.id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model or info.names[0],
    }
    echoes = [Echo()] * len(prompts)
    as_they_are = body.add_special_tokens is False  # the cluster adds the tokenizer's own to texts, not to ids
    with_ids = as_they_are or bool(
        body.return_token_ids or (body.return_tokens_as_token_ids and body.echo and body.logprobs is not None)
    )
    if body.echo or with_ids:
        asked = echoes_of(
            connection, prompts, NAMES,
            with_texts=bool(body.echo), with_ids=with_ids, add_special_tokens=not as_they_are,
            truncation=body.truncation(info.max_prompt),
        )  # fmt: skip
        echoes = await while_connected(request.receive, asked)
    if as_they_are:
        prompts = [list(echo.token_ids) for echo in echoes]
    plan = Plan(body, head, prompts, echoes, n, drawn)
    generation = service.generation(
        connection, story, body, prompts, params, n=drawn, stream=bool(body.stream),
        names={**NAMES, "grammar": grammar_field}, prompt_only=prompt_only,
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


async def _answer(plan: Plan, generation: Generation) -> Json:
    with generation:
        answers = await generation.collect()
    choices: list[dict[str, Any]] = []
    for number, drawn in enumerate(answers):
        for choice in _best(drawn, plan.n):
            choices.append(_choice(plan, number, len(choices), choice))
    return Json({**plan.head, "choices": choices, "usage": generation.usage.as_dict()})


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
        "text": echo.text + choice.text,
        "logprobs": None,
        "finish_reason": finish_reason(choice.finish),
        "stop_reason": choice.stop_reason,
    }
    if plan.body.logprobs is not None:
        scored = echo.scored(choice.prompt_logprobs) if plan.body.echo else []
        columns = CompletionLogprobs(plan.body.logprobs, plan.as_ids)
        shown["logprobs"] = columns.take([*scored, *choice.logprobs])
    if plan.body.prompt_logprobs is not None:
        shown["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs or (), plan.body.prompt_logprobs)
    if plan.body.return_token_ids:
        shown |= {"token_ids": choice.token_ids, "prompt_token_ids": echo.token_ids}
    return shown


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
                choice = writer.take(row, always=continuous)
                if choice is not None:
                    chunk = {**plan.head, "choices": [choice]}
                    if with_usage or continuous:
                        chunk["usage"] = generation.usage.as_dict() if continuous else None
                    events.append(event(chunk))
            if events:
                yield b"".join(events)
        if with_usage:
            yield event({**plan.head, "choices": [], "usage": generation.usage.as_dict()})


class _ChoiceWriter:
    """The chunks of one choice."""

    def __init__(self, plan: Plan, index: int, echo: Echo):
        self._plan = plan
        self._index = index
        self._echo = echo
        self._begun = False
        top = plan.body.logprobs
        self._columns = None if top is None else CompletionLogprobs(top, plan.as_ids)

    def take(self, row: Row, *, always: bool) -> dict[str, Any] | None:
        """What a chunk says of a row; None where there is nothing to say yet, unless one is `always` wanted."""
        plan = self._plan
        text = row.text
        entries: list[Scored] = list(row.logprobs or ())
        begins = not self._begun
        if begins:
            self._begun = True
            text = self._echo.text + text
            if plan.body.echo:
                entries = [*self._echo.scored(row.prompt_logprobs), *entries]
        ended = row.finish is not Finish.NONE
        if not (text or entries or ended or plan.body.return_token_ids or always):
            return None
        choice: dict[str, Any] = {
            "index": self._index,
            "text": text,
            "logprobs": self._columns.take(entries) if self._columns else None,
            "finish_reason": finish_reason(row.finish),
            "stop_reason": row.stop_reason,
        }
        if plan.body.return_token_ids:
            choice["token_ids"] = list(row.token_ids)
            if begins:
                choice["prompt_token_ids"] = self._echo.token_ids
        return choice
