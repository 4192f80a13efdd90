"""/generate, SGLang's native endpoint: prompts as texts or token ids, answers with `meta_info`."""

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.requests import Request

from common.logprobs import TopLogprob
from common.messages import Finish
from common.openai_logprobs import FirstToken, Scored
from common.rows import Row
from gateway_proc.echoes import Echo, echoes_of
from gateway_proc.errors import refused
from gateway_proc.generation import Choice, Generation, Prompt
from gateway_proc.http import EventStream, Json, event, while_connected
from gateway_proc.params import grammar_of, sampling_params
from gateway_proc.schemas.native import NativeParams, NativeRequest
from gateway_proc.schemas.sampling import SamplingFields
from gateway_proc.service import Service

# SGLang's sampling_params that are called as in the other endpoints
SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "stop", "stop_token_ids", "no_stop_trim", "ignore_eos", "skip_special_tokens", "json_schema", "regex",
    "ebnf",
)  # fmt: skip
WITHIN = "sampling_params."
NAMES = {
    **{name: WITHIN + name for name in SAME}, "max_tokens": f"{WITHIN}max_new_tokens",
    "min_tokens": f"{WITHIN}min_new_tokens", "seed": f"{WITHIN}sampling_seed", "text": "text", "token_ids": "input_ids",
    "logprobs": "return_logprob", "prompt_logprobs": "logprob_start_len",
    "prompt_logprobs_start": "logprob_start_len",
}  # fmt: skip
# SGLang takes no `model` here; routers that need one (smg) fill in such a word when the client said none
NO_MODEL = ("unknown", "default")


@dataclass(frozen=True, slots=True)
class Plan:
    body: NativeRequest
    id: str
    several: bool  # the answer is a list
    n: int
    start: int  # of the prompt tokens whose log probabilities are wanted, -1 for none
    echoes: list[Echo]
    began: float = field(default_factory=time.monotonic)

    def answer(self, prompt: int, index: int, choice: Choice, usage: tuple[int, int]) -> dict[str, Any]:
        """What is known of one answer so far; `usage` are its prompt's tokens and cached tokens."""
        number = prompt * self.n + index
        meta: dict[str, Any] = {
            "id": f"{self.id}-{number}" if self.several else self.id,
            "finish_reason": _finish_reason(choice),
            "prompt_tokens": usage[0],
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": usage[1],
            "weight_version": "default",
            "e2e_latency": round(time.monotonic() - self.began, 6),
        }
        if self.body.return_logprob:
            meta |= self._logprobs(prompt, choice)
        shown = {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}
        return {**shown, "index": number} if self.several else shown

    def _logprobs(self, prompt: int, choice: Choice) -> dict[str, Any]:
        with_text, top = bool(self.body.return_text_in_logprobs), self.body.top_logprobs_num or 0
        inputs = self._inputs(prompt, choice)
        shown: dict[str, Any] = {
            "input_token_logprobs": [_entry(e, with_text) for e in inputs],
            "output_token_logprobs": [_entry(e, with_text) for e in choice.logprobs],
        }
        if top:
            shown["input_top_logprobs"] = [_tops(e, top, with_text) for e in inputs]
            shown["output_top_logprobs"] = [_tops(e, top, with_text) for e in choice.logprobs]
        return shown

    def _inputs(self, prompt: int, choice: Choice) -> list[Scored]:
        """Those of the prompt from `start` on."""
        if self.start > 0:
            return [entry for entry in choice.prompt_logprobs or () if entry is not None]
        return self.echoes[prompt].scored(choice.prompt_logprobs) if self.start == 0 else []


def _entry(entry: Scored | TopLogprob, with_text: bool) -> list[Any]:
    """[log probability, token id, text]; the first token of a prompt has no log probability."""
    logprob = None if isinstance(entry, FirstToken) else entry.logprob
    return [logprob, entry.token_id, entry.token.decode(errors="replace") if with_text else None]


def _tops(entry: Scored, top: int, with_text: bool) -> list[list[Any]] | None:
    return None if isinstance(entry, FirstToken) else [_entry(t, with_text) for t in entry.top[:top]]


