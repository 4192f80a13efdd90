"""What the parsers of answers share: text in, deltas out; and those of tool calls, the call that is being read."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from common.parsers.call import Call
from common.parsers.content import Content
from common.parsers.deltas import Delta, DeltaWriter


class TextParser(ABC):
    """Reads what is in `_text` and writes deltas."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._writer = DeltaWriter(new_id)
        self._text = ""

    @property
    def calls(self) -> int:
        """How many have begun."""
        return self._writer.calls

    def feed(self, text: str) -> list[Delta]:
        """What more text adds."""
        self._text += text
        self._run(final=False)
        return self._writer.take()

    def finish(self) -> list[Delta]:
        """What was held back, once no more text comes."""
        self._run(final=True)
        self._at_end()
        return self._writer.take()

    @abstractmethod
    def _run(self, *, final: bool) -> None:
        """Read as far as it is known without more text, or, where it is `final`, all."""

    @abstractmethod
    def _at_end(self) -> None:
        """All text has been read."""


class CallParser(TextParser):
    """Content and calls of a text. A format says in `_step` how it goes on from what is in `_text`, and in `_end_call`
    what follows a call."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__(new_id)
        self._content = Content(self._writer)
        self._call: Call | None = None

    def _run(self, *, final: bool) -> None:
        while self._text:
            if self._call is not None:
                self._text = self._text[self._call.feed(self._text, final=final) :]
                if self._call.ended:
                    self._close(self._call)
                elif self._text:
                    return
            elif not self._step(final=final):
                return

    def _close(self, call: Call) -> None:
        self._call = None
        self._end_call(call)

    @abstractmethod
    def _step(self, *, final: bool) -> bool:
        """Read on outside of calls; whether more can be read without more text."""

    @abstractmethod
    def _end_call(self, call: Call) -> None:
        """A call has ended, or turned out to be none."""

    def _at_end(self) -> None:
        if self._call is not None:
            self._call.finish()
            self._close(self._call)
            self._run(final=True)
