"""What a text is in JSON, as far as a JSON schema tells: for calls whose parameters are written without quotes."""

import ast
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

_MAX_PYTHON = 2**14  # characters
STRING = frozenset({"string"})
_KINDS: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object",
}  # fmt: skip
ANY_BUT_STRING = frozenset(_KINDS.values()) - STRING


def types_of(schema: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """The types that this property of an object can have: a string's where the object's schema says nothing of it."""
    root = schema or {}
    properties = root.get("properties")
    own = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_types(root.get("additionalProperties") if own is None else own, root)) or STRING


def is_text(schema: Mapping[str, Any] | None, key: str) -> bool:
    """Whether the object's schema says that this property is a string."""
    properties = (schema or {}).get("properties")
    return isinstance(properties, Mapping) and key in properties and types_of(schema, key) == STRING


def as_json(text: str, types: frozenset[str]) -> str:
    """A text as JSON of one of these types, which is a string where it is none of the others."""
    bare = text.strip()
    word = bare.lower()  # Python's words, too: some templates show models their earlier calls with these
    if "null" in types and word in ("null", "none"):
        return "null"
    if "boolean" in types and word in ("true", "false"):
        return word
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        bare, value = _python(bare)
    kinds = {_KINDS.get(type(value), "string")}
    if isinstance(value, float) and value.is_integer():
        kinds.add("integer")
    if "integer" in kinds:
        kinds.add("number")
    return bare if kinds - STRING & types else _string(text)


def _types(schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """Types that a schema speaks of. It may be wrong in any way, and refer to itself."""
    pending, seen = [schema], set()
    while pending:
        each = pending.pop()
        if not isinstance(each, Mapping) or id(each) in seen:
            continue
        seen.add(id(each))
        named = each.get("type")
        yield from (name for name in ([named] if isinstance(named, str) else _list(named)) if isinstance(name, str))
        yield from (_KINDS.get(type(value), "string") for value in _list(each.get("enum")))
        if "const" in each:
            yield _KINDS.get(type(each["const"]), "string")
        pending += [choice for name in ("anyOf", "oneOf", "allOf") for choice in _list(each.get(name))]
        if isinstance(each.get("$ref"), str):
            pending.append(_at(root, each["$ref"]))


def _python(text: str) -> tuple[str, Any]:
    """Lists and dictionaries as Python writes them, which MiniCPM5's template shows of earlier calls, as JSON."""
    if text.startswith(("[", "{")) and len(text) <= _MAX_PYTHON:
        try:
            with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
                value = ast.literal_eval(text)
            return json.dumps(value, ensure_ascii=False, allow_nan=False), value
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            pass
    return text, text


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _at(root: Mapping[str, Any], reference: str) -> Any:
    """What a reference within the schema leads to."""
    found: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
