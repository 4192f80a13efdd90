"""What a client sends for a chat, as the chat template wants it: messages, tools and arguments, checked and decoded."""

import json
import re
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

from common.chat_json import check_tools, get, typed
from common.fields import FieldError
from common.messages import ChatMessage

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
_TEXTS = ("name", "tool_call_id", "reasoning_content")
_BOOLEANS = frozenset({"enable_thinking"})
_ESCAPED_SURROGATE = r"\ud"
_HALF = re.compile("[\ud800-\udfff]")


def parse_messages(chat: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages for a template. Raises FieldError with the place of what is wrong."""
    messages = []
    for i, message in enumerate(chat):
        parsed: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.extra:
            parsed |= _parse_extra(message.extra, f"chat[{i}]")
        messages.append(parsed)
    return _in_order(messages)


def _in_order(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with the results of a message's calls in the order of these: many templates show no ids, so that the
    model has only that to go by. Where one of the results names no call they stay as they are."""
    ordered: list[dict[str, Any]] = []
    places: dict[Any, int] = {}  # of the calls of the message before
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        found = list(group)
        if not are_results:
            calls = found[-1].get("tool_calls", ())
            places = {call["id"]: i for i, call in enumerate(calls) if isinstance(call.get("id"), str)}
        elif all(message.get("tool_call_id") in places for message in found):
            found.sort(key=lambda message: places[message["tool_call_id"]])
        ordered += found
    return ordered


def parse_tools(text: str) -> list[dict[str, Any]] | None:
    """The tools that the text holds, None where it is empty. Raises FieldError with the place of what is wrong."""
    if not text:
        return None
    tools: list[dict[str, Any]] = _decode(text, "tools", list)
    check_tools(tools)
    return tools or None


def parse_template_args(text: str, known: Collection[str]) -> dict[str, Any]:
    """Further variables of the template, which uses the `known` ones. Raises FieldError, which names what is wrong."""
    if not text:
        return {}
    values: dict[str, Any] = _decode(text, "template_args", dict)
    for name, value in values.items():
        field = f"template_args.{name}"[:256]
        if name in _RESERVED:
            raise FieldError(field, "is set by other fields of the request")
        if name not in known:
            names = ", ".join(sorted(set(known) - _RESERVED)) or "none"
            raise FieldError(field, f"this model's chat template does not use it; it uses {names}")
        if name in _BOOLEANS:
            typed(value, field, bool)
    return values


def _parse_extra(text: str, where: str) -> dict[str, Any]:
    values: dict[str, Any] = _decode(text, where, dict)
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if name in _TEXTS:
            parsed[name] = typed(value, f"{where}.{name}", str)
        elif name == "tool_calls":
            calls = typed(value, f"{where}.tool_calls", list)
            parsed[name] = [_parse_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
        else:
            raise FieldError(f"{where}.{name}"[:256], "is not known")
    return parsed


def _parse_call(call: Any, where: str) -> dict[str, Any]:
    """A call of an earlier answer. Templates want its arguments decoded, OpenAI's form has them as JSON text."""
    function = get(typed(call, where, dict), "function", where, dict)
    get(function, "name", f"{where}.function", str)
    field = f"{where}.function.arguments"
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _arguments(arguments, field)
    elif arguments is None:
        arguments = {}
    return {**call, "function": {**function, "arguments": typed(arguments, field, dict)}}


def _arguments(text: str, field: str) -> Any:
    """Models break off in their calls and clients send them back with all that follows: what is no object counts as an
    empty one, as in vLLM, for else the conversation could not go on."""
    try:
        return _decode(text, field, dict)
    except FieldError:
        return {}


def _decode(text: str, field: str, expected: type) -> Any:
    try:
        value = json.loads(text)
        if _ESCAPED_SURROGATE in text.lower():
            value = _whole(value)
    except ValueError as error:
        raise FieldError(field, f"is not JSON: {error}") from None
    except RecursionError:
        raise FieldError(field, "is nested too deeply") from None
    return typed(value, field, expected)


def _whole(value: Any) -> Any:
    """Halves of surrogate pairs replaced: models cut emoji in their calls, and clients send them back."""
    if isinstance(value, str):
        return _HALF.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, list):
        return [_whole(entry) for entry in value]
    if isinstance(value, dict):
        return {_whole(name): _whole(entry) for name, entry in value.items()}
    return value
