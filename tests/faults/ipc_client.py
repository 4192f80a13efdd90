"""A client on the cluster's own socket that hides nothing: also rows that come after an end are seen."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from common.codec import encode
from common.connection import ENDINGS
from common.messages import Abort, Beat, ErrorCode, Finish, Generate, GetStats, RequestError, Stats, TextBatch, ints
from common.rows import Row, RowReader
from common.sockets import Inbox, open_socket
from tests.faults.catalog import CATALOG, Request
from tests.faults.judge import CONDEMNED, LATE_TOKENS, Choice, Ending, Outcome
from tests.faults.plan import Ask, Conduct
from tests.faults.progress import Progress

_ENDINGS = {
    ErrorCode.OVERLOADED: Ending.OVERLOADED,
    ErrorCode.DEADLINE: Ending.DEADLINE,
    ErrorCode.SHUTTING_DOWN: Ending.STOPPING,
}
RETRY_S = 0.05
CONNECT_S = 60.0  # a tokenizer that was killed serves again by then


@dataclass(slots=True)
class _Live:
    outcome: Outcome
    open: set[int]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    began: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, ending: Ending, problem: str = "") -> None:
        self.outcome.ending, self.outcome.problem = ending, problem
        self.ended.set()
        self.began.set()


class IpcClient:
    """Connections to `address`, one after the other: the next one is made when a request finds the last one broken.

    `progress` is told of all tokens. Use it in `async with`.
    """

    def __init__(self, address: str, progress: Progress):
        self._address = address
        self._progress = progress
        self._context = zmq.asyncio.Context(io_threads=1)
        self._numbers = count()
        self._live: dict[int, _Live] = {}
        self._done: dict[int, Outcome] = {}
        self._stats: dict[int, asyncio.Future[dict[str, int]]] = {}
        self._reader = RowReader()
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reading = asyncio.Event()
        self._reading.set()
        self.strays = 0  # rows that belong to no request at all
        self.refused = 0

    async def __aenter__(self) -> "IpcClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close(Ending.LEFT)
        self._context.destroy(linger=0)

    # ---- asking ---------------------------------------------------------------------------------------------------

    async def play(self, ask: Ask) -> Outcome:
        """Do what `ask` says; returns at its end."""
        deadline_ms = ask.after_ms if ask.conduct is Conduct.DEADLINE else 0
        rid, live = self.submit(CATALOG[ask.request], stream=ask.stream, deadline_ms=deadline_ms)
        with contextlib.suppress(asyncio.CancelledError):  # the driver has given it up: it is silent
            await self._behave(ask, rid, live)
            await live.ended.wait()
        return live.outcome

    async def _behave(self, ask: Ask, rid: int, live: _Live) -> None:
        after_s = ask.after_ms / 1e3
        match ask.conduct:
            case Conduct.CANCEL:
                await asyncio.sleep(after_s)
                if not live.ended.is_set():
                    live.outcome.given_up_at = live.outcome.tokens
                    self._send_for(live, Abort(rid))
            case Conduct.DISCONNECT:
                await asyncio.sleep(after_s)
                self._close(Ending.LEFT)
            case Conduct.SLOW:
                await live.began.wait()
                self._reading.clear()
                await asyncio.sleep(after_s)
                self._reading.set()

    def submit(self, request: Request, *, stream: bool = True, deadline_ms: int = 0) -> tuple[int, _Live]:
        self._connect()
        rid = next(self._numbers)
        live = _Live(Outcome([Choice() for _ in range(request.n)]), set(range(request.n)))
        self._live[rid] = live
        msg = Generate(
            rid, None, ints(*request.prompt), None, request.params, stream, request.n, deadline_ms=deadline_ms
        )
        self._send_for(live, msg)
        return rid, live

    def abort(self, rid: int) -> None:
        if (live := self._live.get(rid)) is not None:
            self._send_for(live, Abort(rid))

    async def stats(self, timeout_s: float) -> dict[str, int] | None:
        """The cluster's counters, or None when no answer comes in time. They take the way of all rows, and in their
        order: what was sent before the scheduler counted has come before them."""
        query = next(self._numbers)
        answer: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        self._stats[query] = answer
        self._connect()
        try:
            await cast(zmq.asyncio.Socket, self._socket).send(encode(GetStats(query)), zmq.NOBLOCK)
            return await asyncio.wait_for(answer, timeout_s)
        except (TimeoutError, zmq.ZMQError, ConnectionError):
            self._stats.pop(query, None)
            return None

    def give_up(self) -> None:
        """End what has not ended, as silent."""
        for rid in list(self._live):
            self._end(rid, Ending.SILENT)

    @property
    def live(self) -> int:
        return len(self._live)

    def _send_for(self, live: _Live, msg: Any) -> None:
        if live.ended.is_set() or self._socket is None:
            return
        error = cast("asyncio.Future[None]", self._socket.send(encode(msg), zmq.NOBLOCK)).exception()
        if error is not None:
            raise error

    # ---- the connection -------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._socket is not None:
            return
        socket = cast(zmq.asyncio.Socket, open_socket(cast(Any, self._context), zmq.DEALER))
        monitor = socket.get_monitor_socket(ENDINGS)
        socket.connect(self._address)
        self._socket = socket
        inbox = Inbox(cast(Any, socket), TextBatch, RequestError, Stats, Beat)
        self._tasks = [asyncio.create_task(self._receive(socket, inbox)), asyncio.create_task(self._watch(monitor))]

    def _close(self, ending: Ending, problem: str = "") -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        socket.disable_monitor()
        socket.close(0)
        for rid in list(self._live):
            self._end(rid, ending, problem)
        for answer in self._stats.values():
            if not answer.done():
                answer.set_exception(ConnectionError("disconnected"))
        self._stats.clear()

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        try:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
        finally:
            monitor.close(0)
        self._close(Ending.DISCONNECTED, f"the connection broke ({zmq.Event(event).name})")

    async def _receive(self, socket: zmq.asyncio.Socket, inbox: Inbox) -> None:
        while True:
            await self._reading.wait()
            msg = inbox.parse(await socket.recv())
            self.refused = inbox.refused.total
            match msg:
                case TextBatch():
                    self._take(msg)
                case RequestError():
                    self._fail(msg)
                case Stats(query=query, values=values) if (answer := self._stats.pop(query, None)) is not None:
                    if not answer.done():
                        answer.set_result(values)
            await asyncio.sleep(0)

    def _take(self, batch: TextBatch) -> None:
        for row in self._reader.rows(batch, time.monotonic_ns(), self._is_open):
            live = self._live[row.rid]
            _add(live.outcome.choices[row.choice], row)
            self._progress.tokens(len(row.token_ids))
            live.began.set()
            if row.finish is not Finish.NONE:
                live.open.remove(row.choice)
                if not live.open:
                    self._end(row.rid, Ending.FINISHED)
            elif live.outcome.late_tokens > LATE_TOKENS:
                self._end(row.rid, Ending.IGNORED)

    def _is_open(self, rid: int, choice: int) -> bool:
        if rid in self._live and choice in self._live[rid].open:
            return True
        outcome = self._live[rid].outcome if rid in self._live else self._done.get(rid)
        if outcome is None:
            self.strays += 1
        elif outcome.ending is not Ending.IGNORED:
            outcome.stray_rows += 1
        return False

    def _fail(self, error: RequestError) -> None:
        self._reader.forget(error.rid)
        if error.rid in self._live:
            ending = _ENDINGS.get(ErrorCode(error.code), Ending.OTHER_ERROR)
            ending = Ending.CONDEMNED if error.problem.startswith(CONDEMNED) else ending
            self._end(error.rid, ending, error.problem)
        else:
            self._is_open(error.rid, -1)

    def _end(self, rid: int, ending: Ending, problem: str = "") -> None:
        live = self._live.pop(rid)
        live.end(ending, problem)
        self._done[rid] = live.outcome


def _add(choice: Choice, row: Row) -> None:
    choice.tokens.extend(row.token_ids)
    choice.text += row.text
    choice.finish = row.finish
    choice.scored.extend(entry.token_id for entry in row.logprobs or ())
    choice.prompt_scored.extend(entry.token_id if entry else -1 for entry in row.prompt_logprobs or ())
