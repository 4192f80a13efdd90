"""What the readers of single calls share."""

from abc import ABC, abstractmethod

from common.parsers.deltas import DeltaWriter


class Call(ABC):
    """One call while it comes. `done` and `broken` end it. When it breaks before it `began`, `raw` is all that was
    read, for it was no call; after that, the arguments end where they broke."""

    def __init__(self, writer: DeltaWriter) -> None:
        self._writer = writer
        self._raw: list[str] = []
        self.began = False
        self.done = False
        self.broken = False

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    @property
    def ended(self) -> bool:
        return self.done or self.broken

    def feed(self, text: str, *, final: bool = False) -> int:
        """Read on; returns how many characters have been read. What is left belongs to what follows the call where that
        has ended, and must be seen again together with more text where it has not."""
        at = self._read(text, final)
        if not self.began:
            self._raw.append(text[:at])
        return at

    def finish(self) -> None:
        """No more text comes."""
        self.broken = not self.done

    @abstractmethod
    def _read(self, text: str, final: bool) -> int:
        """The same; all of the text where it is `final` and the call does not end in it."""
