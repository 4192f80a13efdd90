"""Answers to clients: sent at once, or kept in order for a client that reads slowly, within a bound."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from common.codec import Message, encode
from tokenizer_proc.ledger import Owner

MAX_BACKLOG_MESSAGES = 4096
MAX_BACKLOG_BYTES = 8 * 2**20
DEAF = 4  # times as much, and a client is not answered any more


class Sent(Enum):
    """What became of an attempt to send."""

    YES = auto()
    FULL = auto()  # the client reads too slowly
    GONE = auto()  # the client is not connected any more


class Delivery(Enum):
    """What became of an answer."""

    DONE = auto()  # sent or kept for the client
    OVERFLOW = auto()  # kept, and the client's backlog is beyond its bound
    GONE = auto()  # the client is not connected any more


@dataclass(slots=True)
class _Backlog:
    frames: deque[bytes] = field(default_factory=deque)
    bytes: int = 0

    def over(self, times: int = 1) -> bool:
        return len(self.frames) > times * MAX_BACKLOG_MESSAGES or self.bytes > times * MAX_BACKLOG_BYTES


class Clients:
    """Sends through `send(owner, frame)`, which must not wait."""

    def __init__(self, send: Callable[[Owner, bytes], Sent]):
        self._send = send
        self._backlogs: dict[Owner, _Backlog] = {}
        self._fed: set[Owner] = set()  # got something since the last call of `take_fed`

    @property
    def backlogs(self) -> int:
        return len(self._backlogs)

    def send(self, owner: Owner, msg: Message) -> Delivery:
        """Send or keep an answer. After OVERFLOW the owner's requests must end: what is still sent to it is kept too,
        so that each of them gets its last word. Raises FrameError when the message is too large for any frame."""
        frame = encode(msg)
        backlog = self._backlogs.get(owner)
        if backlog is None:
            sent = self._send(owner, frame)
            if sent is Sent.YES:
                self._fed.add(owner)
                return Delivery.DONE
            if sent is Sent.GONE:
                return Delivery.GONE
            backlog = self._backlogs[owner] = _Backlog()
        backlog.frames.append(frame)
        backlog.bytes += len(frame)
        return Delivery.OVERFLOW if backlog.over() else Delivery.DONE

    def overflowing(self, owner: Owner) -> bool:
        """Whether the client must read before it may ask for more."""
        backlog = self._backlogs.get(owner)
        return backlog is not None and backlog.over()

    def deaf(self, owner: Owner) -> bool:
        """Whether the client has left so much unread that not even refusals are kept for it."""
        backlog = self._backlogs.get(owner)
        return backlog is not None and backlog.over(DEAF)

    def flush(self) -> list[Owner]:
        """Send what slow clients take now; returns those that are gone."""
        gone = []
        for owner, backlog in list(self._backlogs.items()):
            sent = Sent.YES
            while backlog.frames and (sent := self._send(owner, backlog.frames[0])) is Sent.YES:
                backlog.bytes -= len(backlog.frames.popleft())
                self._fed.add(owner)
            if sent is Sent.GONE:
                gone.append(owner)
            if not backlog.frames:
                del self._backlogs[owner]
        return gone

    def forget(self, owner: Owner) -> None:
        self._backlogs.pop(owner, None)
        self._fed.discard(owner)

    def take_fed(self) -> set[Owner]:
        """The clients that something was sent to since the last call."""
        fed, self._fed = self._fed, set()
        return fed
