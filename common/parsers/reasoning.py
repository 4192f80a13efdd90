"""The reasoning at the beginning of an answer, `<think>...</think>` with most models, and the rest."""

from dataclasses import dataclass
from enum import Enum, auto

from common.parsers.scanning import find_marker


@dataclass(frozen=True, slots=True)
class Tags:
    """What reasoning stands between. `special`: they are special tokens. `around`: pairs of what content may begin and
    end with, which is no part of it."""

    open: str
    close: str
    special: bool = True
    around: tuple[tuple[str, str], ...] = ()


THINK = Tags("<think>", "</think>", special=False)
HUNYUAN = Tags(THINK.open, THINK.close, special=False, around=(("<answer>", "</answer>"), ("助手：", "")))
HUNYUAN3 = Tags("<think:opensource>", "</think:opensource>")
COHERE = Tags(
    "<|START_THINKING|>", "<|END_THINKING|>",
    around=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
)  # fmt: skip
GEMMA = Tags("<|channel>thought", "<channel|>")
APERTUS = Tags("<|inner_prefix|>", "<|inner_suffix|>")
SEED = Tags("<seed:think>", "</seed:think>")
MISTRAL = Tags("[THINK]", "[/THINK]")


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
    """`opened` says that the prompt ended with the opening tag; the model may still write one of its own. One of the
    marks in `until` ends reasoning, too, and is the beginning of the rest: some models call without closing it.

    A tag anywhere but at the beginning is content: an answer may speak of tags. White space next to the tags belongs to
    neither part.
    """

    def __init__(self, *, opened: bool, tags: Tags = THINK, until: tuple[str, ...] = ()) -> None:
        self._opened = opened
        self._tags = tags
        self._until = until
        self._state = _State.BEGINNING
        self._text = ""

    def feed(self, text: str) -> Split:
        self._text += text
        return self._run(final=False)

    def finish(self) -> Split:
        return self._run(final=True)

    def _run(self, *, final: bool) -> Split:
        reasoning = ""
        open_tag, close = self._tags.open, self._tags.close
        if self._state is _State.BEGINNING:
            text = self._text.lstrip()
            if text.startswith(open_tag):
                self._state, self._text = _State.BEGUN, text[len(open_tag) :]
            elif final or not open_tag.startswith(text):
                self._state = _State.BEGUN if self._opened else _State.CONTENT
            else:
                return Split("", "")
        if self._state is _State.BEGUN:
            self._text = self._text.lstrip()
            if self._text:
                self._state = _State.REASONING
        if self._state is _State.REASONING:
            at, marker = find_marker(self._text, (close, *self._until), final=final)
            end = at if final and not marker else len(self._text[:at].rstrip())
            behind = at + len(close) if marker == close else at if marker else end
            reasoning, self._text = self._text[:end], self._text[behind:]
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
        open_tag, close = self._tags.open, self._tags.close
        if self._state is _State.BEGINNING:
            begun = self._text.lstrip()
            if not final and len(begun) < len(open_tag) and open_tag.startswith(begun):
                return Split("", "")
            self._state = _State.REASONING if self._opened or begun.startswith(open_tag) else _State.CONTENT
        reasoning = ""
        if self._state is _State.REASONING:
            at, marker = find_marker(self._text, (close, *self._until), final=final)
            end = at + (len(close) if marker == close else 0)
            reasoning, self._text = self._text[:end], self._text[end:]
            if marker:
                self._state = _State.CONTENT
        content = ""
        if self._state is _State.CONTENT:
            content, self._text = self._text, ""
        return Split(reasoning, content)


class Unwrapper:
    """Content without what the tags say may stand around it, and the white space next to that."""

    def __init__(self, around: tuple[tuple[str, str], ...]) -> None:
        self._closes = dict(around)
        self._close: str | None = None  # None: it has not begun; empty: nothing is around it any more
        self._fresh = False  # behind the opening mark
        self._ended = False  # behind the closing one, where white space is all that has come
        self._text = ""

    def feed(self, text: str, *, final: bool = False) -> str:
        self._text += text
        while self._close is None:
            begun = self._text.lstrip()
            opened = next((mark for mark in self._closes if begun.startswith(mark)), None)
            if opened is not None:
                self._close, self._text, self._fresh = self._closes[opened], begun[len(opened) :], True
            elif not final and any(mark.startswith(begun) for mark in self._closes):
                return ""
            else:
                self._close = ""
        if self._fresh:
            self._text = self._text.lstrip()
            self._fresh = not self._text
        if not self._close:
            self._ended = self._ended and not self._text.strip()
            shown, self._text = ("", self._text) if self._ended else (self._text, "")
            return shown
        at, marker = find_marker(self._text, (self._close,), final=final)
        end = len(self._text[:at].rstrip()) if marker or not final else at
        shown, self._text = self._text[:end], self._text[at + len(marker) if marker else end :]
        if not marker:
            return shown
        self._close, self._ended = "", True
        return shown + self.feed("", final=final)
