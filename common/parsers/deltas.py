"""What a parser finds in an answer, piece by piece."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A call begins. `index` counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """The next part of the JSON text of a call's arguments."""

    index: int
    text: str


Delta: TypeAlias = ContentDelta | ReasoningDelta | ToolCallDelta | ArgumentsDelta


class DeltaWriter:
    """Collects deltas: merges adjacent ones of a kind, drops empty ones, and numbers the calls."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._deltas: list[Delta] = []
        self.calls = 0

    def content(self, text: str) -> None:
        if text:
            before = self._deltas[-1] if self._deltas else None
            if isinstance(before, ContentDelta):
                self._deltas[-1] = ContentDelta(before.text + text)
            else:
                self._deltas.append(ContentDelta(text))

    def reasoning(self, text: str) -> None:
        if text:
            before = self._deltas[-1] if self._deltas else None
            if isinstance(before, ReasoningDelta):
                self._deltas[-1] = ReasoningDelta(before.text + text)
            else:
                self._deltas.append(ReasoningDelta(text))

    def start_call(self, name: str) -> None:
        self._deltas.append(ToolCallDelta(self.calls, self._new_id(), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """The next part of the arguments of the call that was started last."""
        if text:
            before = self._deltas[-1] if self._deltas else None
            if isinstance(before, ArgumentsDelta):
                self._deltas[-1] = ArgumentsDelta(before.index, before.text + text)
            else:
                self._deltas.append(ArgumentsDelta(self.calls - 1, text))

    def take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas
