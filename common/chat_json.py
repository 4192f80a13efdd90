"""Messages, tools and template arguments of a chat, from JSON-like values to what the wire carries."""

import json
from collections.abc import Sequence
from typing import Any

from common.fields import FieldError

MAX_TOOLS = 1024
_NAMES = {dict: "an object", list: "a list", str: "text", bool: "true or false"}


def chat_wire(value: Any) -> list[list[Any]]:
    """Messages as the wire carries them, with content in parts put together. An assistant that calls need say nothing.
    What is more than role and content is checked by the receiver. Raises FieldError."""
    wire = []
    for i, item in enumerate(typed(value, "messages", list)):
        where = f"messages[{i}]"
        if type(item) is not dict or "role" not in item or not ("content" in item or item["role"] == "assistant"):
            raise FieldError(where, "must be an object with role and content")
        content = item.get("content")
        if type(content) is list:
            content = _text_of(content, f"{where}.content")
        elif content is None and item["role"] == "assistant":
            content = ""
        extra = {name: value for name, value in item.items() if name not in ("role", "content")}
        wire.append([item["role"], content, json_text(extra, where) if extra else ""])
    return wire


def tools_text(value: Any) -> str:
    """Tools as the wire carries them; none are empty. Raises FieldError."""
    check_tools(value)
    return json_text(value, "tools") if value else ""


def check_tools(value: Any) -> None:
    """Raises FieldError, which names the place, for what is no list of tools in OpenAI's form."""
    tools = typed(value, "tools", list)
    if len(tools) > MAX_TOOLS:
        raise FieldError("tools", f"has {len(tools)} entries, {MAX_TOOLS} is the limit")
    for i, tool in enumerate(tools):
        function = get(typed(tool, f"tools[{i}]", dict), "function", f"tools[{i}]", dict)
        get(function, "name", f"tools[{i}].function", str)
        if function.get("parameters") is not None:
            typed(function["parameters"], f"tools[{i}].function.parameters", dict)


def arguments_text(value: Any) -> str:
    """Further variables of the chat template as the wire carries them. Raises FieldError."""
    typed(value, "chat_template_kwargs", dict)
    return json_text(value, "chat_template_kwargs") if value else ""


def json_text(value: Any, field: str) -> str:
    """Raises FieldError for what JSON cannot say."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise FieldError(field, f"is not JSON: {error}") from None


def _text_of(parts: Sequence[Any], field: str) -> str:
    texts = []
    for part in parts:
        if type(part) is not dict or part.get("type") != "text" or type(part.get("text")) is not str:
            raise FieldError(field, "parts must be of type text")
        texts.append(part["text"])
    return "\n".join(texts)  # as the gateway and vLLM join them


def typed(value: Any, field: str, expected: type) -> Any:
    """A value of just this type. Raises FieldError."""
    if type(value) is not expected:
        raise FieldError(field, f"must be {_NAMES[expected]}, not {type(value).__name__}")
    return value


def get(values: dict[str, Any], name: str, where: str, expected: type) -> Any:
    """A value by its name, as `typed`; `where` is the place of the object. Raises FieldError."""
    if name not in values:
        raise FieldError(f"{where}.{name}", "is missing")
    return typed(values[name], f"{where}.{name}", expected)
