"""Requests and answers in OpenAI's format: bodies from checked requests, rows from chunks and whole answers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from client_cli.openai_logprobs import logprobs_of, prompt_logprobs_of
from common.logprobs import TokenLogprobs
from common.messages import ChatMessage, ErrorCode, Finish, RequestError
from common.sampling_params import Grammar, SamplingParams

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_DEFAULTS = SamplingParams()
_EMPTY = {
    "n": 1, "cache_salt": "", "priority": 0, "deadline_ms": 0, "template_args": "", "add_generation_prompt": True,
    "continue_final_message": False, "truncate_prompt_tokens": None, "truncation_side": "",
}  # fmt: skip
_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}
_CODES = {408: ErrorCode.DEADLINE, 413: ErrorCode.TOO_LONG, 429: ErrorCode.OVERLOADED, 504: ErrorCode.DEADLINE}


def to_body(
    prompt: str | Sequence[int] | Sequence[ChatMessage],
    params: SamplingParams,
    model: str,
    *,
    stream: bool,
    **more: Any,
) -> tuple[str, dict[str, Any]]:
    """The path and body of a request. Values that are the default are left out, so that servers with fewer fields than
    ours take everything that they can do. `more` is what else `submit` takes."""
    body: dict[str, Any] = {"model": model}
    if prompt and isinstance(prompt[0], ChatMessage):
        path = CHAT
        body["messages"] = [_message(m) for m in prompt if isinstance(m, ChatMessage)]
    else:
        path = COMPLETIONS
        body["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
    for name in (field.name for field in fields(SamplingParams)):
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            body |= _field(name, value, path)
    body |= {name: value for name, value in more.items() if value != _EMPTY[name]}
    if "template_args" in body:
        body["chat_template_kwargs"] = json.loads(body.pop("template_args"))
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return path, body


def _message(message: ChatMessage) -> dict[str, Any]:
    more = json.loads(message.extra) if message.extra else {}
    return {"role": message.role, "content": message.content, **more}


def _field(name: str, value: Any, path: str) -> dict[str, Any]:
    """A field of SamplingParams as OpenAI's API has it, or as vLLM extends it."""
    match name:
        case "stop" | "stop_token_ids" | "allowed_token_ids" | "bad_words":
            return {name: list(value)}
        case "logit_bias":
            return {name: {str(token): bias for token, bias in value.items()}}
        case "logprobs" if path == CHAT:
            return {"logprobs": True, "top_logprobs": value}
        case "grammar":
            return _response_format(value)
    return {name: value}


def _response_format(grammar: Grammar) -> dict[str, Any]:
    match grammar.kind:
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "json_schema":
            schema = {"name": "answer", "schema": _json_or_same(grammar.text)}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case "choice":
            return {"structured_outputs": {"choice": _json_or_same(grammar.text)}}
        case "regex":
            return {"structured_outputs": {"regex": grammar.text}}
    return {"structured_outputs": {"grammar": grammar.text}}


def _json_or_same(text: str) -> Any:
    """What is no JSON goes as it is: the server refuses it by name."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


@dataclass(frozen=True, slots=True)
class Piece:
    """What a chunk says of one choice. `finish` is NONE while it goes on. `generated`: a token stands behind it, though
    it may have no text yet; a chat's first chunk, which names the role, has none."""

    choice: int
    text: str
    thought: str
    token_ids: Sequence[int]
    finish: Finish
    generated: bool
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int | None  # of all choices; None: the server does not say
    cached_tokens: int


def pieces(answer: dict[str, Any], top: int | None = None, prompt_top: int | None = None) -> list[Piece]:
    """The choices of a chunk or of a whole answer, of either kind of completion; `top` and `prompt_top` are what was
    asked for as `logprobs` and `prompt_logprobs`."""
    found = []
    for choice in answer.get("choices") or ():
        said = choice.get("delta") or choice.get("message") or choice
        text = said.get("content") if said is not choice else choice.get("text")
        thought = said.get("reasoning_content") or said.get("reasoning") or ""
        reason = choice.get("finish_reason")
        finish = Finish.NONE if reason is None else _FINISH.get(reason, Finish.STOP)
        ids = choice.get("token_ids") or ()
        generated = bool(text or thought or ids or "role" not in said)
        scores = None if top is None else logprobs_of(choice, top)
        scored = choice.get("prompt_logprobs") or answer.get("prompt_logprobs")  # of completions, of chats
        prompt = prompt_logprobs_of(scored, prompt_top) if scored and prompt_top is not None else None
        found.append(Piece(choice.get("index", 0), text or "", thought, ids, finish, generated, scores, prompt))
    return found


def usage_of(answer: dict[str, Any]) -> Usage | None:
    """The token counts of a chunk or answer, if it has them."""
    usage = answer.get("usage")
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage.get("prompt_tokens") or 0, usage.get("completion_tokens"), details.get("cached_tokens") or 0)


def json_or_text(text: str) -> Any:
    """What a server said that may have failed: its JSON value, or its text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()[:500] or "no reason given"


def error_of(rid: int, status: int, answer: Any) -> RequestError:
    """What a server said instead of an answer. `answer` is its JSON value, or its text."""
    said = answer.get("error", answer) if isinstance(answer, dict) else answer
    field = ""
    if isinstance(said, dict):
        field = said["param"] if isinstance(said.get("param"), str) else ""
        said = said.get("message") or said.get("detail") or said
    problem = f"HTTP {status}: {said}" if status != 200 else str(said)
    code = _CODES.get(status, ErrorCode.INVALID if 400 <= status < 500 else ErrorCode.INTERNAL)
    return RequestError(rid, code, problem[:4096], field[:256])
