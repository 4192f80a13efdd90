"""ZeroMQ sockets with explicit limits, and the two small wrappers that every loop uses.

`Inbox` turns frames into checked messages and counts what it refuses. `Outbox` never blocks: what the peer does not
take is kept, in order, up to a limit, and passing the limit raises `PeerStalled`. Between our own processes both use
stamps (common/stamps.py), by which nothing is lost or heard twice unnoticed.
"""

import os
import sys
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path

import zmq

from common.codec import MAX_FRAME_BYTES, FrameError, Message, RefusedFrames, decode, encode
from common.stamps import STAMP_BYTES, Lost, StampCheck, Stamper, Verdict

HIGH_WATER_MARK = 4096  # messages queued inside ZeroMQ per peer and direction
LINGER_MS = 500  # how long a closing process waits for its last messages to leave
MAX_IPC_PATH = 100  # sockaddr_un holds 107 bytes
RECONNECT_MS, RECONNECT_MAX_MS = 10, 200  # how often a connecting socket tries, at first and later
AT_ONCE, MORE, READABLE, WRITABLE = map(int, (zmq.NOBLOCK, zmq.SNDMORE, zmq.POLLIN, zmq.POLLOUT))  # as enums, | is slow


class PeerStalled(RuntimeError):
    """A peer takes no messages and its backlog is full."""


class Endpoints:
    """The addresses inside a cluster's run directory. Receivers bind, senders connect.

    Every term and every epoch (see Go in common/messages) has sockets of its own: what was still queued in those of
    an earlier one goes with them, so that nobody can take a stale message for a new one.
    """

    def __init__(self, run_dir: Path):
        self._dir = run_dir
        try:
            str(run_dir).encode()
        except UnicodeEncodeError:
            raise ValueError(f"run directory {str(run_dir)!r} must be a path in UTF-8") from None
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
    identity: bytes | None = None,
) -> "zmq.Socket[bytes]":
    """A socket with every limit set before it is bound or connected. By its `identity` a ROUTER knows it.

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
    if identity is not None:
        socket.set(zmq.IDENTITY, identity)
    if kind == zmq.ROUTER:
        socket.set(zmq.ROUTER_MANDATORY, 1)  # an unroutable or full peer is an error, not a silent drop
    for address in filter(None, (bind, connect)):
        allow_version_6(socket, address)
    if bind is not None:
        socket.bind(bind)
    if connect is not None:
        socket.connect(connect)
    return socket


def allow_version_6(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Before it is bound or connected to an `address` of IPv6, which it would not know."""
    if address.startswith("tcp://["):
        socket.set(zmq.IPV6, 1)


def close_when_dropped(owner: object, context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]") -> None:
    """Close the socket, with its monitor, and the context when the garbage collector takes their owner.

    In a cycle it would finalize the context perhaps first, whose destructor waits for ever for sockets that it no
    longer knows. From here they are held, so that neither is garbage before the owner.
    """

    def close(context: "zmq.Context[zmq.Socket[bytes]]", _held: object) -> None:
        context.destroy(linger=0)

    weakref.finalize(owner, close, context, socket).atexit = False


def monitored_event(parts: list[bytes]) -> int:
    """What a message of a socket's monitor tells: its first two bytes, a zmq.EVENT_*. (zmq.utils.monitor knows it, too,
    but imports asyncio, which takes 20 ms, an eighth of what a command of the client takes.)"""
    return int.from_bytes(parts[0][:2], sys.byteorder)


def is_readable(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message has arrived."""
    return bool(socket.get(zmq.EVENTS) & READABLE)  # type: ignore[operator]  # an int


class Inbox:
    """The receiving end of a PULL or DEALER socket. `refused` counts what it refuses; several may share one.

    With `senders`, the processes that connect to the `address` where the socket is bound, every frame must have the
    stamp of one of them, others are refused. With `private`, nobody but a partner can send here, and stamps are not
    needed. In both cases a partner's frame that is missing or cannot be read is told as `Lost`.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        *allowed: type,
        max_frame: int = MAX_FRAME_BYTES,
        refused: RefusedFrames | None = None,
        senders: Collection[str] = (),
        address: str = "",
        private: bool = False,
    ):
        self.socket = socket
        self.refused = RefusedFrames() if refused is None else refused
        self._allowed = frozenset(allowed)
        self._max_frame = max_frame
        self._stamps = StampCheck(address, senders) if senders else None
        self._private = private
        self._deaf = False

    @property
    def ready(self) -> bool:
        """Whether a frame has arrived."""
        return is_readable(self.socket)

    def drain(self, limit: int = 1000) -> Iterator[Message | Lost]:
        """What has arrived, at most `limit` frames, without waiting. Bad frames are counted and skipped. A message has
        one part: each part of one that has several is taken for itself."""
        for n in range(limit):
            if n and not self.ready:  # cheaper than the exception below, which is for a caller who has not asked
                return
            try:
                frame = self.socket.recv(AT_ONCE)
            except zmq.Again:
                return
            msg = self.parse(frame)
            if msg is not None:
                yield msg

    def parse(self, frame: bytes) -> Message | Lost | None:
        """The message in a received frame, or None when it is refused."""
        try:
            if self._stamps is None:
                return self._decode(frame, "the cluster" if self._private else None)
            return self._check(self._stamps, frame)
        except FrameError as error:
            self.refused.count(error)
            return None

    def _check(self, stamps: StampCheck, stamped: bytes) -> Message | Lost | None:
        verdict, sender = stamps.check(stamped)
        if verdict is Verdict.FOREIGN:
            raise FrameError("foreign", "no stamp of a process that speaks here")
        if verdict is Verdict.AGAIN:
            raise FrameError("replayed", f"a frame of {sender} that was here before")
        if self._deaf:
            return None
        msg = self._decode(memoryview(stamped)[STAMP_BYTES:], sender if verdict is Verdict.NEXT else None)
        stamps.take(stamped)
        if verdict is Verdict.LATER:
            msg = Lost(sender, "frames of it are missing")
        self._deaf = isinstance(msg, Lost)
        return msg

    def _decode(self, frame: bytes | memoryview, partner: str | None) -> Message | Lost:
        """The message of a frame, or what was lost with it, where it comes from a partner."""
        try:
            msg: Message = decode(frame, self._allowed, max_bytes=self._max_frame)
            return msg
        except FrameError as error:
            if partner is None or (self._private and error.cause not in ("invalid", "oversized")):
                raise  # private: another version of Rhizome, perhaps
            self.refused.count(error)
            field = f" in {error.field}" if error.field else ""
            return Lost(partner, f"a frame of it cannot be read ({error}{field})", error.rids)


class Outbox:
    """The sending end of a PUSH or DEALER socket. `stamper` stamps the frames for an Inbox with `senders`."""

    def __init__(self, socket: "zmq.Socket[bytes]", name: str, limit: int = 65536, *, stamper: Stamper | None = None):
        self.socket = socket
        self._name = name
        self._limit = limit
        self._stamper = stamper
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
        frame = encode(msg)
        self._backlog.append(frame if self._stamper is None else self._stamper.stamp() + frame)
        self.flush()
        if len(self._backlog) > self._limit:
            raise PeerStalled(f"{self._name} takes no messages ({len(self._backlog)} are waiting)")

    def flush(self) -> None:
        """Send as much of the backlog as the socket takes."""
        while self._backlog:
            try:
                self.socket.send(self._backlog[0], AT_ONCE)
            except zmq.Again:
                return
            self._backlog.popleft()
