"""Calls between marks that are tokens of their own: DeepSeek's (V3, V3.1), Kimi K2's, Gemma 4's and FunctionGemma's."""

from collections.abc import Callable
from dataclasses import dataclass

from common.parsers.call import Call
from common.parsers.deltas import DeltaWriter
from common.parsers.driver import CallParser
from common.parsers.headed_call import DEEPSEEK, KIMI, HeadedCall
from common.parsers.literal_call import LiteralCall
from common.parsers.literals import Dialect
from common.parsers.tagged_call import Schemas


@dataclass(frozen=True, slots=True)
class Marks:
    """A call comes behind `call`, the first of several behind `section` too, which can be left out. `ends` are the
    marks behind calls."""

    section: tuple[str, ...]
    call: str
    ends: tuple[str, ...]
    new_call: Callable[[DeltaWriter, Schemas | None], Call]


DEEPSEEK_MARKS = Marks(
    ("<｜tool▁calls▁begin｜>",), "<｜tool▁call▁begin｜>", ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    lambda writer, schemas: HeadedCall(writer, DEEPSEEK),
)  # fmt: skip
KIMI_MARKS = Marks(
    ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"), "<|tool_call_begin|>",
    ("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    lambda writer, schemas: HeadedCall(writer, KIMI),
)  # fmt: skip
GEMMA_MARKS = Marks(
    (), "<|tool_call>", ("<tool_call|>",),
    lambda writer, schemas: LiteralCall(writer, Dialect.GEMMA, schemas),
)  # fmt: skip

FUNCTION_GEMMA_MARKS = Marks(  # it writes the last one where it waits for the result
    (), "<start_function_call>", ("<end_function_call>", "<start_function_response>"),
    lambda writer, schemas: LiteralCall(writer, Dialect.FUNCTION_GEMMA, schemas),
)  # fmt: skip


class MarkedParser(CallParser):
    """`schemas` are those of the offered tools. Any name is a call's."""

    def __init__(self, new_id: Callable[[], str], marks: Marks, schemas: Schemas | None = None) -> None:
        super().__init__(new_id)
        self._marks = marks
        self._schemas = schemas
        self._raw = ""  # behind content and before what can be a call: content again if it is none

    def _step(self, *, final: bool) -> bool:
        if self._raw:
            return self._begin(final)
        begins = (*self._marks.section, self._marks.call)
        markers = (*begins, *self._marks.ends) if self.calls else begins
        self._text, marker = self._content.scan(self._text, markers, final=final)
        if marker.endswith(begins):
            self._raw = marker
        elif marker:
            self._content.after_call = True
        return bool(marker)

    def _begin(self, final: bool) -> bool:
        """Behind a mark: a call, or first its own mark."""
        if not self._raw.endswith(self._marks.call):
            text, mark = self._text.lstrip(), self._marks.call
            if not final and len(text) < len(mark) and mark.startswith(text):
                return False
            if not text.startswith(mark):
                self._to_content(self._raw)
                return True
            end = len(self._text) - len(text) + len(mark)
            self._raw, self._text = self._raw + self._text[:end], self._text[end:]
        self._call = self._marks.new_call(self._writer, self._schemas)
        return True

    def _end_call(self, call: Call) -> None:
        if call.began:
            self._raw = ""
            self._content.after_call = True
        else:
            self._to_content(self._raw + call.raw)

    def _to_content(self, raw: str) -> None:
        self._raw = ""
        self._content.restore(raw)

    def _at_end(self) -> None:
        super()._at_end()
        if self._raw:
            self._to_content(self._raw)
