"""The cluster behind the gateway: waiting for it, being connected to it, and saying why it cannot be used."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from common.async_connection import AsyncConnection
from common.connection import ConnectionLost
from common.messages import Info
from common.stream import RequestFailed
from gateway_proc.errors import ApiError

log = logging.getLogger(__name__)

MAX_UNREAD = 4096  # rows that a slow HTTP client may leave behind
RETRY_S = 0.5
ANSWER_S = 2.0  # for the question whether the cluster lives
RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class Backend:
    """`connection` and `info` are there while the cluster can be used; else `problem` says why it cannot."""

    address: str
    problem: str = "the cluster is starting: its processes are loading"
    connection: AsyncConnection | None = None
    info: Info | None = None
    draining: bool = False  # what runs goes on, new requests are refused
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, go: "asyncio.Future[bool]", on_info: Callable[[Info], None]) -> None:
        """Connect when the cluster is ready, and again whenever the connection is lost. Ends only by cancellation."""
        if not await go:
            self.stop()
            return
        while True:
            self.problem = "the cluster is starting: the tokenizer does not answer yet"
            try:
                async with AsyncConnection(self.address, max_unread=MAX_UNREAD, gateway=True) as connection:
                    self.info = await connection.info()
                    on_info(self.info)
                    self.connection = connection
                    self.changed.set()
                    await connection.ended()
                    log.info("the cluster is lost: %s", connection.lost)  # the launcher says what died
            except (ConnectionLost, RequestFailed) as error:
                log.warning("the cluster cannot be reached: %s", error)
            finally:
                self.connection = None
            self.problem = "the connection to the cluster is lost; trying again"
            await asyncio.sleep(RETRY_S)

    def stop(self) -> None:
        """No new requests: the cluster is stopping."""
        self.problem = "the cluster is stopping"
        self.connection = None

    def use(self) -> tuple[AsyncConnection, Info]:
        """The connection, for a request. Raises ApiError(503) with the reason where there is none."""
        if self.draining:
            problem = "the cluster is draining: it finishes what it has and takes nothing new"
            raise ApiError(503, problem, code="draining", retry_after_s=RETRY_AFTER_S)
        return self._reach()

    def _reach(self) -> tuple[AsyncConnection, Info]:
        if self.connection is None or self.info is None or self.connection.lost is not None:
            raise ApiError(503, self.problem, code="not_ready", retry_after_s=RETRY_AFTER_S)
        return self.connection, self.info

    async def check(self) -> str | None:
        """Why the cluster cannot be used, or None: asks scheduler, detokenizer and tokenizer in one round."""
        try:
            self.use()
            await self.stats()
        except ApiError as error:
            return error.message
        return None

    async def stats(self) -> dict[str, int]:
        """Counters and gauges of the cluster. Raises ApiError(503)."""
        connection, _ = self._reach()
        try:
            return await connection.stats(ANSWER_S)
        except ConnectionLost as error:
            raise ApiError(503, f"the cluster does not answer: {error}", code="not_ready") from None
