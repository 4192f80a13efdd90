"""Bad requests, made from the schemas: every field of every body with values that it does not take.

The table is not written by hand: fields come from the pydantic models of the routes, and whether a value is wrong for a
field is what the field's own JSON schema says. So a new field is covered by itself.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

from gateway_proc.app import ROUTES
from gateway_proc.schemas.base import ApiModel

MARK = "\ue000mark\ue000"
LONE = '"\\ud800"'
DEEP = 150  # levels: the parser itself ends at 200
VALUES = (  # JSON, and what only some parsers take for it
    "null", "true", "-1", "0", "0.5", "7", "1e308", "1e999", "-1e999", "NaN", "Infinity", "-Infinity",
    str(2**31), str(2**63), str(-(2**63) - 1), "9" * 400, '""', '"x"', LONE, '"\\u0000"', '"\\uffff"',
    json.dumps("x" * 70_000), "[]", "{}", "[null]", "[[]]", "[-1]", "[1e30]", "[4294967296]", '["x"]', '[""]', '[{}]',
    '{"":0}', '{"x":NaN}', '{"-1":5}', '{"99999999":1}', "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP,
    json.dumps([0] * 5000), json.dumps(["s"] * 2000), json.dumps({str(i): 0 for i in range(3000)}),
)  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {  # what makes a body right where the schema alone does not say so
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 2}},
    "/tokenize": {"prompt": "x"},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
}


@dataclass(frozen=True, slots=True)
class BadBody:
    """A body for `path` with one value exchanged. `wrong`: the field's schema does not allow it, so the answer must be
    a 4xx that names the field; else any answer but a failure will do."""

    path: str
    field: str
    value: str
    body: bytes
    wrong: bool


def bodies() -> dict[str, type[ApiModel]]:
    """The model of the body of every endpoint that takes one."""
    return {route.path: route.body for route in ROUTES if route.body is not None}


def bad_bodies(path: str) -> Iterator[BadBody]:
    """Every field of an endpoint's body with every value, and without it where it is needed."""
    schema = bodies()[path].model_json_schema()
    root = Draft202012Validator(schema)
    base = {name: least(root, schema["properties"][name]) for name in schema.get("required", ())}
    base |= NEEDED.get(path, {})
    for name in schema.get("required", ()):
        without = {k: v for k, v in base.items() if k != name}
        yield BadBody(path, name, "missing", json.dumps(without).encode(), True)
    for field, exchange in fields_of(root, schema, base):
        for value in VALUES:
            marked = json.dumps(exchange(MARK))
            raw = marked.replace(json.dumps(MARK), value)
            named = "" if value == LONE else field  # a lone surrogate is no JSON: the body as a whole is refused
            yield BadBody(path, named, value[:40], raw.encode(), not allows(root, raw, value))
        invalid = json.dumps(exchange(MARK)).replace(json.dumps(MARK), '"\xff\xfe"').encode("latin-1")
        yield BadBody(path, "", f"{field} is not UTF-8", invalid, True)


def allows(root: Draft202012Validator, body: str, value: str) -> bool:
    """Whether a body is right with this value in it, as far as its schema tells."""
    parsed = json.loads(value)
    if value == LONE or (isinstance(parsed, float) and not math.isfinite(parsed)):
        return False
    return bool(root.is_valid(json.loads(body)))


def resolved(root: Draft202012Validator, schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = root.schema["$defs"][schema["$ref"].rpartition("/")[2]]
    return schema


def variants(root: Draft202012Validator, schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The schema, or those of which it is a union."""
    schema = resolved(root, schema)
    options = schema.get("anyOf") or schema.get("oneOf")
    if options is None:
        return [schema]
    return [found for option in options for found in variants(root, option)]


def fields_of(
    root: Draft202012Validator, schema: dict[str, Any], value: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """(path, how to exchange it) of every field of an object like `value`, those inside others too."""
    for name, sub in schema.get("properties", {}).items():
        field = f"{prefix}{name}"

        def exchange(new: Any, name: str = name) -> dict[str, Any]:
            return {**value, name: new}

        yield field, exchange
        for option in variants(root, sub):
            if "properties" in option:
                inner = least(root, option)
                for found, change in fields_of(root, option, inner, f"{field}."):
                    yield found, lambda new, e=exchange, c=change: e(c(new))
            elif option.get("type") == "array":
                for item in variants(root, option.get("items", {})):
                    if "properties" in item:
                        inner = least(root, item)
                        for found, change in fields_of(root, item, inner, f"{field}[0]."):
                            yield found, lambda new, e=exchange, c=change: e([c(new)])
                    elif item:
                        yield f"{field}[0]", lambda new, e=exchange: e([new])


def least(root: Draft202012Validator, schema: dict[str, Any]) -> Any:
    """The smallest value that a schema allows."""
    schema = variants(root, schema)[0]
    if "enum" in schema or "const" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    match schema.get("type"):
        case "object":
            return {name: least(root, schema["properties"][name]) for name in schema.get("required", ())}
        case "array":
            return [least(root, schema["items"])] * schema.get("minItems", 0)
        case "string":
            return "x"
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return False
    return None
