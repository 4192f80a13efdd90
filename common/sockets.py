"""ZeroMQ sockets with explicit limits, and the two small wrappers that every loop uses.

`Inbox` turns frames into checked messages and counts what it refuses. `Outbox` never blocks: what the peer does not
take is kept, in order, up to a limit, and passing the limit raises `PeerStalled`.
"""

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import zmq

from common.codec import MAX_FRAME_BYTES, FrameError, Message, RefusedFrames, decode, encode

HIGH_WATER_MARK = 4096  # messages queued inside ZeroMQ per peer and direction
LINGER_MS = 500  # how long a closing process waits for its last messages to leave
MAX_IPC_PATH = 100  # sockaddr_un holds 107 bytes
RECONNECT_MS, RECONNECT_MAX_MS = 10, 200  # how often a connecting socket tries, at first and later


class PeerStalled(RuntimeError):
    """A peer takes no messages and its backlog is full."""


class Endpoints:
    """The addresses inside a cluster's run directory. Receivers bind, senders connect.

    Every term and every epoch (see Go in common/messages) has sockets of its own: what was still queued in those of
    an earlier one goes with them, so that nobody can take a stale message for a new one.
    """

    def __init__(self, run_dir: Path):
        self._dir = run_dir
        longest = max(len(os.fsencode(a)) for a in (self.detokenizer(10**6), self.plan(9999, 10**6))) - len("ipc://")
        if longest > MAX_IPC_PATH:
            limit = MAX_IPC_PATH - (longest - len(os.fsencode(run_dir)))
            raise ValueError(f"run directory {run_dir} is too long for Unix sockets (limit {limit} bytes)")

    def _ipc(self, name: str) -> str:
        return f"ipc://{self._dir}/{name}.sock"

    @property
    def control(self) -> str:
        return self._ipc("control")

    @property
    def frontend(self) -> str:
        return self._ipc("frontend")

    def tokenizer(self, term: int) -> str:
        return self._ipc(f"tokenizer-{term}")

    def detokenizer(self, term: int) -> str:
        return self._ipc(f"detokenizer-{term}")

    def scheduler(self, term: int) -> str:
        return self._ipc(f"scheduler-{term}")

    def results(self, epoch: int) -> str:
        return self._ipc(f"results-{epoch}")

    def plan(self, rank: int, epoch: int) -> str:
        return self._ipc(f"plan{rank}-{epoch}")


def open_socket(
    context: "zmq.Context[zmq.Socket[bytes]]",
    kind: int,
    *,
    bind: str | None = None,
    connect: str | None = None,
    max_frame: int = MAX_FRAME_BYTES,
) -> "zmq.Socket[bytes]":
    """A socket with every limit set before it is bound or connected.

    ZeroMQ itself cuts the connection of a peer that sends more than four times what the codec would take, so that
    memory stays bounded whatever is sent.
    """
    socket = context.socket(kind)
    socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.MAXMSGSIZE, 4 * max_frame)
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    if kind == zmq.ROUTER:
        socket.set(zmq.ROUTER_MANDATORY, 1)  # an unroutable or full peer is an error, not a silent drop
    if (bind or connect or "").startswith("tcp://["):
        socket.set(zmq.IPV6, 1)
    if bind is not None:
        socket.bind(bind)
    if connect is not None:
        socket.connect(connect)
    return socket


class Inbox:
    """The receiving end of a PULL or DEALER socket. `refused` counts what it refuses; several may share one."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        *allowed: type,
        max_frame: int = MAX_FRAME_BYTES,
        refused: RefusedFrames | None = None,
    ):
        self.socket = socket
        self.refused = RefusedFrames() if refused is None else refused
        self._allowed = frozenset(allowed)
        self._max_frame = max_frame

    def drain(self, limit: int = 1000) -> Iterator[Message]:
        """What has arrived, at most `limit` frames, without waiting. Bad frames are counted and skipped."""
        for _ in range(limit):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            msg = self.parse(parts)
            if msg is not None:
                yield msg

    def parse(self, parts: list[bytes]) -> Message | None:
        """The message in one received multipart, or None when it is refused."""
        try:
            if len(parts) != 1:
                raise FrameError("malformed", f"one part expected, got {len(parts)}")
            msg: Message = decode(parts[0], self._allowed, max_bytes=self._max_frame)
            return msg
        except FrameError as error:
            self.refused.count(error)
            return None


class Outbox:
    """The sending end of a PUSH or DEALER socket."""

    def __init__(self, socket: "zmq.Socket[bytes]", name: str, limit: int = 65536):
        self.socket = socket
        self._name = name
        self._limit = limit
        self._backlog: deque[bytes] = deque()

    @property
    def backlog(self) -> int:
        return len(self._backlog)

    def close(self) -> None:
        """Close the socket; what it holds is dropped."""
        self._backlog.clear()
        self.socket.close(0)

    def send(self, msg: Message) -> None:
        """Send now or keep for later. Raises PeerStalled when the backlog is full."""
        self._backlog.append(encode(msg))
        self.flush()
        if len(self._backlog) > self._limit:
            raise PeerStalled(f"{self._name} takes no messages ({len(self._backlog)} are waiting)")

    def flush(self) -> None:
        """Send as much of the backlog as the socket takes."""
        while self._backlog:
            try:
                self.socket.send(self._backlog[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._backlog.popleft()
