"""Grammars in the form that the grammar library (llguidance) takes, and the limits under which it works.

The tokenizer process checks a grammar with the library, a worker follows it; both must see the same. This module does
not load the library.
"""

import json
import re
from typing import Any

from common.sampling_params import Grammar

# Between the parts of JSON: a space, or a new line with its indentation. Unbounded white space, which the library
# allows, lets a weak model write nothing else until its tokens are used up.
JSON_OPTIONS: dict[str, Any] = {"whitespace_pattern": r" |\n[ \t]{0,40}"}

MAX_CHOICES = 4096
_SPECIAL = re.compile(r"(<\|\w+\|>)")

# What the library may spend. A step is the work for one token of one request; in milliseconds it is what the library
# documents and bench/grammars.py measures on hostile grammars.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # 20 ms
    "step_lexer_fuel": 100_000,  # 7 ms
    "step_max_items": 50_000,  # 3 ms
    "max_lexer_states": 10_000,  # 20 MB a request
    "max_grammar_size": 200_000,
    "verbose_errors": False,  # they would put what was generated into logs
}


class GrammarError(ValueError):
    """A grammar that cannot be used. The text says why."""


def to_llguidance(grammar: Grammar) -> str:
    """The library's JSON form of a grammar. Raises GrammarError for what can be said without the library."""
    try:
        return _library_form(grammar)
    except RecursionError:  # while JSON is read, or written with what goes around it
        raise GrammarError("text: is nested too deeply") from None


def _library_form(grammar: Grammar) -> str:
    answer = _answer(grammar)
    if not grammar.closing:
        if grammar.opening or grammar.heading:
            raise GrammarError("opening and heading: have no meaning without a closing")
        return json.dumps({"grammars": [answer]})
    around = _in_special_tokens(grammar) if _SPECIAL.search(grammar.closing) else _in_text(grammar)
    return json.dumps({"grammars": [{"lark_grammar": around}, {"name": "answer", **answer}]})


def _in_text(grammar: Grammar) -> str:
    # A rule with a suffix ends where the suffix is complete for the first time.
    thought = f"thought[suffix={json.dumps(grammar.closing)}]: /(?s:.*)/\n"
    heading = f"SPACE {_marks(grammar.heading)}"
    if grammar.opening:
        start = f"start: {heading} @answer | SPACE {_marks(grammar.opening)} thought {heading} @answer\n"
    else:
        start = f"start: thought {heading} @answer\n"
    return f"{start}{thought}SPACE: /[ \\n]{{0,8}}/\n"


def _in_special_tokens(grammar: Grammar) -> str:
    """No text is a special token, so the first one ends the thought."""
    heading = f"{_marks(grammar.heading)} @answer"
    thought = f"{_marks(grammar.opening)} THOUGHT {_marks(grammar.closing)} {heading}"
    start = f"{heading} | {thought}" if grammar.opening else thought
    return f"start: {start}\nTHOUGHT: /(?s:.*)/\n"


def _marks(text: str) -> str:
    """Text and special tokens in Lark."""
    parts = [part for part in _SPECIAL.split(text) if part]
    return " ".join(part if _SPECIAL.fullmatch(part) else _quoted(part) for part in parts)


def _answer(grammar: Grammar) -> dict[str, Any]:
    if grammar.kind == "json_object":
        if grammar.text:
            raise GrammarError("text: must be empty for a json_object")
        return {"json_schema": {"type": "object", "x-guidance": JSON_OPTIONS}}
    if not grammar.text:
        raise GrammarError("text: must not be empty")
    match grammar.kind:
        case "json_schema":
            return {"json_schema": _schema(grammar.text)}
        case "regex":
            return {"lark_grammar": f"start: /{_in_slashes(grammar.text)}/\n"}
        case "choice":
            return {"lark_grammar": f"start: {' | '.join(map(_quoted, _choices(grammar.text)))}\n"}
        case "lark":
            return {"lark_grammar": grammar.text}
    raise GrammarError(f"kind: {grammar.kind!r} is unknown")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise GrammarError(f"text: is not JSON: {error}") from None


def _schema(text: str) -> dict[str, Any]:
    schema = _json(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("text: a JSON schema must be an object")
    return {"x-guidance": JSON_OPTIONS, **schema}


def _choices(text: str) -> list[str]:
    choices = _json(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise GrammarError("text: must be a JSON list of strings that are not empty")
    if len(choices) > MAX_CHOICES:
        raise GrammarError(f"text: has {len(choices)} choices, {MAX_CHOICES} is the limit")
    return choices


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _in_slashes(regex: str) -> str:
    """The same regular expression where a slash would end it."""
    parts = []
    escaped = False
    for char in regex:
        if char in "/\n" and not escaped:
            parts.append("\\/" if char == "/" else "\\n")
        else:
            parts.append(char)
        escaped = char == "\\" and not escaped
    return "".join(parts)
