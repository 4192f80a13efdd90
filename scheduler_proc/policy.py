"""Policies: in which order waiting requests are looked at, and how prefill chunks take turns. One class each.

Every policy bounds every wait. First come, first served does so by itself. The others order by the time of arrival
moved by what the policy favours, or give way to the oldest request once it has waited for `patience`, so that later
arrivals can overtake a request only for so long.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import islice

from scheduler_proc.kv_manager import KVManager
from scheduler_proc.request import Request

SECOND = 10**9
LPM_WINDOW = 64  # how many of the oldest requests longest-prefix-match compares: bounds the work per admission
MAX_PREFILLS = 8  # prompts that are in work at once


class Policy:
    """First come, first served; prompts are prefilled one after another. Others order by a `_key` of their own, which
    never changes while a request waits."""

    concurrent_prefills = False  # several unfinished prompts advance in the same steps
    overtakes = False  # `starts_beside` may be true of some
    alike = True  # no request counts for more than another

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def _key(self, request: Request) -> int:
        return request.since

    def add(self, request: Request) -> None:
        insort(self._entries, (self._key(request), request.seq, request), key=lambda e: e[:2])

    def remove(self, request: Request) -> None:
        key = self._key(request), request.seq
        at = bisect_left(self._entries, key, key=lambda e: e[:2])
        if at == len(self._entries) or self._entries[at][2] is not request:
            raise KeyError(request.rid)
        del self._entries[at]

    def order(self, now: int) -> Iterator[Request]:
        """Waiting requests, the next one to admit first. The queue must not change while this is in use."""
        return (entry[2] for entry in self._entries)

    def starts_beside(self, request: Request, prefilling: Sequence[Request]) -> bool:
        """Whether `request` starts although prompts that have started fill the steps to come."""
        return False

    def not_behind(self, request: Request, prefilling: Sequence[Request]) -> Sequence[Request]:
        """Those of `prefilling` that get their chunks no later than `request` would, if it were one of them."""
        return prefilling

    def chunk_order(self, prefilling: Sequence[Request]) -> Sequence[Request]:
        """In which order running prefills, given in the order of admission, get their chunks in this step."""
        return prefilling


class RoundRobin(Policy):
    """First come, first served, but up to MAX_PREFILLS prompts are in work and take turns chunk by chunk, so that a
    short prompt does not wait for a long one."""

    concurrent_prefills = True
    overtakes = True

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0

    def starts_beside(self, request: Request, prefilling: Sequence[Request]) -> bool:
        return len(prefilling) < MAX_PREFILLS

    def chunk_order(self, prefilling: Sequence[Request]) -> Sequence[Request]:
        """Who goes first moves on by one in each step, in a circle of sequence numbers."""
        circle = sorted(prefilling, key=lambda r: (r.seq <= self._turn, r.seq))
        if circle:
            self._turn = circle[0].seq
        return circle


class Priority(Policy):
    """Higher priority first; one step of priority is worth `ageing` of waiting, so the lowest comes through as well:
    only what arrives within `ageing` times the difference can overtake it."""

    overtakes = True
    alike = False

    def __init__(self, ageing_s: float = 10.0) -> None:
        super().__init__()
        self._ageing = int(ageing_s * SECOND)

    def _key(self, request: Request) -> int:
        return request.since - request.priority * self._ageing

    def starts_beside(self, request: Request, prefilling: Sequence[Request]) -> bool:
        """When it goes before all of them."""
        return len(prefilling) < MAX_PREFILLS and all(self._before(request, other) for other in prefilling)

    def not_behind(self, request: Request, prefilling: Sequence[Request]) -> Sequence[Request]:
        """The first one, whoever it is, and those before it."""
        order = self.chunk_order(prefilling)
        return [other for i, other in enumerate(order) if i == 0 or self._before(other, request)]

    def chunk_order(self, prefilling: Sequence[Request]) -> Sequence[Request]:
        return sorted(prefilling, key=lambda r: (self._key(r), r.seq))

    def _before(self, request: Request, other: Request) -> bool:
        return (self._key(request), request.seq) < (self._key(other), other.seq)


class LongestPrefix(Policy):
    """The longest cached prefix first (SGLang's LPM), so that what is cached is used before it is evicted.

    The LPM_WINDOW oldest requests are compared, and each comparison is remembered until the tree changes, so ten
    thousand waiting requests cost no more than a few dozen. Whoever has waited for `patience` goes first.
    """

    def __init__(self, kv: KVManager, patience_s: float = 10.0) -> None:
        super().__init__()
        self._kv = kv
        self._patience = int(patience_s * SECOND)
        self._known: dict[int, tuple[int, int]] = {}  # rid -> (tree version, cached tokens)

    def remove(self, request: Request) -> None:
        super().remove(request)
        self._known.pop(request.rid, None)

    def order(self, now: int) -> Iterator[Request]:
        window = list(islice(super().order(now), LPM_WINDOW))
        if window and now - window[0].since >= self._patience:
            return iter(window)
        return iter(sorted(window, key=self._cached, reverse=True))

    def _cached(self, request: Request) -> int:
        version, cached = self._known.get(request.rid, (-1, 0))
        if version != self._kv.tree.version:
            cached = self._kv.cached(request)
            self._known[request.rid] = (self._kv.tree.version, cached)
        return cached


def make_policy(name: str, kv: KVManager, ageing_s: float) -> Policy:
    """The policy of a flag's value. Raises KeyError when there is none of that name."""
    match name:
        case "fcfs":
            return Policy()
        case "lpm":
            return LongestPrefix(kv, ageing_s)
        case "round-robin":
            return RoundRobin()
        case "priority":
            return Priority(ageing_s)
    raise KeyError(name)
