"""Finding markers and the ends of JSON values in text that comes in pieces."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache

_IN_STRING = re.compile(r'["\\]')
_IN_CONTAINER = re.compile(r'["{}\[\]]|[^\sA-Za-z0-9+\-.,:]')
_CONTROL = re.compile(r"[\x00-\x1f]")
_NOT_SCALAR = re.compile(r"[^A-Za-z0-9+\-.]")


def find_marker(text: str, markers: Sequence[str], *, final: bool) -> tuple[int, str]:
    """Where the first of the `markers` begins, and which one it is. None of them is a prefix of another.

    Without any, where text begins that may be the beginning of one (the end of the text when it is `final`), and "".
    """
    found = _any_of(tuple(markers)).search(text)
    if found is not None:
        return found.start(), found.group()
    if final:
        return len(text), ""
    longest = max(map(len, markers))
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[at:]) for marker in markers):
            return at, ""
    return len(text), ""


@lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Looks no further than to the first of them, which matters where there are many."""
    return re.compile("|".join(map(re.escape, markers)))


class JsonValue:
    """Finds where a JSON value ends. Of its syntax it knows no more than that takes: brackets, strings, and which
    characters can be outside of strings. `done` and `broken` end it; `first` is the value's first character. What it
    has read can be taken with control characters in strings as JSON has them: models write lines of code as they are.
    """

    def __init__(self) -> None:
        self.first = ""
        self.done = False
        self.broken = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._read: list[str] = []

    def take(self) -> str:
        """What was read since the last call."""
        read = "".join(self._read)
        self._read.clear()
        return read

    def feed(self, text: str, at: int) -> int:
        """Read on from `at`; returns the index behind what belongs to the value. It must not begin with a space."""
        if not self.first and at < len(text):
            self.first = text[at]
            if self.first == '"':
                self._in_string = True
                self._read.append('"')
                at += 1
            elif self.first not in "{[" and _NOT_SCALAR.match(self.first):
                self.broken = True
        while at < len(text) and not (self.done or self.broken):
            if self._in_string:
                end = self._string(text, at)
                self._read.append(_CONTROL.sub(_escape, text[at:end]))
            else:
                end = self._container(text, at) if self.first in "{[" else self._scalar(text, at)
                self._read.append(text[at:end])
            at = end
        return at

    def _scalar(self, text: str, at: int) -> int:
        end = _NOT_SCALAR.search(text, at)
        self.done = end is not None
        return end.start() if end else len(text)

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _IN_STRING.search(text, at)
        if found is None:
            return len(text)
        if found.group() == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = self._depth == 0
        return found.end()

    def _container(self, text: str, at: int) -> int:
        found = _IN_CONTAINER.search(text, at)
        if found is None:
            return len(text)
        match found.group():
            case '"':
                self._in_string = True
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
                self.done = self._depth == 0
            case _:
                self.broken = True
                return found.start()
        return found.end()


def _escape(found: re.Match[str]) -> str:
    return json.dumps(found.group())[1:-1]
