"""A plain ZeroMQ socket in an asyncio event loop.

zmq.asyncio makes futures, queues and several turns of the loop of every message, which costs more than all else that
is done with a small one. Here the loop watches the socket's file descriptor and messages are taken as they come. That
descriptor tells of changes, not of a state (zmq_getsockopt(3), ZMQ_FD): whoever has seen it must take all that is
there, and whoever sends has perhaps swallowed what it told of, so that it must be looked after.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import zmq

from common.sockets import AT_ONCE, READABLE, WRITABLE

BURST = 64  # messages taken before other tasks have their turn


class AsyncReader:
    """Calls `take` in the event loop with every message that arrives at `socket`: its bytes, or with `parts` the list
    of its parts. `writable` is called when the socket may take messages again that it refused."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        take: Callable[[Any], None],
        *,
        parts: bool = False,
        writable: Callable[[], None] | None = None,
    ):
        self._socket = socket
        self._receive: Callable[[int], Any] = socket.recv_multipart if parts else socket.recv
        self._take = take
        self._writable = writable
        self._descriptor = socket.fileno()
        self._ended: asyncio.Future[None] | None = None  # while it runs
        self._reading = False
        self._due = False  # it will read in the loop's next turn

    async def run(self) -> None:
        """Until it is cancelled. Raises what `take` and `writable` raise."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        loop.add_reader(self._descriptor, self._read)
        try:
            self._soon()  # what came before
            await self._ended
        finally:
            self.stop()

    def stop(self) -> None:
        """Let go of the socket, which may be closed then. No more is taken."""
        if self._ended is not None:
            loop = self._ended.get_loop()
            if not loop.is_closed():  # else nobody is told any more, and this is the garbage collector
                loop.remove_reader(self._descriptor)
                self._ended.cancel()
            self._ended = None

    def look(self) -> None:
        """To be called after a message was sent through the socket."""
        if self._ended is not None and not self._reading and self._events() & READABLE:
            self._soon()

    def _soon(self) -> None:
        """Read in the next turn, once: where messages keep coming, a call for each look would never have an end."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._again)

    def _again(self) -> None:
        self._due = False
        self._read()

    def _read(self) -> None:
        ended = self._ended
        if ended is None or ended.done():
            return
        self._reading = True
        try:
            events = self._events()
            if self._writable is not None and events & WRITABLE:
                self._writable()
            for _ in range(BURST):
                if not self._events() & READABLE:
                    return
                self._take(self._receive(AT_ONCE))
                if self._ended is None:  # it was stopped meanwhile
                    return
        except Exception as error:
            if not ended.done():
                ended.set_exception(error)
            return
        finally:
            self._reading = False
        self._soon()

    def _events(self) -> int:
        return self._socket.get(zmq.EVENTS)  # type: ignore[return-value]
