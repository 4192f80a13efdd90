"""Requests that hold a slot, and with it pages: running ones, and ended or preempted ones that a step in flight has."""

import heapq

from scheduler_proc.kv_manager import KVManager
from scheduler_proc.policy import Policy
from scheduler_proc.request import Event, Request, Status


class Residents:
    """`max_running` slots. Who loses its slot gives its pages back to `kv`; who was preempted goes to `waiting`."""

    def __init__(self, max_running: int, kv: KVManager, waiting: Policy):
        self.slots: list[Request | None] = []  # up to the last one that is taken
        self._max_running = max_running
        self.prefilling: list[Request] = []  # in order of admission
        self._kv = kv
        self._waiting = waiting
        self._free = list(range(max_running))  # slots, a heap, so that slots stay dense
        self._left: list[int] = []  # slots freed since the last plan

    @property
    def free(self) -> int:
        """Slots."""
        return len(self._free)

    @property
    def full(self) -> bool:
        return not self._free

    @property
    def changed(self) -> bool:
        """Slots were freed since the last plan."""
        return bool(self._left)

    def holders(self) -> list[Request]:
        """Every request that holds a slot, ended ones with steps in flight too."""
        return [r for r in self.slots if r is not None]

    def running(self) -> list[Request]:
        """Requests that hold pages and will compute more."""
        return [r for r in self.slots if r is not None and r.is_running]

    def decoding(self) -> list[Request]:
        """Requests that get a token in the next step, if there is room. The length limit never lags behind steps in
        flight."""
        decoding = Status.DECODING
        return [r for r in self.slots if r is not None and r.status is decoding and r.generated < r.max_tokens]

    def enter(self, request: Request) -> None:
        """Give an admitted request the lowest free slot."""
        request.slot = heapq.heappop(self._free)
        if request.slot == len(self.slots):
            self.slots.append(request)
        else:
            self.slots[request.slot] = request
        self.prefilling.append(request)

    def settle(self, request: Request) -> None:
        """Take slot and pages back from an ended or preempted request, once no step in flight touches it."""
        if request.steps_in_flight or request.slot < 0:
            return
        preempted = request.status is Status.PREEMPTED
        self._kv.release(request)
        self.slots[request.slot] = None
        while self.slots and self.slots[-1] is None:
            self.slots.pop()
        heapq.heappush(self._free, request.slot)
        self._left.append(request.slot)
        request.slot = -1
        if preempted:
            request.on(Event.REQUEUE)
            self._waiting.add(request)

    def take_left(self) -> list[int]:
        """The slots freed since this was asked last."""
        left, self._left = self._left, []
        return left

    def evacuate(self) -> None:
        """The pages are lost: empty all slots, and queue those again that have not ended, with the tokens they have."""
        holders = self.holders()
        self.slots.clear()
        self.prefilling.clear()
        self._left.clear()
        self._free = list(range(self._max_running))
        for request in holders:
            request.pages, request.node, request.shared_pages, request.track = [], None, 0, None
            request.slot, request.cached_len, request.pending, request.steps_in_flight = -1, 0, 0, 0
            if request.ended:
                continue
            if request.status is not Status.PREEMPTED:
                request.on(Event.PREEMPT)
            request.on(Event.REQUEUE)
            self._waiting.add(request)