def _finish_reason(choice: Choice) -> dict[str, Any] | None:
    match choice.finish:
        case Finish.NONE:
            return None
        case Finish.LENGTH:
            return {"type": "length", "length": len(choice.token_ids)}
        case Finish.STOP:
            matched = choice.stop_reason
            if matched is None and choice.token_ids:
                matched = choice.token_ids[-1]
            return {"type": "stop", "matched": matched}
        case _:
            return {"type": "abort", "message": "the request was aborted"}


async def create(service: Service, request: Request) -> Any:
    """Serve one request. Raises ApiError, and ClientGone as soon as the client leaves."""
    body = await service.reader.read(request, NativeRequest)
    if (body.text is None) == (body.input_ids is None):
        raise refused("text", "exactly one of text and input_ids must be given")
    fields = _fields(body)
    connection, _, story = service.begin(request, fields)
    max_tokens = (body.sampling_params or NativeParams()).max_new_tokens
    top = body.top_logprobs_num or 0
    start = -1 if not body.return_logprob or body.logprob_start_len is None else body.logprob_start_len
    grammar, grammar_field = grammar_of(fields, WITHIN)
    params = sampling_params(
        fields,
        service.defaults,
        max_tokens=1 if max_tokens == 0 else max_tokens,
        logprobs=top if body.return_logprob else None,
        prompt_logprobs=top if start >= 0 else None,
        prompt_logprobs_start=max(0, start),
        grammar=grammar,
        names=NAMES,
    )
    prompts, several = _prompts(body)
    echoes = [Echo()] * len(prompts)
    if start == 0:
        echoes = await while_connected(
            request.receive, echoes_of(connection, prompts, NAMES, with_texts=True, with_ids=True)
        )
    n = fields.n or 1
    plan = Plan(body, story.id, several or n > 1, n, start, echoes)
    generation = service.generation(
        connection, story, fields, prompts, params, n=n, stream=bool(body.stream),
        names={**NAMES, "grammar": grammar_field}, prompt_only=max_tokens == 0,
    )  # fmt: skip
    if body.stream:
        return EventStream(_stream(plan, generation), story)
    return await while_connected(request.receive, _answer(plan, generation))


def _fields(body: NativeRequest) -> SamplingFields:
    """The request as other endpoints know it."""
    given = body.sampling_params or NativeParams()
    return SamplingFields(
        model=None if body.model in NO_MODEL else body.model,
        stream=body.stream,
        priority=body.priority,
        cache_salt=body.cache_salt,
        request_id=body.rid,
        min_tokens=given.min_new_tokens,
        seed=given.sampling_seed,
        **{name: getattr(given, name) for name in SAME},
    )


def _prompts(body: NativeRequest) -> tuple[list[Prompt], bool]:
    """The prompts, and whether a list of them was given."""
    given = body.text if body.text is not None else body.input_ids
    assert given is not None
    if isinstance(given, str):
        return [given], False
    if isinstance(given[0], int):
        return [given], False
    return cast(list[Prompt], list(given)), True


async def _answer(plan: Plan, generation: Generation) -> Json:
    with generation:
        found = await generation.collect()
    usage = generation.usage
    answers = [
        plan.answer(i, j, choice, (usage.prompts[i], usage.cached[i]))
        for i, choices in enumerate(found)
        for j, choice in enumerate(choices)
    ]
    return Json(answers if plan.several else answers[0])


async def _stream(plan: Plan, generation: Generation) -> AsyncIterator[bytes]:
    """Every event holds the whole text so far, as SGLang's do."""
    choices: dict[tuple[int, int], Choice] = {}
    with generation:
        async for rows in generation.rows():
            for key in dict.fromkeys(_taken(choices, rows)):  # one event tells of all rows that came together
                usage = generation.usage.prompts[key[0]], generation.usage.cached[key[0]]
                yield event(plan.answer(*key, choices[key], usage))


def _taken(choices: dict[tuple[int, int], Choice], rows: Iterator[tuple[int, Row]]) -> Iterator[tuple[int, int]]:
    """Add rows to their choices; yields whose they are."""
    for prompt, row in rows:
        choices.setdefault((prompt, row.choice), Choice()).add(row)
        yield prompt, row.choice
