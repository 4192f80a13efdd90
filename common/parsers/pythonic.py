"""Calls in Python's notation: an answer that is `[f(a=1), g()]` (Llama 4), or such a list anywhere behind a mark
(LFM2), or one call in each line between tags (Olmo 3). Instead of a call there may be `{"name": ..., "parameters":
{...}}`, which Llama 4's own template asks for."""

from collections.abc import Callable
from enum import Enum, auto

from common.parsers.call import Call
from common.parsers.call_object import CallObject
from common.parsers.driver import CallParser
from common.parsers.literal_call import LiteralCall
from common.parsers.literals import Dialect
from common.parsers.tagged_call import Schemas

_OPENS = ("<|tool_call_start|>", "<function_calls>", "<|python_start|>", "<|python_tag|>")
_CLOSES = ("<|tool_call_end|>", "</function_calls>", "<|python_end|>")
_SEPARATORS = (",", ";")


class _State(Enum):
    BARE = auto()  # a call may begin here without a mark: at the beginning, and behind a call that had none
    CONTENT = auto()
    MARKED = auto()  # behind a mark, or a call behind it
    LIST = auto()  # behind a bracket, or a call in it


class PythonicParser(CallParser):
    """`schemas` are those of the offered tools. What has no mark before it is a call only when it names one of them;
    None takes every name."""

    def __init__(self, new_id: Callable[[], str], schemas: Schemas | None = None) -> None:
        super().__init__(new_id)
        self._schemas = schemas
        self._state = _State.BARE
        self._raw = ""  # behind content and before what can be a call: content again if it is none
        self._marked = False
        self._called = False  # since the mark, or the beginning

    def _step(self, *, final: bool) -> bool:
        if self._state is not _State.CONTENT:
            return self._begin(final)
        self._text, marker = self._content.scan(self._text, _OPENS + _CLOSES if self.calls else _OPENS, final=final)
        if marker.endswith(_OPENS):
            self._raw, self._marked, self._state = marker, True, _State.MARKED
        elif marker:
            self._content.after_call = True
        return bool(marker)

    def _begin(self, final: bool) -> bool:
        """What stands where a call can begin."""
        text = self._text.lstrip()
        if not text and not final:
            return False
        begun = len(self._text) - len(text)
        if text.startswith(_SEPARATORS) and self._called and not self._raw:
            self._take(begun + 1)
        elif text.startswith("[") and self._state is not _State.LIST:
            self._take(begun + 1)
            self._state = _State.LIST
        elif text.startswith("]") and self._state is _State.LIST and self._called:
            self._text = text[1:]
            self._to_content(after_call=True)
        elif text.startswith("{"):
            self._take(begun)
            self._call = CallObject(self._writer, self._accepts)
        elif text and self._state is not _State.BARE and text[0] not in "[]<":
            self._take(begun)
            self._call = LiteralCall(self._writer, Dialect.PYTHON, self._schemas, self._accepts)
        else:
            self._restore("", ended=not text)
        return True

    def _take(self, length: int) -> None:
        self._raw, self._text = self._raw + self._text[:length], self._text[length:]

    def _accepts(self, name: str) -> bool:
        return self._marked or self._schemas is None or name in self._schemas

    def _end_call(self, call: Call) -> None:
        if not call.began:
            self._restore(call.raw)
            return
        self._raw, self._called = "", True
        if call.broken:
            self._to_content(after_call=True)

    def _restore(self, raw: str, *, ended: bool = False) -> None:
        """What was read is no call. `ended`: nothing follows, so that what stands between calls is no content."""
        raw = self._raw + raw
        if self._called:
            raw = raw.strip() if ended else raw.lstrip()
            raw = "" if ended and raw in _SEPARATORS else raw
        if raw:
            self._content.restore(raw)
        self._to_content(after_call=self._called and not raw)

    def _to_content(self, *, after_call: bool) -> None:
        self._raw, self._marked, self._called, self._state = "", False, False, _State.CONTENT
        self._content.after_call = after_call

    def _at_end(self) -> None:
        super()._at_end()
        if self._raw:
            self._restore("", ended=True)
