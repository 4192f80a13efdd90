"""/generate, SGLang's native endpoint: prompts as texts or token ids, answers with `meta_info`."""

import time
from array import array
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.requests import Request

from common.logprobs import TokenLogprobs, TopLogprob
from common.messages import Finish
from common.rows import Row
from common.sampling_params import MAX_TOKEN_ID, Grammar, SamplingParams
from gateway_proc.errors import refused
from gateway_proc.generation import Choice, Generation, Prompt
from gateway_proc.http import EventStream, Json, event, while_connected
from gateway_proc.params import SEED_MASK, Defaults, logit_bias
from gateway_proc.schemas.native import NativeParams, NativeRequest
from gateway_proc.schemas.sampling import SamplingFields
from gateway_proc.service import Service

NAMES = {
    "text": "text", "token_ids": "input_ids", "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens", "grammar": "sampling_params.json_schema",
    "logprobs": "return_logprob", "prompt_logprobs": "logprob_start_len", "n": "sampling_params.n",
}  # fmt: skip
# SGLang takes no `model` here; routers that need one (smg) fill in such a word when the client said none
NO_MODEL = ("unknown", "default")


@dataclass(frozen=True, slots=True)
class Plan:
    body: NativeRequest
    id: str
    several: bool  # the answer is a list
    n: int
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
            meta |= self._logprobs(choice)
        shown = {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}
        return {**shown, "index": number} if self.several else shown

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        body = self.body
        with_text, top = bool(body.return_text_in_logprobs), body.top_logprobs_num or 0
        start = -1 if body.logprob_start_len is None else body.logprob_start_len
        inputs = list(choice.prompt_logprobs or ())[start:] if start >= 0 else []
        shown: dict[str, Any] = {
            "input_token_logprobs": [_entry(e, with_text) for e in inputs],
            "output_token_logprobs": [_entry(e, with_text) for e in choice.logprobs],
        }
        if top:
            shown["input_top_logprobs"] = [_tops(e, top, with_text) for e in inputs]
            shown["output_top_logprobs"] = [_tops(e, top, with_text) for e in choice.logprobs]
        return shown


def _entry(entry: TokenLogprobs | TopLogprob | None, with_text: bool) -> list[Any]:
    """[log probability, token id, text]; the first token of a prompt has none of them."""
    if entry is None:
        return [None, None, None]
    return [entry.logprob, entry.token_id, entry.token.decode(errors="replace") if with_text else None]


def _tops(entry: TokenLogprobs | None, top: int, with_text: bool) -> list[list[Any]] | None:
    return None if entry is None else [_entry(t, with_text) for t in entry.top[:top]]


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
    model = None if body.model in NO_MODEL else body.model
    fields = SamplingFields(
        model=model, stream=body.stream, priority=body.priority, cache_salt=body.cache_salt, request_id=body.rid
    )
    connection, _, story = service.begin(request, fields)
    sampling = body.sampling_params or NativeParams()
    params = _params(body, sampling, service.defaults)
    prompts, several = _prompts(body)
    plan = Plan(body, story.id, several or (sampling.n or 1) > 1, sampling.n or 1)
    generation = service.generation(
        connection, story, fields, prompts, params, n=plan.n, stream=bool(body.stream), names=NAMES
    )
    if body.stream:
        return EventStream(_stream(plan, generation), story)
    return await while_connected(request.receive, _answer(plan, generation))


def _prompts(body: NativeRequest) -> tuple[list[Prompt], bool]:
    """The prompts, and whether a list of them was given."""
    given = body.text if body.text is not None else body.input_ids
    assert given is not None
    if isinstance(given, str):
        return [given], False
    if isinstance(given[0], int):
        return [given], False
    return cast(list[Prompt], list(given)), True


def _params(body: NativeRequest, given: NativeParams, defaults: Defaults) -> SamplingParams:
    if given.max_new_tokens == 0:
        raise refused("sampling_params.max_new_tokens", "must be at least 1")
    grammars = [kind for kind in ("json_schema", "regex", "ebnf") if getattr(given, kind) is not None]
    if len(grammars) > 1:
        raise refused(f"sampling_params.{grammars[1]}", f"cannot be used together with {grammars[0]}")
    grammar = Grammar(grammars[0], getattr(given, grammars[0])) if grammars else None
    for token in given.stop_token_ids or ():
        if not 0 <= token <= MAX_TOKEN_ID:
            raise refused("sampling_params.stop_token_ids", f"must be token ids, got {token}")
    values: dict[str, Any] = {
        name: getattr(defaults, name) if getattr(given, name) is None else getattr(given, name)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty")
    }
    for name in ("presence_penalty", "frequency_penalty", "ignore_eos", "skip_special_tokens"):
        if getattr(given, name) is not None:
            values[name] = getattr(given, name)
    top = body.top_logprobs_num or 0
    wants_prompt = body.return_logprob and body.logprob_start_len is not None and body.logprob_start_len >= 0
    return SamplingParams(
        top_k=max(0, defaults.top_k if given.top_k is None else given.top_k),
        seed=None if given.sampling_seed is None else given.sampling_seed & SEED_MASK,
        max_tokens=given.max_new_tokens,
        min_tokens=given.min_new_tokens or 0,
        stop=(given.stop,) if isinstance(given.stop, str) else tuple(given.stop or ()),
        stop_token_ids=array("i", given.stop_token_ids or ()),
        logit_bias=logit_bias(given.logit_bias or {}),
        logprobs=top if body.return_logprob else None,
        prompt_logprobs=top if wants_prompt else None,
        grammar=grammar,
        **values,
    )


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
