"""What a parser finds in an answer, piece by piece."""

from collections.abc import Callable
from dataclasses import dataclass, replace
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
        self._ids: set[str] = set()
        self.calls = 0

    def content(self, text: str) -> None:
        self._add(ContentDelta(text))

    def reasoning(self, text: str) -> None:
        self._add(ReasoningDelta(text))

    def start_call(self, name: str, call_id: str = "") -> None:
        """A call with the id that the model gave it, where it did and no call before has it."""
        own = call_id and call_id not in self._ids
        self._ids.add(call_id)
        self._deltas.append(ToolCallDelta(self.calls, call_id if own else self._new_id(), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """The next part of the arguments of the call that was started last."""
        self._add(ArgumentsDelta(self.calls - 1, text))

    def _add(self, delta: ContentDelta | ReasoningDelta | ArgumentsDelta) -> None:
        before = self._deltas[-1] if self._deltas else None
        if isinstance(before, type(delta)):
            self._deltas[-1] = replace(before, text=before.text + delta.text)
        elif delta.text:
            self._deltas.append(delta)

    def take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas
