"""An aiohttp session that is driven from synchronous code: requests run as tasks while the caller polls."""

import asyncio
import json
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import aiohttp
import uvloop

T = TypeVar("T")
R = TypeVar("R")
CONNECT_S = 30.0
KEEP_ALIVE_S = 2.0  # shorter than servers keep a connection, which would otherwise close it under a new request
SILENCE_LIMIT_S = 600.0  # a server may think for long before its first token


@dataclass(frozen=True, slots=True)
class Server:
    """The root of an OpenAI-compatible server, with or without /v1, and the key for it."""

    url: str
    api_key: str | None = field(default=None, repr=False)

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


class HttpLoop(Generic[T]):
    """Runs tasks that hand over arrivals of type T. Redirects and proxies are not followed: they would get the key."""

    def __init__(self, server: Server):
        self.server = server
        self._loop = uvloop.new_event_loop()
        self._arrived: deque[T] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._session = self._loop.run_until_complete(self._open())

    async def _open(self) -> aiohttp.ClientSession:
        key = self.server.api_key
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_LIMIT_S),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            read_bufsize=2**20,
            auto_decompress=True,
        )

    def start(self, work: Coroutine[Any, Any, R]) -> "asyncio.Task[R]":
        """Run a coroutine while somebody polls."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def arrive(self, what: T) -> None:
        """Hand something over to whoever polls."""
        self._arrived.append(what)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def poll(self, timeout_s: float) -> list[T]:
        """What has arrived, waiting at most `timeout_s` when nothing has yet."""
        if not self._arrived:
            self._loop.run_until_complete(self._wait(timeout_s))
        arrived = list(self._arrived)
        self._arrived.clear()
        return arrived

    async def _wait(self, timeout_s: float) -> None:
        self._wake = self._loop.create_future()
        timer = self._loop.call_later(max(0.0, timeout_s), self.nudge)
        await self._wake
        timer.cancel()
        self._wake = None

    def nudge(self) -> None:
        """End a wait without an arrival."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def post(self, path: str, body: Mapping[str, Any]) -> "aiohttp.client._RequestContextManager":
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        return self._session.post(self.server.root + path, data=data, headers=headers, allow_redirects=False)

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
        """Status and text of a page, while nothing else runs. Raises aiohttp.ClientError or TimeoutError."""

        async def read() -> tuple[int, str]:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session.get(self.server.root + path, timeout=timeout, allow_redirects=False) as response:
                return response.status, await response.text(errors="replace")

        return self._loop.run_until_complete(read())

    def close(self) -> None:
        """Cut every connection; servers take that as an abort."""
        self._loop.run_until_complete(self._close())
        self._loop.close()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()


def failure_text(error: BaseException) -> str:
    """In words what went wrong with a connection."""
    if isinstance(error, TimeoutError):
        return f"the server was silent for {SILENCE_LIMIT_S:g} s"
    return str(error) or type(error).__name__
