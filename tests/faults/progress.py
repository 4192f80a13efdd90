"""How far a round has come, as its clients see it."""

import asyncio
import time


class Progress:
    """Counts tokens that have come, and wakes who waits for them."""

    def __init__(self) -> None:
        self.count = 0
        self.changed_s = time.monotonic()
        self._waiting: list[tuple[int, asyncio.Event]] = []

    def tokens(self, count: int) -> None:
        self.count += count
        self.changed_s = time.monotonic()
        for at, event in self._waiting:
            if self.count >= at:
                event.set()

    async def until(self, count: int) -> None:
        """Until so many have come."""
        event = asyncio.Event()
        if self.count >= count:
            return
        self._waiting.append((count, event))
        await event.wait()

    def silent_s(self) -> float:
        """Seconds since the last token."""
        return time.monotonic() - self.changed_s
