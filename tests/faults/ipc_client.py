"""A client on the cluster's own socket that hides nothing: also rows that come after an end are seen."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import zmq
from zmq.utils.monitor import parse_monitor_message

from common.async_reader import AsyncReader
from common.codec import Message, RefusedFrames, encode
from common.connection import ENDINGS
from common.messages import Abort, Beat, ErrorCode, Finish, Generate, GetStats, RequestError, Stats, TextBatch, ints
from common.rows import Row, RowReader
from common.sockets import Inbox, open_socket
from common.stamps import Lost
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
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._numbers = count()
        self._live: dict[int, _Live] = {}
        self._done: dict[int, Outcome] = {}
        self._stats: dict[int, asyncio.Future[dict[str, int]]] = {}
        self._reader = RowReader()
        self._link: _Link | None = None
        self.strays = 0  # rows that belong to no request at all
        self._refused = RefusedFrames()

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
                    self.abort(rid)
            case Conduct.DISCONNECT:
                await asyncio.sleep(after_s)
                self._close(Ending.LEFT)
            case Conduct.SLOW:
                await live.began.wait()
                link = self._link
                if link is not None:
                    link.pause()
                    await asyncio.sleep(after_s)
                    link.go_on()

    def submit(self, request: Request, *, stream: bool = True, deadline_ms: int = 0) -> tuple[int, _Live]:
        link = self._connect()
        rid = next(self._numbers)
        live = _Live(Outcome([Choice() for _ in range(request.n)]), set(range(request.n)))
        self._live[rid] = live
        msg = Generate(
            rid, None, ints(*request.prompt), None, request.params, stream, request.n, deadline_ms=deadline_ms
        )
        link.send(msg)
        return rid, live

    def abort(self, rid: int) -> None:
        if rid in self._live and self._link is not None:
            self._link.send(Abort(rid))

    async def stats(self, timeout_s: float) -> dict[str, int] | None:
        """The cluster's counters, or None when no answer comes in time. They take the way of all rows, and in their
        order: what was sent before the scheduler counted has come before them."""
        query = next(self._numbers)
        answer: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        self._stats[query] = answer
        try:
            self._connect().send(GetStats(query))
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

    @property
    def refused(self) -> int:
        return self._refused.total

    # ---- the connection -------------------------------------------------------------------------------------------

    def _connect(self) -> "_Link":
        if self._link is None:
            self._link = _Link(self._context, self._address, self._receive, self._on_ending, self._refused)
        return self._link

    def _close(self, ending: Ending, problem: str = "") -> None:
        link, self._link = self._link, None
        if link is None:
            return
        link.close()
        for rid in list(self._live):
            self._end(rid, ending, problem)
        for answer in self._stats.values():
            if not answer.done():
                answer.set_exception(ConnectionError("disconnected"))
        self._stats.clear()

    def _on_ending(self, parts: list[bytes]) -> None:
        event = parse_monitor_message(parts)["event"]
        self._close(Ending.DISCONNECTED, f"the connection broke ({zmq.Event(event).name})")

    def _receive(self, msg: Message | Lost | None) -> None:
        match msg:
            case TextBatch():
                self._take(msg)
            case RequestError():
                self._fail(msg)
            case Stats(query=query, values=values) if (answer := self._stats.pop(query, None)) is not None:
                if not answer.done():
                    answer.set_result(values)

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


class _Link:
    """A connection that is read in the event loop until it is closed; while it is paused, what comes lies there."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        take: Callable[[Message | Lost | None], None],
        on_ending: Callable[[list[bytes]], None],
        refused: RefusedFrames,
    ):
        self._socket = open_socket(context, zmq.DEALER)
        self._monitor = self._socket.get_monitor_socket(ENDINGS)
        self._socket.connect(address)
        inbox = Inbox(self._socket, TextBatch, RequestError, Stats, Beat, refused=refused)
        self._incoming = AsyncReader(self._socket, lambda frame: take(inbox.parse(frame)))
        self._ending = AsyncReader(self._monitor, on_ending, parts=True)
        self._tasks = [asyncio.create_task(reader.run()) for reader in (self._incoming, self._ending)]
        self._paused = False

    def send(self, msg: Message) -> None:
        self._socket.send(encode(msg), zmq.NOBLOCK)
        self._incoming.look()

    def pause(self) -> None:
        self._incoming.stop()
        self._paused = True

    def go_on(self) -> None:
        if self._paused and not self._socket.closed:
            self._paused = False
            self._tasks.append(asyncio.create_task(self._incoming.run()))

    def close(self) -> None:
        for reader in (self._incoming, self._ending):
            reader.stop()
        for task in self._tasks:
            task.cancel()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)


def _add(choice: Choice, row: Row) -> None:
    choice.tokens.extend(row.token_ids)
    choice.text += row.text
    choice.finish = row.finish
    choice.scored.extend(entry.token_id for entry in row.logprobs or ())
    choice.prompt_scored.extend(entry.token_id if entry else -1 for entry in row.prompt_logprobs or ())
