"""Calls as Llama 3 writes them: an answer that is `{"name": ..., "parameters": {...}}`, several with `;` between them,
or anywhere in an answer behind `<|python_tag|>`."""

from collections.abc import Callable, Collection

from common.parsers.call import Call
from common.parsers.call_object import CallObject
from common.parsers.driver import CallParser

_TAG = "<|python_tag|>"
_SEPARATORS = ";,"


class Llama3Parser(CallParser):
    """`names` are those of the offered tools: a JSON object without a tag is a call only when it names one of them, for
    an answer may be JSON too. None takes every name."""

    def __init__(self, new_id: Callable[[], str], names: Collection[str] | None = None) -> None:
        super().__init__(new_id)
        self._names = names
        self._prefix = ""  # what came before the call that is being read and belongs to it, if it is one
        self._bare = True  # a call may begin here without a tag: at the beginning and after a call

    def _step(self, *, final: bool) -> bool:
        if self._bare:
            return self._begin(final=final)
        self._text, marker = self._content.scan(self._text, (_TAG,), final=final)
        if marker:
            self._open(marker)
        return bool(marker)

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

    def _end_call(self, call: Call) -> None:
        if call.began:
            self._bare = self._content.after_call = True
        else:
            self._content.restore(self._prefix + call.raw)
