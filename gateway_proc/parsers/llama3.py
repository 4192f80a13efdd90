"""Calls as Llama 3 writes them: an answer that is `{"name": ..., "parameters": {...}}`, several with `;` between them,
or anywhere in an answer behind `<|python_tag|>`."""

from collections.abc import Callable, Collection

from gateway_proc.parsers.call_object import CallObject
from gateway_proc.parsers.content import Content
from gateway_proc.parsers.deltas import Delta, DeltaWriter

_TAG = "<|python_tag|>"
_SEPARATORS = ";,"


class Llama3Parser:
    """`names` are those of the offered tools: a JSON object without a tag is a call only when it names one of them, for
    an answer may be JSON too. None takes every name."""

    def __init__(self, new_id: Callable[[], str], names: Collection[str] | None = None) -> None:
        self._writer = DeltaWriter(new_id)
        self._content = Content(self._writer)
        self._names = names
        self._call: CallObject | None = None
        self._prefix = ""  # what came before the call that is being read and belongs to it, if it is one
        self._bare = True  # a call may begin here without a tag: at the beginning and after a call
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
            elif self._bare:
                if not self._begin(final=final):
                    return
            else:
                self._text, marker = self._content.scan(self._text, (_TAG,), final=final)
                if not marker:
                    return
                self._open(marker)

    def _begin(self, *, final: bool) -> bool:
        """Whether it is known that a call begins here, or content does."""
        text = self._text.lstrip()
        if self._writer.calls and text[:1] in tuple(_SEPARATORS):
            text = text[1:].lstrip()
        if not text and not final:
            return False
        self._bare = False
        if text.startswith("{"):
            self._open(self._text[: len(self._text) - len(text)])
            self._text = text
        return True

    def _open(self, prefix: str) -> None:
        self._prefix = prefix
        tagged = prefix.endswith(_TAG)
        self._call = CallObject(self._writer, lambda name: tagged or self._names is None or name in self._names)

    def _end_call(self, call: CallObject) -> None:
        self._call = None
        if call.began:
            self._bare = self._content.after_call = True
        else:
            self._content.restore(self._prefix + call.raw)
