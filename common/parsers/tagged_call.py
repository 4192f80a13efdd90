"""Reads calls whose parameters stand in tags. Models of Qwen3-Coder, GLM and MiniCPM5 write them so, the last without
`<tool_call>` around them:

    <function=NAME>             NAME                                    <function name="NAME">
    <parameter=KEY>             <arg_key>KEY</arg_key>                  <param name="KEY">a value</param>
    a value                     <arg_value>a value</arg_value>          <param name="KEY"><![CDATA[any value]]></param>
    </parameter>                                                        </function>
    </function>

A value is a text, so what it is in JSON depends on the schema of the parameter.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from common.parsers.call import Call
from common.parsers.deltas import DeltaWriter
from common.parsers.scanning import find_marker
from common.parsers.schema_types import as_json, types_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION = "<function"
_MAX_TAG = 300  # characters of tags with a name in them

Schemas = Mapping[str, Mapping[str, Any] | None]  # of the parameters of tools, by the tools' names


@dataclass(frozen=True, slots=True)
class _Form:
    """`name` and `key` find a name in its tags, which have not come yet where `name_end` and `key_end` have not. A
    value may begin with `begin`, which is no part of it, and ends with one of the `ends`; where that was left out, with
    what begins `instead`. A call ends with `call_end`."""

    name: re.Pattern[str]
    name_end: str
    key: re.Pattern[str]
    key_end: str
    key_begin: str
    begin: str
    ends: tuple[str, ...]
    instead: tuple[str, ...]
    call_end: str


_QWEN = _Form(
    name=re.compile(rf"{FUNCTION}=([^\s<>]+)>"), name_end=">",
    key=re.compile(r"<parameter=([^\n<>]+)>"), key_end=">", key_begin="<parameter=",
    begin="\n", ends=("\n</parameter>", "</parameter>"), instead=("\n<parameter=", "\n</function>", f"\n{CLOSE}"),
    call_end="</function>",
)  # fmt: skip
_GLM = _Form(
    name=re.compile(rf"([^\s<>]+)\s*(?=<arg_key>|{CLOSE})"), name_end=">",
    key=re.compile(r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>"), key_end="<arg_value>", key_begin="<arg_key>",
    begin="", ends=("</arg_value>",), instead=(f"\n{CLOSE}",),
    call_end=CLOSE,
)  # fmt: skip
_MINICPM = _Form(
    name=re.compile(rf"{FUNCTION}\s+name=[\"']([^\s<>\"']+)[\"']>"), name_end=">",
    key=re.compile(r"<param\s+name=[\"']([^\n<>\"']+)[\"']>"), key_end=">", key_begin="<param",
    begin="<![CDATA[", ends=("</param>",), instead=("<param name=", "</function>"),
    call_end="</function>",
)  # fmt: skip
_CDATA = replace(_MINICPM, ends=("]]></param>",), instead=())  # of a value that begins so


class _Expects(Enum):
    NAME = auto()
    PARAMETER = auto()
    VALUE = auto()


class TaggedCall(Call):
    """`schemas` are those of the offered tools, and `accepts` says which names are calls."""

    def __init__(self, writer: DeltaWriter, schemas: Schemas | None, accepts: Callable[[str], bool]) -> None:
        super().__init__(writer)
        self._schemas = schemas or {}
        self._accepts = accepts
        self._form = _QWEN
        self._expects = _Expects.NAME
        self._schema: Mapping[str, Any] | None = None  # of the parameters
        self._types: frozenset[str] = frozenset()  # of the value that is being read
        self._streams = False  # it can be nothing but a string, which is shown while it comes
        self._value: list[str] = []  # of one that is shown as a whole
        self._fresh = True  # nothing of it has come
        self._ends = _QWEN  # the form that has its ends
        self._written = False  # a parameter

    def _read(self, text: str, final: bool) -> int:
        at, more = 0, True
        while more and not self.ended:
            match self._expects:
                case _Expects.NAME:
                    at, more = self._read_name(text, at, final)
                case _Expects.PARAMETER:
                    at, more = self._read_parameter(text, at, final)
                case _Expects.VALUE:
                    at, more = self._read_value(text, at)
        return at if self.ended or not final else len(text)

    def _read_name(self, text: str, at: int, final: bool) -> tuple[int, bool]:
        """How far this has read, and whether more can be read without more text."""
        begun = text[at : at + _MAX_TAG]
        form = self._form = _form_of(begun)
        found = form.name.match(begun)
        if found is None and not final and form.name_end not in begun and _may_come(begun):
            return at, False
        if found is None or not self._accepts(found[1]):
            self.broken = True
            return at + (len(FUNCTION) if begun.startswith(FUNCTION) else 0), False
        self.began = True
        self._schema = self._schemas.get(found[1])
        self._writer.start_call(found[1])
        self._expects = _Expects.PARAMETER
        return at + found.end(), True

    def _read_parameter(self, text: str, at: int, final: bool) -> tuple[int, bool]:
        """Behind the name or a value: a parameter, or the end, which may be left out."""
        form = self._form
        while at < len(text) and text[at].isspace():
            at += 1
        begun = text[at : at + _MAX_TAG]
        found = form.key.match(begun)
        if found is not None:
            self._begin_value(found[1])
            return at + found.end(), True
        ends = (form.call_end, CLOSE)
        closed = begun.startswith(ends)
        if not closed and not final and form.key_end not in begun and len(begun) < _MAX_TAG:
            return at, False
        if final and (not begun or form.key_begin.startswith(begun) or begun.startswith(form.key_begin)):
            return at, False
        self._writer.arguments("}" if self._written else "{}")
        self.done = True
        if begun.startswith(form.call_end) and form.call_end != CLOSE:  # which is for the reader of the text
            at += len(form.call_end)
        elif not closed and any(end.startswith(begun) for end in ends):
            at = len(text)
        return at, False

    def _begin_value(self, key: str) -> None:
        self._types = types_of(self._schema, key)
        self._streams = self._types == {"string"}
        before, after = ", " if self._written else "{", '"' if self._streams else ""
        self._writer.arguments(f"{before}{_quoted(key)}: {after}")
        self._written = self._fresh = True
        self._expects = _Expects.VALUE

    def _read_value(self, text: str, at: int) -> tuple[int, bool]:
        form = self._form
        if self._fresh:
            begun = text[at : at + len(form.begin)]
            if begun != form.begin and form.begin.startswith(begun):
                return at, False
            self._fresh = False
            at += len(begun) if begun == form.begin else 0
            self._ends = _CDATA if form is _MINICPM and begun == form.begin else form
        length, marker = find_marker(text[at:], (*self._ends.ends, *self._ends.instead), final=False)
        self._show(text[at : at + length])
        if not marker:
            return at + length, False
        self._end_value()
        self._expects = _Expects.PARAMETER
        return at + length + (len(marker) if marker in self._ends.ends else 0), True

    def _show(self, part: str) -> None:
        if self._streams:
            self._writer.arguments(_quoted(part)[1:-1])
        else:
            self._value.append(part)

    def _end_value(self) -> None:
        self._writer.arguments('"' if self._streams else as_json("".join(self._value), self._types))
        self._value.clear()


def _form_of(begun: str) -> _Form:
    if not begun.startswith("<"):
        return _GLM
    return _MINICPM if begun.startswith(FUNCTION) and begun[len(FUNCTION) :][:1].isspace() else _QWEN


def _may_come(begun: str) -> bool:
    """Whether a name may stand in tags that begin like this, as far as can be told without their end."""
    behind = begun[len(FUNCTION) :][:1]
    tag = FUNCTION.startswith(begun[: len(FUNCTION)]) and (not behind or behind == "=" or behind.isspace())
    return len(begun) < _MAX_TAG and (tag or not begun.startswith("<"))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
