"""Answers in OpenAI's harmony format (see common/harmony.py): messages, each with a header that says what it is.

A message in the channel `analysis` is reasoning, one to somebody, `to=functions.NAME`, is a call, and all others are
content: those in `final`, and in `commentary` what the model says before it calls.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from common.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from common.parsers.driver import TextParser
from common.parsers.scanning import find_marker

_MAX_HEADER = 256  # characters, with the mark behind it
_CHANNELS = frozenset({"analysis", "commentary", "final"})
_NOBODY = frozenset({"", "assistant", "user", "all"})  # whom no call goes to
_BEHIND_HEADER = (MESSAGE, START, END, RETURN, CALL)
_BEHIND_BODY = (START, CHANNEL, END, RETURN, CALL)
_TO = "to="
_ROLE = re.compile(r"[\w.-]")
_BETWEEN = "\n\n"  # messages that become one text


class _State(Enum):
    BEGINNING = auto()  # the prompt ended with a role: the rest of a header comes
    BETWEEN = auto()  # behind a message
    HEADER = auto()
    BODY = auto()


class _Kind(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()


@dataclass(frozen=True, slots=True)
class _Header:
    channel: str
    recipient: str


class HarmonyParser(TextParser):
    """Reads a whole answer. Without `reasoning` the model's reasoning is content, without `calls` so are calls; with
    `headers` those have their headers, as the model wrote them.

    What looks like a header and is none is text of the message that it stands in. A header that the answer's end cuts
    off is not shown. Texts of several messages that become one have an empty line between them.
    """

    def __init__(self, new_id: Callable[[], str], *, reasoning: bool, calls: bool, headers: bool = False) -> None:
        super().__init__(new_id)
        self._reasoning = reasoning
        self._calls = calls
        self._headers = headers
        self._state = _State.BEGINNING
        self._kind = _Kind.CONTENT
        self._inside = False  # the header that is being read began within a message
        self._fresh = True  # nothing of this message has been written
        self._written: set[_Kind] = set()

    def _run(self, *, final: bool) -> None:
        while self._text and self._step(final=final):
            pass

    def _at_end(self) -> None:
        self._end_message()

    def _step(self, *, final: bool) -> bool:
        """Whether more can be read without more text."""
        match self._state:
            case _State.BEGINNING | _State.BETWEEN:
                return self._begin(final)
            case _State.HEADER:
                return self._read_header(final)
            case _State.BODY:
                return self._read_body(final)

    def _begin(self, final: bool) -> bool:
        """A header, or a message without one."""
        text = self._text.lstrip()
        beginnings: tuple[str, ...] = (START, CHANNEL, MESSAGE, _TO)
        if self._state is _State.BETWEEN:  # white space here belongs to nothing
            self._text, beginnings = text, (START, CHANNEL, MESSAGE)
        if text.startswith(beginnings):
            self._text, self._state, self._inside = text, _State.HEADER, False
        elif final or not any(beginning.startswith(text) for beginning in beginnings):
            self._open(_Kind.CONTENT)
        else:
            return False
        return True

    def _read_header(self, final: bool) -> bool:
        first = START if self._text.startswith(START) else ""
        text = self._text[len(first) : _MAX_HEADER]
        at, mark = find_marker(text, _BEHIND_HEADER, final=True)
        too_long = not mark and len(self._text) >= _MAX_HEADER
        if not (mark or too_long or final):
            return False
        header = None if too_long else _header(first + text[:at], inside=self._inside)
        if header is None:
            self._restore()
        else:
            written = first + text[:at] + mark
            self._text = self._text[len(first) + at + len(mark if mark != START else "") :]
            self._end_message()
            if mark == MESSAGE:
                self._open(*self._meaning(header))
                if self._headers and header.recipient not in _NOBODY:
                    self._write(written)
            else:  # a header without a message says nothing
                self._state = _State.BETWEEN
        return True

    def _restore(self) -> None:
        """What looked like a header is text."""
        mark = next((mark for mark in (START, CHANNEL, MESSAGE) if self._text.startswith(mark)), "")
        if not self._inside:
            self._open(_Kind.CONTENT)
        self._state = _State.BODY
        self._write(mark)
        self._text = self._text[len(mark) :]

    def _read_body(self, final: bool) -> bool:
        at, mark = find_marker(self._text, _BEHIND_BODY, final=final)
        self._write(self._text[:at])
        if mark in (START, CHANNEL):
            self._text, self._state, self._inside = self._text[at:], _State.HEADER, True
        elif mark:
            self._text, self._state = self._text[at + len(mark) :], _State.BETWEEN
            self._end_message()
        else:
            self._text = self._text[at:]
        return bool(mark)

    def _meaning(self, header: _Header) -> tuple[_Kind, str]:
        """What a message is, and the name of the function that it calls."""
        name = header.recipient.removeprefix("functions.")
        if self._calls and header.recipient not in _NOBODY and name:
            return _Kind.CALL, name
        if header.channel == "analysis" and self._reasoning:
            return _Kind.REASONING, ""
        return _Kind.CONTENT, ""

    def _open(self, kind: _Kind, name: str = "") -> None:
        self._state, self._kind, self._fresh = _State.BODY, kind, True
        if kind is _Kind.CALL:
            self._writer.start_call(name)

    def _write(self, text: str) -> None:
        if self._kind is _Kind.CALL and self._fresh:
            text = text.lstrip()
        if not text:
            return
        between = _BETWEEN if self._fresh and self._kind in self._written else ""
        match self._kind:
            case _Kind.CALL:
                self._writer.arguments(text)
            case _Kind.REASONING:
                self._writer.reasoning(between + text)
            case _Kind.CONTENT:
                self._writer.content(between + text)
        if self._kind is not _Kind.CALL:
            self._written.add(self._kind)
        self._fresh = False

    def _end_message(self) -> None:
        """A call without arguments has empty ones."""
        if self._kind is _Kind.CALL and self._fresh:
            self._writer.arguments("{}")
        self._kind, self._fresh = _Kind.CONTENT, True


def _header(text: str, *, inside: bool) -> _Header | None:
    """What a header says; None where the text is none. Models write them in many forms: the parts may have any order,
    and one word more, the type of what follows. `inside` a message, which may speak of headers, it must begin as one
    does."""
    words = text.removeprefix(START).replace(CHANNEL, f" {CHANNEL}").replace(CONSTRAIN, f" {CONSTRAIN}").split()
    channel = recipient = ""
    others = 0
    for word in words:
        rest = word.removeprefix(CHANNEL).removeprefix(CONSTRAIN).removeprefix(_TO)
        if "<" in rest:
            return None
        if word.startswith(CHANNEL):
            channel = channel or rest
        elif word.startswith(_TO):
            recipient = recipient or rest
        elif not word.startswith(CONSTRAIN):
            others += 1
    has_role = text.startswith(START)
    if others > 1 + has_role:
        return None
    if inside and (not _ROLE.match(text, len(START)) if has_role else channel not in _CHANNELS):
        return None
    return _Header(channel, recipient)
