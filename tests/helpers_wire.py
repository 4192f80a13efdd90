"""A test's end of a connection between two processes: with the stamps of the process whose place it takes; and frames
that say all of their message."""

from typing import Any

import zmq

from common.codec import PROTOCOL_VERSION, Message, Struct, encode, schema_of
from common.fields import Checker, Maybe
from common.sockets import open_socket
from common.stamps import STAMP_BYTES, Stamper


class StampedSocket:
    """A PUSH socket in the place of `sender`."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", sender: str, address: str):
        self.socket = open_socket(context, zmq.PUSH, connect=address)
        self.socket.linger = 0
        self.stamper = Stamper(sender, address)

    def send(self, msg: Message) -> None:
        self.send_frame(encode(msg))

    def send_frame(self, frame: bytes) -> None:
        self.socket.send(self.stamper.stamp() + frame)


def unstamped(frame: bytes) -> bytes:
    """What one of our processes has sent to another, without its stamp."""
    return frame[STAMP_BYTES:]


def whole_body(msg: Message) -> list[Any]:
    """What the frame of a message holds, with the last fields that hold their defaults."""
    return [PROTOCOL_VERSION, msg.TAG, *whole_fields(msg)]


def whole_fields(value: Any) -> list[Any]:
    return [_whole(checker, getattr(value, name)) for name, checker in schema_of(type(value))]


def _whole(checker: Checker, value: Any) -> Any:
    inner = checker.inner if isinstance(checker, Maybe) and value is not None else checker
    return whole_fields(value) if isinstance(inner, Struct) else checker.pack(value)
