"""Requests as JSON-like values, as the client's files and flags give them: checked against the wire schema."""

import json
from array import array
from dataclasses import dataclass
from typing import Any

from common.codec import schema_of
from common.fields import FieldError, Ints
from common.messages import ChatMessage, Generate
from common.sampling_params import MAX_TOKEN_ID, SamplingParams

PROMPT_FIELDS = ("prompt", "token_ids", "messages")
REQUEST_FIELDS = ("n", "cache_salt", "priority", "deadline_ms")


@dataclass(frozen=True, slots=True)
class JsonRequest:
    """A checked request: the prompt is text, token ids or chat messages; the other fields are as in `Generate`."""

    prompt: str | list[int] | list[ChatMessage]
    params: SamplingParams
    n: int = 1
    cache_salt: str = ""
    priority: int = 0
    deadline_ms: int = 0


def parse_request(values: dict[str, Any]) -> JsonRequest:
    """Check a request given as JSON-like values: one of prompt, token_ids and messages, the fields of
    REQUEST_FIELDS, and sampling fields.

    Raises FieldError, which names the field, for anything unknown, missing or outside its range.
    """
    sampling = dict(schema_of(SamplingParams))
    known = (*PROMPT_FIELDS, *REQUEST_FIELDS, *sampling)
    for name in values:
        if name not in known:
            raise FieldError(name or '""', f"is not known; known are {', '.join(known)}")
    given = [name for name in PROMPT_FIELDS if values.get(name) is not None]
    if len(given) != 1:
        raise FieldError("prompt", f"exactly one of {', '.join(PROMPT_FIELDS)} must be given")
    generate = dict(schema_of(Generate))
    value = values[given[0]]
    prompt: Any
    if given[0] == "prompt":
        prompt = generate["text"].unpack(value, "prompt")
    elif given[0] == "token_ids":
        prompt = list(generate["token_ids"].unpack(_int_bytes(value, "token_ids"), "token_ids"))
    else:
        prompt = list(generate["chat"].unpack(_chat_wire(value), "messages"))
    params = {}
    for name, checker in sampling.items():
        if name in values:
            value = values[name]
            if name == "stop" and isinstance(value, str):
                value = [value]
            if name == "stop_token_ids":
                value = _int_bytes(value, name)
            elif name == "logit_bias":
                value = _int_map(value, name)
            elif name == "grammar":
                value = _grammar_wire(value)
            params[name] = checker.unpack(value, name)
    options = {name: generate[name].unpack(values[name], name) for name in REQUEST_FIELDS if name in values}
    return JsonRequest(prompt, SamplingParams(**params), **options)


def _int_bytes(value: Any, field: str) -> bytes:
    """A JSON list of integers as the wire carries it."""
    if type(value) is not list or any(type(v) is not int for v in value):
        raise FieldError(field, "must be a list of integers")
    try:
        return Ints(len(value)).pack(array("i", value))
    except OverflowError:
        raise FieldError(field, f"entries must be between 0 and {MAX_TOKEN_ID}") from None


def _int_map(value: Any, field: str) -> list[Any]:
    """A JSON object with token ids for keys as the wire carries it."""
    if type(value) is not dict:
        raise FieldError(field, "must be an object from token ids to numbers")
    try:
        keys = [int(key) for key in value]
    except ValueError:
        raise FieldError(field, "keys must be token ids") from None
    return [_int_bytes(keys, field), list(value.values())]


def _grammar_wire(value: Any) -> list[Any] | None:
    """A JSON object with the fields of Grammar as the wire carries it. A schema or choices may be JSON themselves."""
    if value is None:
        return None
    rest = ("opening", "closing", "heading")
    if type(value) is not dict or not {"kind"} <= set(value) <= {"kind", "text", *rest}:
        raise FieldError("grammar", f"must be an object with kind, and text, {', '.join(rest)} where they are needed")
    text = value.get("text", "")
    if type(text) in (dict, list):
        text = json.dumps(text, ensure_ascii=False)
    return [value["kind"], text, *(value.get(name, "") for name in rest)]


def _chat_wire(value: Any) -> list[list[Any]]:
    """JSON chat messages as the wire carries them. What is more than role and content is checked by the receiver."""
    if type(value) is not list:
        raise FieldError("messages", "must be a list")
    wire = []
    for i, item in enumerate(value):
        if type(item) is not dict or not {"role", "content"} <= set(item):
            raise FieldError(f"messages[{i}]", "must be an object with role and content")
        extra = {name: value for name, value in item.items() if name not in ("role", "content")}
        wire.append([item["role"], item["content"], json.dumps(extra, ensure_ascii=False) if extra else ""])
    return wire
