"""Calls as Hermes and Qwen write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one or several."""

from collections.abc import Callable

from gateway_proc.parsers.call_object import CallObject
from gateway_proc.parsers.content import Content
from gateway_proc.parsers.deltas import Delta, DeltaWriter

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    def __init__(self, new_id: Callable[[], str]) -> None:
        self._writer = DeltaWriter(new_id)
        self._content = Content(self._writer)
        self._call: CallObject | None = None
        self._marker = ""  # the one that began the call, with the white space before it
        self._unclosed = False  # a call has ended, its closing tag has not come
        self._text = ""

    @property
    def calls(self) -> int:
        return self._writer.calls

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        self._run(final=False)
        return self._writer.take()

    def finish(self) -> list[Delta]:
        self._run(final=True)
        if self._call is not None:
            self._call.finish()
            self._end_call(self._call)
            self._run(final=True)
        return self._writer.take()

    def _run(self, *, final: bool) -> None:
        while self._text:
            if self._call is not None:
                self._text = self._text[self._call.feed(self._text) :]
                if self._call.ended:
                    self._end_call(self._call)
                continue
            markers = (_OPEN, _CLOSE) if self._unclosed else (_OPEN,)
            self._text, marker = self._content.scan(self._text, markers, final=final)
            if not marker:
                return
            if marker.endswith(_CLOSE):
                self._content.after_call = True
            else:
                self._marker, self._call = marker, CallObject(self._writer)
            self._unclosed = False

    def _end_call(self, call: CallObject) -> None:
        self._call = None
        if call.began:
            self._content.after_call = self._unclosed = True
        else:
            self._content.restore(self._marker + call.raw)
