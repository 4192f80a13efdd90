"""The rows of a request as an asynchronous iterator, filled by `common.async_connection`."""

import asyncio
from collections import deque
from collections.abc import Callable

from common.messages import Finish, RequestError
from common.rows import Row


class RequestFailed(RuntimeError):
    """The cluster ended or refused a request; `error` says why."""

    def __init__(self, error: RequestError):
        super().__init__(error.problem)
        self.error = error


class UnreadRows(RuntimeError):
    """A request was ended because its reader left too many rows unread."""


class Stream:
    """The rows of one request, in the order in which they came. One task reads it.

    It ends when all choices of the request have ended. Raises RequestFailed when the cluster ends it with an error,
    ConnectionLost when the connection breaks, and UnreadRows when more rows lie unread than the connection allows.
    """

    def __init__(self, rid: int, n: int, send_abort: Callable[[int], None]):
        self.rid = rid
        self._send_abort = send_abort
        self._open = set(range(n))  # choices that have not ended
        self._rows: deque[Row] = deque()
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None  # waits for a change

    @property
    def ended(self) -> bool:
        """Whether nothing more will come from the cluster; rows may lie unread."""
        return not self._open or self._error is not None

    def abort(self) -> None:
        """Ask the cluster to end the request; the last row of each live choice (finish ABORT) still comes."""
        if not self.ended:
            self._send_abort(self.rid)

    async def take(self) -> list[Row]:
        """All rows that are there, waiting for the first; an empty list once the stream has ended."""
        while not self._rows and not self.ended:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if not self._rows and self._error is not None:
            raise self._error
        rows = list(self._rows)
        self._rows.clear()
        return rows

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Row:
        while not self._rows:
            if self.ended and self._error is None:
                raise StopAsyncIteration
            self._rows.extend(await self.take())
        return self._rows.popleft()

    def is_open(self, choice: int) -> bool:
        """Whether a choice has not ended."""
        return choice in self._open and self._error is None

    def push(self, row: Row) -> None:
        """For the connection: a new row of an open choice."""
        if row.finish is not Finish.NONE:
            self._open.remove(row.choice)
        self._rows.append(row)
        self._wake()

    def fail(self, error: Exception) -> None:
        """For the connection: nothing more will come. Rows that came before can still be read."""
        if not self.ended:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    @property
    def unread(self) -> int:
        return len(self._rows)
