"""Calls as Mistral's models write them. Older: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`; newer:
`[TOOL_CALLS]name[ARGS]{...}` for each call, some with `[CALL_ID]id` before the arguments, some without `[ARGS]`.
Granite 3, Cohere's Command, Hunyuan and Apertus write the older form behind markers of their own, all but the first
with one at its end, and the last with `{name: arguments}` for a call."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from common.parsers.call import Call
from common.parsers.call_object import CallObject
from common.parsers.driver import CallParser
from common.parsers.scanning import JsonValue


@dataclass(frozen=True, slots=True)
class ListForm:
    """Calls come behind one of the `markers`, and what follows them may begin with one of the `ends`."""

    markers: tuple[str, ...]
    ends: tuple[str, ...] = ()
    name_key: str | None = "name"


MISTRAL = ListForm(("[TOOL_CALLS]",))
GRANITE = ListForm(("<|tool_call|>", "<tool_call>"))
COHERE = ListForm(("<|START_ACTION|>",), ("<|END_ACTION|>",), "tool_name")
APERTUS = ListForm(("<|tools_prefix|>",), ("<|tools_suffix|>",), None)
HUNYUAN = ListForm(("<tool_calls>", "<TOOLCALL>"), ("</tool_calls>", "</TOOLCALL>"))
_MAX_HEADER = 256  # characters between the marker and the arguments
_HEADER = re.compile(r"([^\s\[\]{}\"\\]+)\s*(?:\[CALL_ID\]\s*[A-Za-z0-9_-]*\s*)?(?:\[ARGS\]\s*)?(?=\{)")


class _State(Enum):
    CONTENT = auto()
    MARKED = auto()  # behind the marker
    BETWEEN = auto()  # behind an object of a list
    ARGUMENTS = auto()  # behind a name


class MistralParser(CallParser):
    """`forced` reads the list alone, without a marker, as a grammar for forced calls allows it."""

    def __init__(self, new_id: Callable[[], str], form: ListForm = MISTRAL, *, forced: bool = False) -> None:
        super().__init__(new_id)
        self._form = form
        self._state = _State.MARKED if forced else _State.CONTENT
        self._raw = ""  # behind content and before what can be a call: content again if it is none
        self._value = JsonValue()

    def _at_end(self) -> None:
        super()._at_end()
        if self._state is _State.MARKED:
            self._content.restore(self._raw)

    def _step(self, *, final: bool) -> bool:
        match self._state:
            case _State.CONTENT:
                form = self._form
                markers = form.markers + form.ends if self.calls else form.markers
                self._text, marker = self._content.scan(self._text, markers, final=final)
                if marker.endswith(form.markers):
                    self._raw, self._state = marker, _State.MARKED
                elif marker:
                    self._content.after_call = True
                return bool(marker)
            case _State.MARKED:
                return self._read_header(final)
            case _State.BETWEEN:
                return self._read_separator(final)
            case _State.ARGUMENTS:
                end = self._value.feed(self._text, 0)
                self._writer.arguments(self._value.take())
                self._text = self._text[end:]
                if self._value.done or self._value.broken:
                    self._to_content(after_call=True)
                return True

    def _read_header(self, final: bool) -> bool:
        text = self._text.lstrip()
        brace = text.find("{", 0, _MAX_HEADER)
        header = _HEADER.match(text) if brace >= 0 else None
        if header is not None:
            self._writer.start_call(header[1])
            self._text = text[header.end() :]
            self._value = JsonValue()
            self._state = _State.ARGUMENTS
        elif text.startswith(("[", "{")):  # a single call may stand there without its list
            begun = len(self._text) - len(text) + text.startswith("[")
            self._raw, self._text = self._raw + self._text[:begun], self._text[begun:]
            self._begin_object()
        elif final or brace >= 0 or len(text) >= _MAX_HEADER:
            self._content.restore(self._raw)
            self._to_content(after_call=False)
        else:
            return False
        return True

    def _read_separator(self, final: bool) -> bool:
        """Behind an object of a list: the next one, or the end of the list."""
        text = self._text.lstrip()
        if text.startswith(","):
            self._raw, self._text = "", text[1:]
            self._begin_object()
        elif text.startswith("]"):
            self._text = text[1:]
            self._to_content(after_call=True)
        elif text.startswith("{") and self._form.ends:  # MiniMax M1 writes no list
            self._raw, self._text = "", text
            self._begin_object()
        elif text or final:
            self._to_content(after_call=True)
        else:
            return False
        return True

    def _begin_object(self) -> None:
        self._call = CallObject(self._writer, name_key=self._form.name_key)
        self._state = _State.BETWEEN

    def _end_call(self, call: Call) -> None:
        if not call.began:
            self._content.restore(self._raw + call.raw)
            self._to_content(after_call=False)

    def _to_content(self, *, after_call: bool) -> None:
        self._state = _State.CONTENT
        self._content.after_call = after_call
