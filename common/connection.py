"""A synchronous connection to a cluster: what the thin client, benchmarks and tests speak through.

It submits requests and hands out their rows one by one. One thread uses one connection.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

import zmq

from common.messages import (
    MAX_CHOICES,
    MAX_RID,
    Abort,
    Beat,
    ErrorCode,
    Finish,
    Generate,
    GetInfo,
    GetStats,
    Info,
    RequestError,
    Stats,
    TextBatch,
)
from common.prompts import Prompt, prompt_fields
from common.rows import Row as Row
from common.rows import RowReader
from common.run_dir import RunDirError
from common.sampling_params import SamplingParams
from common.sockets import Inbox, Outbox, allow_version_6, close_when_dropped, monitored_event, open_socket
from common.stamps import Lost

SILENCE_LIMIT_S = 10.0  # a cluster with live requests speaks (Beat) far more often than this
ENDINGS = (  # of a connection, as its monitor tells them
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED  # nobody is there, also after a disconnect
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ConnectionLost(RuntimeError):
    """The cluster went away or stopped answering."""


class Unreachable(ConnectionLost):
    """Nobody is at the address."""


def frontend_in(cluster: dict[str, Any]) -> str:
    """The address that clients connect to, of the values of cluster.json. Raises RunDirError."""
    try:
        return str(cluster["addresses"]["frontend"])
    except (KeyError, TypeError):
        raise RunDirError("cluster.json is of another version than this package") from None


class Connection:
    """A DEALER connection to the address of a cluster's frontend.

    `poll`, `stats` and `info` raise ConnectionLost when the connection breaks, and `poll` also when the cluster has
    sent nothing for `silence_limit_s` of polling while a request is live. Use it in a `with` statement.
    """

    def __init__(self, address: str, *, silence_limit_s: float = SILENCE_LIMIT_S):
        self._address = address
        self._silence_limit_s = silence_limit_s
        self._silent_s = 0.0
        self._live: dict[int, set[int]] = {}  # the choices of each request that have not ended
        self._numbers = count()
        self._reader = RowReader()
        self._rows: deque[Row | RequestError] = deque()
        self._stats: dict[int, dict[str, int]] = {}
        self._info: Info | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._linger_ms = 500
        socket = open_socket(self._context, zmq.DEALER)
        close_when_dropped(self, self._context, socket)
        allow_version_6(socket, address)
        self._monitor = socket.get_monitor_socket(ENDINGS)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise Unreachable(f"cannot connect: {error}") from None
        self._inbox = Inbox(socket, TextBatch, RequestError, Stats, Info, Beat, private=True)
        self._outbox = Outbox(socket, address)
        self._poller = zmq.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        return self._address

    @property
    def live(self) -> int:
        """How many submitted requests have not ended."""
        return len(self._live)

    @property
    def refused(self) -> int:
        """How many received frames were refused."""
        return self._inbox.refused.total

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        stream: bool = True,
        n: int = 1,
        cache_salt: str = "",
        priority: int = 0,
        deadline_ms: int = 0,
        tools: str = "",
        template_args: str = "",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str = "",
    ) -> int:
        """Send a request and return its id. The prompt is text, token ids (used as they are) or chat messages.

        `n` and what follows are as in `Generate`. The request is live until all its choices have ended, each with a
        row of its own or together by a RequestError.

        Raises FrameError when it is too large for a frame, PeerStalled when the cluster takes no messages.
        """
        rid = next(self._numbers) & MAX_RID
        text, token_ids, chat = prompt_fields(prompt)
        msg = Generate(
            rid, text, token_ids, chat, params, stream, n, cache_salt, priority, deadline_ms, tools, template_args,
            add_generation_prompt, continue_final_message, truncate_prompt_tokens, truncation_side,
        )  # fmt: skip
        self._outbox.send(msg)
        if not self._live:
            self._silent_s = 0.0
        self._live[rid] = set(range(min(n, MAX_CHOICES)))
        return rid

    def abort(self, rid: int) -> None:
        """Ask the cluster to end a request; the last row of each live choice (finish ABORT) still comes."""
        if rid in self._live:
            self._outbox.send(Abort(rid))

    def abort_all(self) -> None:
        for rid in self._live:
            self._outbox.send(Abort(rid))

    def poll(self, timeout_s: float) -> list[Row | RequestError]:
        """What arrived for live requests, waiting at most `timeout_s` when nothing is there yet."""
        if not self._rows:
            self._receive(timeout_s)
        rows = list(self._rows)
        self._rows.clear()
        return rows

    def stats(self, timeout_s: float = SILENCE_LIMIT_S) -> dict[str, int]:
        """The cluster's counters and gauges by name. Raises ConnectionLost when no answer comes in time."""
        query = next(self._numbers) & MAX_RID
        self._outbox.send(GetStats(query))
        self._receive_until(lambda: query in self._stats, timeout_s)
        return self._stats.pop(query)

    def info(self, timeout_s: float = SILENCE_LIMIT_S) -> Info:
        """What the cluster serves, which is asked once. Raises ConnectionLost when no answer comes in time."""
        if self._info is None:
            self._outbox.send(GetInfo(next(self._numbers) & MAX_RID))
            self._receive_until(lambda: self._info is not None, timeout_s)
        assert self._info is not None
        return self._info

    def close(self) -> None:
        """Close at once; messages that were sent, such as aborts, get half a second to leave."""
        self._inbox.socket.disable_monitor()
        self._context.destroy(linger=self._linger_ms)

    def _receive_until(self, answered: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not answered():
            left = deadline - time.monotonic()
            if left <= 0:
                raise ConnectionLost(f"the cluster did not answer within {timeout_s:g} s")
            self._receive(left)

    def _receive(self, timeout_s: float) -> None:
        wanted = zmq.POLLIN | (zmq.POLLOUT if self._outbox.backlog else 0)
        self._poller.register(self._inbox.socket, wanted)
        started = time.monotonic()
        # A frozen or suspended client must not blame the cluster: only time spent listening counts as silence.
        ready = dict(self._poller.poll(math.ceil(max(0.0, timeout_s) * 1000)))
        self._outbox.flush()
        messages = list(self._inbox.drain()) if self._inbox.socket in ready else []
        for msg in messages:
            self._take(msg, time.monotonic_ns())
        if messages:
            self._silent_s = 0.0
            return
        if self._monitor in ready:
            self._linger_ms = 0  # nobody is there to take what is left
            if monitored_event(self._monitor.recv_multipart()) == zmq.EVENT_CONNECT_RETRIED:
                raise Unreachable(f"no cluster answers at {self._address}")
            raise ConnectionLost(f"the connection to {self._address} is broken: its other end is gone")
        self._silent_s += min(time.monotonic() - started, timeout_s)
        if self._live and self._silent_s >= self._silence_limit_s:
            hint = " that this version understands" if self.refused else ""
            raise ConnectionLost(f"the cluster stopped answering: nothing{hint} for {self._silence_limit_s:g} s")

    def _take(self, msg: object, now_ns: int) -> None:
        if isinstance(msg, Stats):
            self._stats[msg.query] = msg.values
        elif isinstance(msg, Info):
            self._info = msg
        elif isinstance(msg, RequestError):
            self._reader.forget(msg.rid)
            if self._live.pop(msg.rid, None) is not None:
                self._rows.append(msg)
        elif isinstance(msg, TextBatch):
            self._take_batch(msg, now_ns)
        elif isinstance(msg, Lost):
            self._take_lost(msg)

    def _take_lost(self, lost: Lost) -> None:
        """A part of some answers cannot be read: they end, rather than with a hole in them."""
        if not lost.rids:
            raise ConnectionLost(lost.words)
        for rid in lost.rids:
            if rid in self._live:
                self._outbox.send(Abort(rid))
                self._take(RequestError(rid, ErrorCode.INTERNAL, lost.words), 0)

    def _take_batch(self, batch: TextBatch, now_ns: int) -> None:
        for row in self._reader.rows(batch, now_ns, lambda rid, choice: choice in self._live.get(rid, ())):
            if row.finish is not Finish.NONE:
                self._end_choice(row.rid, row.choice)
            self._rows.append(row)

    def _end_choice(self, rid: int, choice: int) -> None:
        running = self._live[rid]
        running.remove(choice)
        if not running:
            del self._live[rid]
