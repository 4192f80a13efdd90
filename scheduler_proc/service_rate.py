"""How fast requests finish, for telling a refused one when to come back."""


class ServiceRate:
    """Mean time between finished requests, newest weighing most."""

    def __init__(self) -> None:
        self._last = 0
        self._interval_s = 1.0

    def finished(self, now: int) -> None:
        """A request finished at `now` (ns)."""
        if self._last:
            self._interval_s += 0.1 * ((now - self._last) / 1e9 - self._interval_s)
        self._last = now

    def begins(self, now: int) -> None:
        """The first request after a time without any has come at `now` (ns): that time was nobody's service."""
        self._last = now

    def seconds_for(self, requests: int) -> float:
        """Until this many requests will have finished: between 0.1 s and an hour."""
        return min(3600.0, max(0.1, requests * self._interval_s))
