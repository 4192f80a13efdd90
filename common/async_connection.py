"""The asyncio twin of `common.connection`: what the gateway and the asynchronous Python API speak through.

async with AsyncConnection(address) as connection:
    async for row in connection.submit("Once upon a time", SamplingParams()):
        ...
"""

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any, TypeVar

import zmq

from common.async_reader import AsyncReader
from common.codec import Message, encode
from common.connection import ENDINGS, SILENCE_LIMIT_S, ConnectionLost, Unreachable
from common.messages import (
    MAX_CHOICES,
    MAX_RID,
    Abort,
    Beat,
    ChatMessage,
    Detokenize,
    ErrorCode,
    Generate,
    GetInfo,
    GetStats,
    Info,
    RequestError,
    Stats,
    Text,
    TextBatch,
    Tokenize,
    Tokens,
    ints,
)
from common.prompts import Prompt, prompt_fields
from common.rows import RowReader
from common.sampling_params import SamplingParams
from common.sockets import (
    AT_ONCE,
    Inbox,
    PeerStalled,
    allow_version_6,
    close_when_dropped,
    monitored_event,
    open_socket,
)
from common.stamps import Lost
from common.story import GATEWAY
from common.stream import RequestFailed, Stream, UnreadRows

MAX_UNREAD = 2**16  # rows of one request that its reader may leave unread
MAX_UNSENT = 2**16  # messages that wait for a cluster that takes none
T = TypeVar("T")


