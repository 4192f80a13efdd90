"""Requests begin one after the other, so that no turn of the event loop is long, however many come at once.

Thousands of requests that arrive together would all be parsed, checked and sent on in one turn, which takes seconds;
whoever comes next, the probe that asks whether this process lives among them, would wait for all of it.
"""

import asyncio
from collections import deque

PER_TURN = 8  # beginning a request takes one or two milliseconds


class Turnstile:
    """Lets `per_turn` requests pass in a turn of the loop; the others wait in the order in which they came."""

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = per_turn
        self._room = per_turn  # left in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(self) -> None:
        """Returns at once where there is room in this turn, and else in a later one."""
        loop = asyncio.get_running_loop()
        if not self._room:
            place = loop.create_future()
            self._waiting.append(place)
            await place
            return
        if self._room == self._per_turn:
            loop.call_soon(self._turn)
        self._room -= 1

    def _turn(self) -> None:
        """The next turn has begun."""
        self._room = self._per_turn
        while self._waiting and self._room:
            place = self._waiting.popleft()
            if not place.done():  # whoever waited there may have been cancelled
                place.set_result(None)
                self._room -= 1
        if self._room < self._per_turn:
            asyncio.get_running_loop().call_soon(self._turn)
