"""Reads calls whose parameters stand in tags, in the forms of tag_forms.py, while they come."""

import json
import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

from common.parsers.call import Call
from common.parsers.deltas import DeltaWriter
from common.parsers.scanning import find_marker
from common.parsers.schema_types import ANY_BUT_STRING, STRING, as_json, types_of
from common.parsers.tag_forms import HERMES, MAX_TAG, MINICPM, MINICPM_CDATA, Block

Schemas = Mapping[str, Mapping[str, Any] | None]  # of the parameters of tools, by the tools' names


class _Expects(Enum):
    NAME = auto()
    PARAMETER = auto()
    VALUE = auto()


class TaggedCall(Call):
    """`schemas` are those of the offered tools, and `accepts` says which names are calls."""

    def __init__(
        self, writer: DeltaWriter, schemas: Schemas | None, accepts: Callable[[str], bool], block: Block = HERMES
    ) -> None:
        super().__init__(writer)
        self._block = block
        self._schemas = schemas or {}
        self._accepts = accepts
        self._form = block.form("")
        self._expects = _Expects.NAME
        self._schema: Mapping[str, Any] | None = None  # of the parameters
        self._types: frozenset[str] = frozenset()  # of the value that is being read
        self._streams = False  # it can be nothing but a string, which is shown while it comes
        self._value: list[str] = []  # of one that is shown as a whole
        self._fresh = True  # nothing of it has come
        self._ends = self._form  # the form that has its ends
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
        begun = text[at : at + MAX_TAG]
        form = self._form = self._block.form(begun)
        found = form.name.match(begun)
        if found is None and not final and form.name_end not in begun and _may_come(begun, self._block.function):
            return at, False
        if found is None or not self._accepts(found[1]):
            self.broken = True
            function = self._block.function
            return at + (len(function) if begun.startswith(function) else 0), False
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
        begun = text[at : at + MAX_TAG]
        found = form.key.match(begun)
        if found is not None:
            self._begin_value(found)
            return at + found.end(), True
        ends = (form.call_end, *self._block.closes)
        closed = begun.startswith(ends)
        if not closed and not final and form.key_end not in begun and len(begun) < MAX_TAG:
            return at, False
        if final and (not begun or form.key_begin.startswith(begun) or begun.startswith(form.key_begin)):
            return at, False
        self._writer.arguments("}" if self._written else "{}")
        self.done = True
        own = form.call_end not in self._block.closes  # what closes the block is for the reader of the text
        if own and begun.startswith(form.call_end):
            at += len(form.call_end)
        elif not closed and any(end.startswith(begun) for end in ends):
            at = len(text)
        return at, False

    def _begin_value(self, found: re.Match[str]) -> None:
        key, kind = found["key"], found.groupdict().get("string")  # DeepSeek says itself what is a string
        types = {"true": STRING, "false": ANY_BUT_STRING}
        self._types = types[kind] if kind else types_of(self._schema, key)
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
            self._ends = MINICPM_CDATA if form is MINICPM and begun == form.begin else form
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


def _may_come(begun: str, function: str) -> bool:
    """Whether a name may stand in tags that begin like this, as far as can be told without their end."""
    behind = begun[len(function) :][:1]
    tag = function.startswith(begun[: len(function)]) and (
        not behind or function.endswith(">") or behind == "=" or behind.isspace()
    )
    return len(begun) < MAX_TAG and (tag or not begun.startswith("<"))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
