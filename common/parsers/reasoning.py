"""The reasoning at the beginning of an answer, `<think>...</think>`, and the rest."""

from dataclasses import dataclass
from enum import Enum, auto

from common.parsers.scanning import find_marker

OPEN, CLOSE = "<think>", "</think>"


class _State(Enum):
    BEGINNING = auto()  # an opening tag may come, nothing else has
    BEGUN = auto()  # behind the opening tag
    REASONING = auto()
    ENDED = auto()  # behind the closing tag
    CONTENT = auto()


@dataclass(frozen=True, slots=True)
class Split:
    reasoning: str
    content: str


class ReasoningSplitter:
    """`opened` says that the prompt ended with the opening tag; the model may still write one of its own.

    A tag anywhere but at the beginning is content: an answer may speak of tags. White space next to the tags belongs to
    neither part.
    """

    def __init__(self, *, opened: bool) -> None:
        self._opened = opened
        self._state = _State.BEGINNING
        self._text = ""

    def feed(self, text: str) -> Split:
        self._text += text
        return self._run(final=False)

    def finish(self) -> Split:
        return self._run(final=True)

    def _run(self, *, final: bool) -> Split:
        reasoning = ""
        if self._state is _State.BEGINNING:
            text = self._text.lstrip()
            if text.startswith(OPEN):
                self._state, self._text = _State.BEGUN, text[len(OPEN) :]
            elif final or not OPEN.startswith(text):
                self._state = _State.BEGUN if self._opened else _State.CONTENT
            else:
                return Split("", "")
        if self._state is _State.BEGUN:
            self._text = self._text.lstrip()
            if self._text:
                self._state = _State.REASONING
        if self._state is _State.REASONING:
            at, marker = find_marker(self._text, (CLOSE,), final=final)
            end = at if final and not marker else len(self._text[:at].rstrip())
            reasoning, self._text = self._text[:end], self._text[at + len(marker) if marker else end :]
            if marker:
                self._state = _State.ENDED
        if self._state is _State.ENDED:
            self._text = self._text.lstrip()
            if self._text:
                self._state = _State.CONTENT
        content = ""
        if self._state is _State.CONTENT:
            content, self._text = self._text, ""
        return Split(reasoning, content)


class ReasoningPasser(ReasoningSplitter):
    """The same for an answer whose reasoning is shown with its content: every character of it stays, tags too."""

    def _run(self, *, final: bool) -> Split:
        if self._state is _State.BEGINNING:
            begun = self._text.lstrip()
            if not final and len(begun) < len(OPEN) and OPEN.startswith(begun):
                return Split("", "")
            self._state = _State.REASONING if self._opened or begun.startswith(OPEN) else _State.CONTENT
        reasoning = ""
        if self._state is _State.REASONING:
            at, marker = find_marker(self._text, (CLOSE,), final=final)
            end = at + len(marker)
            reasoning, self._text = self._text[:end], self._text[end:]
            if marker:
                self._state = _State.CONTENT
        content = ""
        if self._state is _State.CONTENT:
            content, self._text = self._text, ""
        return Split(reasoning, content)
