"""What reaches the launcher: signals, dead children, and what the children say."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from types import FrameType
from typing import Any

import zmq

from common.codec import FrameError, Message, RefusedFrames, decode, encode
from common.messages import Drained, Fatal, Joined, Progress, Pulse, Ready, Resync
from common.sockets import open_socket

_SAID = frozenset({Ready, Fatal, Progress, Pulse, Joined, Drained, Resync})


class Control:
    """`stops` counts SIGINT and SIGTERM; with a terminal, SIGHUP is a first stop, without one `hang_ups` counts it, and
    where it was ignored from the start (nohup), it stays so. Every signal, SIGCHLD too, ends a `poll`. `refused` counts
    frames that are not of our children."""

    def __init__(self, address: str):
        self.stops = 0
        self.hang_ups = 0
        self.refused = RefusedFrames()
        self._in_terminal = has_terminal()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = open_socket(self._context, zmq.ROUTER, bind=address)
        self._wake, wake_in = socket.socketpair()
        self._wake.setblocking(False)
        wake_in.setblocking(False)
        signal.set_wakeup_fd(wake_in.detach())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._on_signal)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number in (signal.SIGINT, signal.SIGTERM):
            self.stops += 1
        elif number == signal.SIGHUP and self._in_terminal:
            self.stops = max(self.stops, 1)  # it was closed, which its shell and the system may both say
        elif number == signal.SIGHUP:
            self.hang_ups += 1

    def poll(self, timeout_s: float) -> Iterator[tuple[bytes, Any]]:
        """Wait for something to happen, then give what children have said: (where an answer goes, message)."""
        self._poller.poll(int(timeout_s * 1000))
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(parts) != 2:
                    raise FrameError("malformed", f"one part expected, got {len(parts) - 1}")
                msg = decode(parts[1], _SAID)
            except FrameError as error:
                self.refused.count(error)
                continue
            yield parts[0], msg

    def send(self, identity: bytes, msg: Message) -> None:
        """A child that has just died hears nothing, and need not."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([identity, encode(msg)], zmq.NOBLOCK)

    def close(self) -> None:
        self._context.destroy(linger=0)


def has_terminal() -> bool:
    """Whether this process has a controlling terminal, wherever its input comes from: one that is closed hangs up."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
