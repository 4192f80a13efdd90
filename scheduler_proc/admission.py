"""Admission: may the next waiting request start, so that the pool still holds all who run?"""

from scheduler_proc.kv_manager import KVManager
from scheduler_proc.request import Request


class FullReservation:
    """Admit a request only when the pool can hold all running requests at their longest at the same time.

    It cannot overcommit, so nothing is ever preempted; it wastes what requests that stop early had reserved. The sum
    that it keeps, pages promised but not held yet, never exceeds the pages that can be had (`promised` is checked by
    invariants.py).
    """

    def __init__(self, kv: KVManager):
        self._kv = kv
        self.promised = 0

    def try_admit(self, request: Request) -> bool:
        """Attach the cached prefix and promise the rest of the request's pages, or change nothing.

        The prefix is locked before the room is counted, because locking it takes its pages out of what can be evicted.
        """
        self._kv.attach_prefix(request)
        need = self._kv.pages_for(request.kv_len_at_end) - len(request.pages)
        if need > self._kv.available - self.promised:
            self._kv.release(request)
            request.cached_len = 0
            return False
        self.promised += need
        return True

    def held(self, pages: int) -> None:
        """`pages` that were promised are held now."""
        self.promised -= pages

    def end(self, request: Request) -> None:
        """The request ends: forget what was promised to it and never taken. Call before its pages are released."""
        self.promised -= self._kv.pages_for(request.kv_len_at_end) - len(request.pages)
