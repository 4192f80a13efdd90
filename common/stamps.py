"""Stamps: which process a frame comes from, and its number among that one's frames on a connection.

Between our own processes every frame begins with a stamp:

    8 bytes   name of the conversation: BLAKE2b of the sender's name and the socket's, which has the term or epoch in it
    8 bytes   number of the frame among those of its sender, from 0, little-endian

So a receiver knows a frame that is nobody's from one of its partner that is damaged, a frame that comes again from a
new one, and notices when some are missing: what a partner has said is either heard, once and in order, or known to be
lost. A stamp is no signature: whoever may write into the run directory (mode 0700) could forge one.
"""

import struct
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from hashlib import blake2b

_STAMP = struct.Struct("<8sQ")
STAMP_BYTES = _STAMP.size


def conversation(sender: str, address: str) -> bytes:
    """The name of what `sender` says at a socket's address (of which only the file's name counts)."""
    return blake2b(f"{sender} {address.rpartition('/')[2]}".encode(), digest_size=8).digest()


class Stamper:
    """The sender's side: a stamp for each frame."""

    def __init__(self, sender: str, address: str):
        self._name = conversation(sender, address)
        self._next = 0

    def stamp(self) -> bytes:
        stamp = _STAMP.pack(self._name, self._next)
        self._next += 1
        return stamp


class Verdict(Enum):
    """What a stamp says of its frame."""

    NEXT = auto()
    LATER = auto()  # some before it are missing
    AGAIN = auto()  # it was here before
    FOREIGN = auto()  # of nobody who speaks here


@dataclass(frozen=True, slots=True)
class Lost:
    """What `sender` said has been lost, because a frame of it is missing or cannot be read. `rids` are the requests of
    which it spoke, as far as they could be read. Nothing more is heard on the connection until a new term or epoch."""

    sender: str
    problem: str
    rids: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        """What a request is told that has lost something."""
        return f"a part of this request was lost: {self.problem}"


class StampCheck:
    """The receiver's side: which frame of each of its `senders` is next."""

    def __init__(self, address: str, senders: Collection[str]):
        self._senders = {conversation(sender, address): sender for sender in senders}
        self._next = dict.fromkeys(self._senders, 0)

    def check(self, stamped: bytes) -> tuple[Verdict, str]:
        """What the stamp at the beginning of a frame says, and whose it is."""
        if len(stamped) < STAMP_BYTES:
            return Verdict.FOREIGN, ""
        name, number = _STAMP.unpack_from(stamped)
        sender = self._senders.get(name)
        if sender is None:
            return Verdict.FOREIGN, ""
        due = self._next[name]
        if number < due:
            return Verdict.AGAIN, sender
        return (Verdict.NEXT if number == due else Verdict.LATER), sender

    def take(self, stamped: bytes) -> None:
        """The frame with this stamp, which is the next one, has been heard."""
        name, number = _STAMP.unpack_from(stamped)
        self._next[name] = number + 1
