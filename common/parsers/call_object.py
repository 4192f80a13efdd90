"""Reads `{"name": ..., "arguments": {...}}`, the form that calls have in most formats, while it comes."""

import json
from collections.abc import Callable
from enum import Enum, auto

from common.parsers.call import Call
from common.parsers.deltas import DeltaWriter
from common.parsers.scanning import JsonValue

_ARGUMENTS = ("arguments", "parameters")


class _Expects(Enum):
    OBJECT = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()


class CallObject(Call):
    """It begins in `writer` once its name and the beginning of its arguments are known, whichever comes first in the
    object, and other keys are passed over; where `name_key` is None, the first key is the name. Arguments that are a
    string are taken to be JSON text in a string; none, or null, are `{}`. `accepts` says which names are calls.
    """

    def __init__(
        self, writer: DeltaWriter, accepts: Callable[[str], bool] = lambda name: True, name_key: str | None = "name"
    ) -> None:
        super().__init__(writer)
        self._name_key = name_key
        self._accepts = accepts
        self._expects = _Expects.OBJECT
        self._value: JsonValue | None = None
        self._key = ""
        self._name: str | None = None
        self._arguments: list[str] = []  # read before the call began
        self._has_arguments = False
        self._streaming = False

    def _read(self, text: str, final: bool) -> int:
        at = 0
        while at < len(text) and not self.ended:
            if self._value is None and text[at].isspace():
                at += 1
            elif self._value is not None:
                at = self._read_value(text, at)
            else:
                at = self._punctuation(text, at)
        return at

    def _punctuation(self, text: str, at: int) -> int:
        match self._expects, text[at]:
            case _Expects.OBJECT, "{":
                self._expects = _Expects.KEY
            case _Expects.KEY, '"':
                self._value = JsonValue()
                return at
            case _Expects.COLON, ":":
                self._expects = _Expects.VALUE
            case _Expects.VALUE, _:
                self._value = JsonValue()
                self._streaming = self._key in _ARGUMENTS and not self._has_arguments and text[at] in "{["
                return at
            case _Expects.NEXT, ",":
                self._expects = _Expects.KEY
            case ((_Expects.NEXT | _Expects.KEY), "}"):
                self._end_object()
                return at + (not self.broken)
            case _:
                self.broken = True
                return at
        return at + 1

    def _read_value(self, text: str, at: int) -> int:
        assert self._value is not None
        end = self._value.feed(text, at)
        if self._streaming:
            self._pass_on(self._value.take())
        if self._value.broken:
            self.broken = True
        elif self._value.done:
            whole = self._value.take()
            self._value = None
            if self._expects is _Expects.KEY:
                self._take_key(_decoded(whole))
                self._expects = _Expects.COLON
            else:
                self._take_value(whole)
                self._expects = _Expects.NEXT
        return end

    def _take_key(self, key: str) -> None:
        if self._name_key is not None:
            self._key = key
        elif self._name is None:
            self._take_name(key)
            self._key = _ARGUMENTS[0]

    def _take_name(self, name: str) -> None:
        if not name or not self._accepts(name):
            self.broken = True
            return
        self._name = name
        self._begin()

    def _take_value(self, whole: str) -> None:
        if self._key == self._name_key and self._name is None:
            self._take_name(_decoded(whole) if whole[0] == '"' else "")
        elif self._key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            if not self._streaming:
                self._pass_on(_decoded(whole) if whole[0] == '"' else "{}" if whole == "null" else whole)
        self._streaming = False

    def _pass_on(self, arguments: str) -> None:
        """Part of the arguments, which may come before the name."""
        self._arguments.append(arguments)
        self._begin()

    def _begin(self) -> None:
        if self._name is None or not self._arguments:
            return
        if not self.began:
            self.began = True
            self._writer.start_call(self._name)
        self._writer.arguments("".join(self._arguments))
        self._arguments.clear()

    def _end_object(self) -> None:
        if self._name is None:
            self.broken = True
            return
        self.done = True
        if not self.began:
            self._pass_on("{}")


def _decoded(text: str) -> str:
    """The text of a JSON string; as it is where it is none, or not one that could be sent."""
    try:
        value = json.loads(text, strict=False)
        return value if isinstance(value, str) and value.encode() else text
    except ValueError:  # a lone surrogate too
        return text
