"""Requests as JSON-like values, as the client's files and flags give them: checked against the wire schema."""

import json
import re
from array import array
from dataclasses import dataclass, fields, replace
from typing import Any

from common.chat_json import arguments_text, chat_wire, tools_text
from common.codec import schema_of
from common.fields import FieldError, Ints
from common.messages import ChatMessage, Generate, RequestError
from common.sampling_params import MAX_TOKEN_ID, SamplingParams

PROMPT_FIELDS = ("prompt", "token_ids", "messages")
CHAT_FIELDS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
CUT_FIELDS = ("truncate_prompt_tokens", "truncation_side")
REQUEST_FIELDS = ("n", "cache_salt", "priority", "deadline_ms", *CHAT_FIELDS, *CUT_FIELDS)
_NAMES = {"text": "prompt", "chat": "messages", "template_args": "chat_template_kwargs"}  # of Generate: here


@dataclass(frozen=True, slots=True)
class JsonRequest:
    """A checked request: the prompt is text, token ids or chat messages; the other fields are as in `Generate`."""

    prompt: str | list[int] | list[ChatMessage]
    params: SamplingParams
    n: int = 1
    cache_salt: str = ""
    priority: int = 0
    deadline_ms: int = 0
    tools: str = ""
    template_args: str = ""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """What `submit` of a connection takes beside prompt and parameters."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("prompt", "params")}


def parse_request(values: dict[str, Any]) -> JsonRequest:
    """Check a request given as JSON-like values: one of prompt, token_ids and messages, the fields of
    REQUEST_FIELDS, and sampling fields. CHAT_FIELDS are as in vLLM's requests.

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
        prompt = list(generate["chat"].unpack(chat_wire(value), "messages"))
    params = {}
    for name, checker in sampling.items():
        if name in values:
            value = values[name]
            if name == "stop" and isinstance(value, str):
                value = [value]
            if name == "stop_token_ids" or (name == "allowed_token_ids" and value is not None):
                value = _int_bytes(value, name)
            elif name == "logit_bias":
                value = _int_map(value, name)
            elif name == "grammar":
                value = _grammar_wire(value)
            params[name] = checker.unpack(value, name)
    wire = _chat_fields(values, given[0] == "messages")
    options = {name: generate[name].unpack(value, _NAMES.get(name, name)) for name, value in wire.items()}
    return JsonRequest(prompt, SamplingParams(**params), **options)


def named_here(error: RequestError) -> RequestError:
    """What the cluster refused, with the name that its field has in requests given as JSON-like values."""
    stem, *rest = re.split(r"(?=[.\[])", error.field, maxsplit=1)
    field = "".join((_NAMES.get(stem, stem), *rest))[:256]
    problem = error.problem.removeprefix(f"{error.field}: ")
    if problem != error.problem:
        problem = f"{field}: {problem}"[:4096]
    return replace(error, field=field, problem=problem)


def _chat_fields(values: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    """The fields of REQUEST_FIELDS as the wire has them; None leaves one of CHAT_FIELDS and CUT_FIELDS out."""
    found = {name: values[name] for name in REQUEST_FIELDS if name in values}
    for name in (*CHAT_FIELDS, *CUT_FIELDS):
        if found.get(name, 0) is None:
            del found[name]
        elif name in found and name in CHAT_FIELDS and not is_chat:
            raise FieldError(name, "is for chats")
    if found.get("continue_final_message") is True and found.setdefault("add_generation_prompt", False) is True:
        raise FieldError("continue_final_message", "cannot be together with add_generation_prompt")
    if "tools" in found:
        found["tools"] = tools_text(found["tools"])
    if "chat_template_kwargs" in found:
        found["template_args"] = arguments_text(found.pop("chat_template_kwargs"))
    return found


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
