"""Calls as Hermes and Qwen write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one or several."""

from common.parsers.call_object import CallObject
from common.parsers.driver import CallParser

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    _marker = ""  # the one that began the call, with the white space before it
    _unclosed = False  # a call has ended, its closing tag has not come

    def _step(self, *, final: bool) -> bool:
        markers = (_OPEN, _CLOSE) if self._unclosed else (_OPEN,)
        self._text, marker = self._content.scan(self._text, markers, final=final)
        if not marker:
            return False
        if marker.endswith(_CLOSE):
            self._content.after_call = True
        else:
            self._marker, self._call = marker, CallObject(self._writer)
        self._unclosed = False
        return True

    def _end_call(self, call: CallObject) -> None:
        if call.began:
            self._content.after_call = self._unclosed = True
        else:
            self._content.restore(self._marker + call.raw)
