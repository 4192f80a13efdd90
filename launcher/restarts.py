"""How often something may be started again, and how soon."""

from collections import deque


class Restarts:
    """At most `limit` restarts within any `window_s` seconds, the first at once, the others after growing pauses."""

    FIRST_PAUSE_S = 0.25
    LONGEST_PAUSE_S = 8.0

    def __init__(self, limit: int, window_s: float):
        self._limit = limit
        self._window_s = window_s
        self._deaths: deque[float] = deque()
        self.total = 0

    def after_death(self, now: float) -> float | None:
        """Seconds to wait before the next start, or None when there were too many. `now` in seconds."""
        while self._deaths and now - self._deaths[0] >= self._window_s:
            self._deaths.popleft()
        recent = len(self._deaths)
        if recent >= self._limit:
            return None
        self._deaths.append(now)
        self.total += 1
        return 0.0 if recent == 0 else min(self.LONGEST_PAUSE_S, self.FIRST_PAUSE_S * 2 ** (recent - 1))