class AsyncConnection:
    """A DEALER connection to the address of a cluster's frontend, for one event loop. Use it in `async with`.

    When the connection breaks, or the cluster has sent nothing for `silence_limit_s` while a request is live, every
    live stream and question ends with ConnectionLost, and so does every later one: make a new connection then.
    """

    def __init__(
        self,
        address: str,
        *,
        silence_limit_s: float = SILENCE_LIMIT_S,
        max_unread: int = MAX_UNREAD,
        gateway: bool = False,
    ):
        self._address = address
        self._silence_limit_s = silence_limit_s
        self._max_unread = max_unread
        self._silent_s = 0.0
        self._streams: dict[int, Stream] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._reader = RowReader()
        self._numbers = count()
        self._unsent: deque[bytes] = deque()
        self._lost: ConnectionLost | None = None
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._linger_ms = 500
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = open_socket(self._context, zmq.DEALER)
        close_when_dropped(self, self._context, self._socket)
        allow_version_6(self._socket, address)
        if gateway:
            self._socket.set(zmq.ROUTING_ID, GATEWAY + secrets.token_bytes(8))
        answers = (TextBatch, RequestError, Stats, Beat, Tokens, Text, Info)
        self._inbox = Inbox(self._socket, *answers, private=True)
        self._incoming = AsyncReader(self._socket, self._receive, writable=self._flush)

    async def __aenter__(self) -> "AsyncConnection":
        """Connect. Nobody at the address shows at the first request; a bad address raises Unreachable here."""
        self._monitor = self._socket.get_monitor_socket(ENDINGS)
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise Unreachable(f"cannot connect: {error}") from None
        ending = AsyncReader(self._monitor, self._on_ending, parts=True)
        for work in (self._incoming.run(), ending.run(), self._watch_silence()):
            self._tasks.append(asyncio.create_task(work))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort what is live and close; the aborts get half a second to leave."""
        if self._context.closed:
            return
        self.abort_all()
        self._lose(ConnectionLost("the connection was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(self._linger_ms)
        await asyncio.get_running_loop().run_in_executor(None, self._context.term)

    @property
    def lost(self) -> ConnectionLost | None:
        """Why the connection can no longer be used, or None."""
        return self._lost

    async def ended(self) -> None:
        """Returns when the connection can no longer be used."""
        await self._ended.wait()

    @property
    def live(self) -> int:
        """How many submitted requests have not ended."""
        return len(self._streams)

    @property
    def refused(self) -> int:
        """How many received frames were refused."""
        return self._inbox.refused.total

    # ---- requests -------------------------------------------------------------------------------------------------

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
    ) -> Stream:
        """Send a request and return its stream. The prompt is text, token ids (used as they are) or chat messages;
        the rest is as in `Generate`.

        Raises FrameError when it is too large for a frame, PeerStalled when the cluster takes no messages, and
        ConnectionLost when the connection is broken.
        """
        rid = self._number()
        text, token_ids, chat = prompt_fields(prompt)
        msg = Generate(
            rid, text, token_ids, chat, params, stream, n, cache_salt, priority, deadline_ms, tools, template_args,
            add_generation_prompt, continue_final_message, truncate_prompt_tokens, truncation_side,
        )  # fmt: skip
        self._send(msg)
        opened = Stream(rid, min(n, MAX_CHOICES), self._abort)
        self._streams[rid] = opened
        return opened

    def abort_all(self) -> None:
        """Ask the cluster to end all live requests."""
        for stream in list(self._streams.values()):
            stream.abort()

    def _abort(self, rid: int) -> None:
        """An abort that cannot be sent is for a cluster that is gone."""
        with contextlib.suppress(ConnectionLost, PeerStalled):
            self._send(Abort(rid))

    # ---- questions ------------------------------------------------------------------------------------------------

    async def stats(self, timeout_s: float = SILENCE_LIMIT_S) -> dict[str, int]:
        """The cluster's counters and gauges by name. Raises ConnectionLost when no answer comes in time."""
        query = self._number()
        return (await self._ask(query, GetStats(query), Stats, timeout_s)).values

    async def info(self, timeout_s: float = SILENCE_LIMIT_S) -> Info:
        """What the cluster serves. Raises ConnectionLost when no answer comes in time."""
        rid = self._number()
        return await self._ask(rid, GetInfo(rid), Info, timeout_s)

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        add_special_tokens: bool = True,
        with_pieces: bool = False,
        timeout_s: float = SILENCE_LIMIT_S,
        **template: Any,
    ) -> Tokens:
        """The tokens of a text or chat; `template` and the rest are as in `Tokenize`. Raises RequestFailed and
        ConnectionLost."""
        rid = self._number()
        text = prompt if isinstance(prompt, str) else None
        chat = None if isinstance(prompt, str) else tuple(prompt)
        question = Tokenize(rid, text, chat, add_special_tokens, with_pieces, **template)
        return await self._ask(rid, question, Tokens, timeout_s)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout_s: float = SILENCE_LIMIT_S
    ) -> str:
        """The text of tokens. Raises RequestFailed and ConnectionLost."""
        rid = self._number()
        question = Detokenize(rid, ints(*token_ids), skip_special_tokens)
        return (await self._ask(rid, question, Text, timeout_s)).text

    async def _ask(self, number: int, question: Message, kind: type[T], timeout_s: float) -> T:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._send(question)
            async with asyncio.timeout(timeout_s):
                msg = await answer
        except TimeoutError:
            raise ConnectionLost(f"the cluster did not answer within {timeout_s:g} s") from None
        finally:
            del self._asked[number]
        if not isinstance(msg, kind):
            raise ConnectionLost(f"the cluster answered with {type(msg).__name__}, {kind.__name__} was asked for")
        return msg

    def _number(self) -> int:
        return next(self._numbers) & MAX_RID

    # ---- sending --------------------------------------------------------------------------------------------------

    def _send(self, msg: Message) -> None:
        """Send now, or in order as soon as the cluster takes it."""
        frame = encode(msg)
        if self._lost is not None:
            raise self._lost
        if not self._streams and not self._asked:
            self._silent_s = 0.0
        if len(self._unsent) >= MAX_UNSENT:
            raise PeerStalled(f"{self._address} takes no messages ({len(self._unsent)} are waiting)")
        self._unsent.append(frame)
        self._flush()
        self._incoming.look()

    def _flush(self) -> None:
        """Send as much as the cluster takes."""
        with contextlib.suppress(zmq.Again):
            while self._unsent:
                self._socket.send(self._unsent[0], AT_ONCE)
                self._unsent.popleft()

    # ---- receiving ------------------------------------------------------------------------------------------------

    def _receive(self, frame: bytes) -> None:
        msg = self._inbox.parse(frame)
        if msg is not None:
            self._silent_s = 0.0
            self._take(msg, time.monotonic_ns())

    def _take(self, msg: Message | Lost, now_ns: int) -> None:
        match msg:
            case TextBatch():
                self._take_batch(msg, now_ns)
            case Stats():
                self._answer(msg.query, msg)
            case RequestError():
                self._reader.forget(msg.rid)
                stream = self._streams.pop(msg.rid, None)
                if stream is not None:
                    stream.fail(RequestFailed(msg))
                self._answer(msg.rid, RequestFailed(msg))
            case Tokens() | Text() | Info():
                self._answer(msg.rid, msg)
            case Lost():
                self._take_lost(msg)

    def _take_lost(self, lost: Lost) -> None:
        """A part of some answers cannot be read: they end, rather than with a hole in them."""
        if not lost.rids:
            self._lose(ConnectionLost(lost.words))
        for rid in lost.rids:
            self._abort(rid)
            self._take(RequestError(rid, ErrorCode.INTERNAL, lost.words), 0)

    def _answer(self, number: int, answer: Message | Exception) -> None:
        waiting = self._asked.get(number)
        if waiting is None or waiting.done():
            return
        if isinstance(answer, Exception):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    def _take_batch(self, batch: TextBatch, now_ns: int) -> None:
        for row in self._reader.rows(batch, now_ns, self._is_live):
            stream = self._streams[row.rid]
            stream.push(row)
            if stream.ended:
                del self._streams[row.rid]
            elif stream.unread > self._max_unread:
                stream.abort()
                stream.fail(UnreadRows(f"the reader left more than {self._max_unread} rows unread"))
                self._reader.forget(row.rid)
                del self._streams[row.rid]

    def _is_live(self, rid: int, choice: int) -> bool:
        stream = self._streams.get(rid)
        return stream is not None and stream.is_open(choice)

    # ---- losing it ------------------------------------------------------------------------------------------------

    def _on_ending(self, parts: list[bytes]) -> None:
        self._linger_ms = 0  # nobody is there to take what is left
        if monitored_event(parts) == zmq.EVENT_CONNECT_RETRIED:
            self._lose(Unreachable(f"no cluster answers at {self._address}"))
        else:
            self._lose(ConnectionLost(f"the connection to {self._address} is broken: its other end is gone"))

    async def _watch_silence(self) -> None:
        tick = min(0.5, self._silence_limit_s / 4)
        while True:
            await asyncio.sleep(tick)
            # A frozen client must not blame the cluster: a tick counts as one, however long it took.
            self._silent_s += tick
            if self._streams and self._silent_s >= self._silence_limit_s:
                hint = " that this version understands" if self.refused else ""
                problem = f"the cluster stopped answering: nothing{hint} for {self._silence_limit_s:g} s"
                self._lose(ConnectionLost(problem))

    def _lose(self, error: ConnectionLost) -> None:
        if self._lost is not None:
            return
        self._lost = error
        self._ended.set()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        for number in list(self._asked):
            self._answer(number, error)
