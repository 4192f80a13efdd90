"""A test's end of a connection between two processes: with the stamps of the process whose place it takes."""

import zmq

from common.codec import Message, encode
from common.sockets import open_socket
from common.stamps import Stamper


class StampedSocket:
    """A PUSH socket in the place of `sender`."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", sender: str, address: str):
        self.socket = open_socket(context, zmq.PUSH, connect=address)
        self.socket.linger = 0
        self.stamper = Stamper(sender, address)

    def send(self, msg: Message) -> None:
        self.send_frame(encode(msg))

    def send_frame(self, frame: bytes) -> None:
        self.socket.send_multipart([self.stamper.stamp(), frame])
