"""JSON schemas as applications send them, each with values that it accepts and rejects, and grammars made to hurt."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.sampling_params import Grammar


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]


CASES = [
    Case(**json.loads(line)) for line in (Path(__file__).parent / "grammar_cases.jsonl").read_text("utf-8").splitlines()
]
_INT, _TEXT = {"type": "integer"}, {"type": "string"}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = _object({"a": schema})
    return schema


def _doubling(levels: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {
        f"d{i}": _object({key: {"$ref": f"#/$defs/d{i + 1}"} for key in "ab"}) for i in range(levels)
    }
    return {"$defs": {**definitions, f"d{levels}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def _schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


_SOME = [_object({f"a{j}": _INT}) for j in range(4)]
HOSTILE = {
    "references doubled 30 times": _schema(_doubling(30)),
    "allOf of 12 anyOf of 4": _schema({"allOf": [{"anyOf": _SOME}] * 12}),
    "40 levels of objects": _schema(_nested(40)),
    "1,000 patterns": _schema(
        _object({f"k{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i + 1}}}$"} for i in range(1000)})
    ),
    "200 open optionals": _schema({"type": "object", "properties": {f"k{i}": _TEXT for i in range(200)}}),
    "maxLength 1,000,000": _schema({"type": "string", "maxLength": 1_000_000}),
    "maxItems 100,000": _schema({"type": "array", "items": _INT, "maxItems": 100_000, "minItems": 50_000}),
    "nested repetition": Grammar("regex", "((a{1,300}){1,300}){1,300}"),
    "catastrophic backtracking": Grammar("regex", "(x+x+)+y"),
    "states double": Grammar("regex", "(.*[abc].{0,30}){10}"),
    "many states": Grammar("regex", ".*a.{30}b.*c.{30}"),
    "long regex": Grammar("regex", "(abc|de)" * 20_000),
    "deep brackets": Grammar("regex", "(" * 2000 + "a" + ")" * 2000),
    "deep JSON": Grammar("json_schema", '{"items":' * 50_000 + "{}" + "}" * 50_000),
}
