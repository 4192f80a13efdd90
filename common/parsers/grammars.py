"""Grammars that are made from requests: calls that must be made, and reasoning before an answer under a grammar.

Where JSON schemas are not enough they are llguidance's variant of Lark, with schemas inside (`%json`). They are only
written here: the tokenizer process checks them like any other.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.grammars import JSON_OPTIONS
from common.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from common.parsers.formats import LISTS, Reasoning, ToolFormat
from common.parsers.reasoning import THINK
from common.sampling_params import Grammar

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_TO_FUNCTION = "to=functions."
_LITERAL = frozenset({"const", "enum", "default", "examples"})  # what is in them is data, not a schema
_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # of schemas


def force_call(
    tools: Sequence[tuple[str, Mapping[str, Any] | None]], tool_format: ToolFormat, *, parallel: bool = True
) -> Grammar:
    """An answer that is one call or, when `parallel`, one or several, of the `tools`: pairs of a name and the JSON
    schema of its parameters (None: it has none). For a named function, give that one alone.

    Read the answer with `make_parser(tools=tool_format, forced=True)`.
    """
    if not tools:
        raise ValueError("no tool to call")
    if tool_format is ToolFormat.HARMONY:
        return _force_harmony(tools)
    call, definitions = _call(tools, "parameters" if tool_format is ToolFormat.LLAMA3_JSON else "arguments")
    if tool_format in LISTS:
        most = {} if parallel else {"maxItems": 1}
        schema = {"type": "array", "items": call, "minItems": 1, **most, "$defs": definitions}
        return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))
    if tool_format is ToolFormat.HERMES:
        around, between = ('"<tool_call>\\n" object "\\n</tool_call>"', '"\\n"')
    else:
        around, between = ("object", '"; "')
    several = f" ({between} call)*" if parallel else ""
    return Grammar("lark", f"start: call{several}\ncall: {around}\n{_rule('object', call, definitions)}")


def offer_calls(
    tools: Sequence[tuple[str, Mapping[str, Any] | None]], reasoning: Reasoning, answer: Mapping[str, Any] | None = None
) -> Grammar:
    """An answer in which calls in the Hermes format, or harmony's where the model reasons in a channel, are of the
    `tools` (as for `force_call`) and the rest is text; with `answer`, a JSON schema, it is calls or JSON that this
    accepts. The model's reasoning may precede it.

    Read the answer with `make_parser(tools=ToolFormat.HERMES)`, or HARMONY.
    """
    if reasoning is Reasoning.CHANNEL:
        return _offer_harmony(tools, answer)
    call, definitions = _call(tools, "arguments")
    rules = f'call: SPACE object SPACE "</tool_call>"\nSPACE: /[ \\n]{{0,8}}/\n{_rule("object", call, definitions)}'
    if answer is not None:
        start = 'start: "<tool_call>" call (SPACE "<tool_call>" call)* | answer\n'
        return after_reasoning(Grammar("lark", f"{start}{rules}{_rule('answer', answer)}"), reasoning)
    rules = f"start: (first call (before call)*)? text\ntext: ANY\nANY: /(?s:.*)/\n{rules}"
    # A lazy rule ends where it is complete for the first time: what follows is a call.
    rules += 'before[lazy]: ANY "<tool_call>"\n'
    if reasoning is not Reasoning.TAGS:
        return after_reasoning(Grammar("lark", f'{rules}first[lazy]: ANY "<tool_call>"\n'), reasoning)
    # Text could be a thought as well, so what is in one must be told from it here.
    opened, closed = f"/[ \\n]{{0,8}}{THINK.open}(?s:.*)/", f"/(?s:.*){THINK.close}/".replace("</", "<\\/")
    rules += f'first[lazy]: (THOUGHT ANY | ANY & ~OPENED) "<tool_call>"\nOPENED: {opened}\n'
    return Grammar("lark", f"{rules}THOUGHT: OPENED & {closed}\n")


def _call(tools: Sequence[tuple[str, Mapping[str, Any] | None]], key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON schema of a call whose arguments are under `key`, and the definitions that it refers to."""
    definitions: dict[str, Any] = {}
    calls = []
    for i, (name, parameters) in enumerate(tools):
        definitions[f"tool{i}"] = _moved(_arguments(parameters), f"#/$defs/tool{i}")
        properties = {"name": {"const": name}, key: {"$ref": f"#/$defs/tool{i}"}}
        calls.append(
            {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
        )
    return calls[0] if len(calls) == 1 else {"anyOf": calls}, definitions


def _rule(name: str, schema: Mapping[str, Any], definitions: Mapping[str, Any] | None = None) -> str:
    defined = {"$defs": definitions} if definitions is not None else {}
    body = {"x-guidance": JSON_OPTIONS, **schema, **defined}
    return f"{name}: %json {json.dumps(body, ensure_ascii=False)}\n"


def _force_harmony(tools: Sequence[tuple[str, Mapping[str, Any] | None]]) -> Grammar:
    """One message to a function; more calls than one are none of gpt-oss' habits."""
    return Grammar("lark", f"start: call\n{_harmony_calls(tools)}")


def _offer_harmony(tools: Sequence[tuple[str, Mapping[str, Any] | None]], answer: Mapping[str, Any] | None) -> Grammar:
    """Messages that end with one in the final channel or with a call. No text is a special token, so texts are free."""
    text = "answer: TEXT\n" if answer is None else _rule("answer", answer)
    final = f'{CHANNEL} ("final" | "final " {CONSTRAIN} "json") {MESSAGE} answer\n{text}'
    said = f'{CHANNEL} ("analysis" | "commentary") {MESSAGE} TEXT {END} {START} "assistant"'
    rules = f"start: said* (final | call)\nsaid: {said}\nfinal: {final}TEXT: /(?s:.*)/\n"
    return Grammar("lark", rules + _harmony_calls(tools))


def _harmony_calls(tools: Sequence[tuple[str, Mapping[str, Any] | None]]) -> str:
    """Rules for a message to a function, with its header in one of the forms that gpt-oss writes."""
    rules = [f"call: {' | '.join(f'call{i}' for i in range(len(tools)))}", f'json: "json" | {CONSTRAIN} "json"']
    for i, (name, parameters) in enumerate(tools):
        to = f"{_TO_FUNCTION}{name}"
        schema = {**_arguments(parameters), "x-guidance": JSON_OPTIONS}
        rules += [
            f"call{i}: header{i} json {MESSAGE} arguments{i}",
            f"header{i}: {_quoted(f' {to}')} {CHANNEL} {_quoted('commentary ')}",
            f"    | {CHANNEL} {_quoted(f'commentary {to} ')}",
            f"arguments{i}: %json {json.dumps(schema, ensure_ascii=False)}",
        ]
    return "\n".join([*rules, ""])


def after_reasoning(grammar: Grammar, reasoning: Reasoning, *, forced: bool = False) -> Grammar:
    """The same with the model's reasoning before it, up to `</think>`, where it reasons. In the harmony format the
    answer goes to the final channel, unless `forced` says that it is one of `force_call`, which has its own header."""
    match reasoning:
        case Reasoning.NONE:
            return grammar
        case Reasoning.OPENED:
            return replace(grammar, closing=THINK.close)
        case Reasoning.TAGS:
            return replace(grammar, opening=THINK.open, closing=THINK.close)
        case Reasoning.CHANNEL:
            heading = "" if forced else f"{CHANNEL}final{MESSAGE}"
            opening, closing = f"{CHANNEL}analysis{MESSAGE}", f"{END}{START}assistant"
            return replace(grammar, opening=opening, closing=closing, heading=heading)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _arguments(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The schema of a call's arguments, which are an object also where `parameters` do not say so."""
    if parameters is None:
        return _NO_PARAMETERS
    return parameters if "type" in parameters else {"type": "object", **parameters}


def _moved(schema: Any, base: str) -> Any:
    """A schema that stands at `base` of another one: its references to itself must lead there."""
    if isinstance(schema, Mapping):
        moved: dict[str, Any] = {}
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str) and value.startswith("#"):
                moved[key] = base + value[1:]
            elif key in _NAMES and isinstance(value, Mapping):
                moved[key] = {name: _moved(named, base) for name, named in value.items()}
            else:
                moved[key] = value if key in _LITERAL else _moved(value, base)
        return moved
    if isinstance(schema, list | tuple):
        return [_moved(item, base) for item in schema]
    return schema
