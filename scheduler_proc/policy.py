"""Policies: in which order waiting requests are looked at, and how prefill chunks take turns. One class each.

Every policy bounds every wait. Fcfs does so by itself. The others order by the time of arrival moved by what the policy
favours, or give way to the oldest request once it has waited for `patience`, so that later arrivals can overtake a
request only for so long.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from scheduler_proc.kv_manager import KVManager
from scheduler_proc.request import Request

SECOND = 10**9
LPM_WINDOW = 64  # how many of the oldest requests longest-prefix-match compares: bounds the work per admission
MAX_PREFILLS = 8  # prompts that round-robin keeps in work at once


class Policy(Protocol):
    concurrent_prefills: bool  # start further prompts while earlier ones are unfinished

    def __len__(self) -> int: ...

    def add(self, request: Request) -> None: ...

    def remove(self, request: Request) -> None: ...

    def order(self, now: int) -> Iterator[Request]:
        """Waiting requests, the next one to admit first. The queue must not change while this is in use."""

    def chunk_order(self, prefilling: list[Request]) -> list[Request]:
        """In which order running prefills get their chunks in this step."""


class _Queue:
    """Requests sorted by a key that never changes, then by arrival."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: int, request: Request) -> None:
        insort(self._entries, (key, request.seq, request), key=lambda e: e[:2])

    def remove(self, key: int, request: Request) -> None:
        at = bisect_left(self._entries, (key, request.seq), key=lambda e: e[:2])
        if at == len(self._entries) or self._entries[at][2] is not request:
            raise KeyError(request.rid)
        del self._entries[at]

    def __iter__(self) -> Iterator[Request]:
        return (entry[2] for entry in self._entries)


class Fcfs:
    """First come, first served; prompts are prefilled one after another."""

    concurrent_prefills = False

    def __init__(self) -> None:
        self._queue = _Queue()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request) -> None:
        self._queue.add(0, request)

    def remove(self, request: Request) -> None:
        self._queue.remove(0, request)

    def order(self, now: int) -> Iterator[Request]:
        return iter(self._queue)

    def chunk_order(self, prefilling: list[Request]) -> list[Request]:
        return prefilling


class RoundRobin:
    """First come, first served, but up to MAX_PREFILLS prompts are in work and take turns chunk by chunk, so that a
    short prompt does not wait for a long one."""

    concurrent_prefills = True

    def __init__(self) -> None:
        self._fcfs = Fcfs()
        self._turn = 0

    def __len__(self) -> int:
        return len(self._fcfs)

    def add(self, request: Request) -> None:
        self._fcfs.add(request)

    def remove(self, request: Request) -> None:
        self._fcfs.remove(request)

    def order(self, now: int) -> Iterator[Request]:
        return self._fcfs.order(now)

    def chunk_order(self, prefilling: list[Request]) -> list[Request]:
        """Who had the last chunk longest ago goes first: requests are dealt with by sequence number, in a circle."""
        later = [r for r in prefilling if r.seq > self._turn]
        earlier = [r for r in prefilling if r.seq <= self._turn]
        order = later + earlier
        if order:
            self._turn = order[0].seq
        return order


class Priority:
    """Higher priority first; one step of priority is worth `ageing` of waiting, so the lowest comes through as well:
    only what arrives within `ageing` times the difference can overtake it."""

    concurrent_prefills = False

    def __init__(self, ageing_s: float = 10.0) -> None:
        self._queue = _Queue()
        self._ageing = int(ageing_s * SECOND)

    def __len__(self) -> int:
        return len(self._queue)

    def _key(self, request: Request) -> int:
        return request.arrival - request.priority * self._ageing

    def add(self, request: Request) -> None:
        self._queue.add(self._key(request), request)

    def remove(self, request: Request) -> None:
        self._queue.remove(self._key(request), request)

    def order(self, now: int) -> Iterator[Request]:
        return iter(self._queue)

    def chunk_order(self, prefilling: list[Request]) -> list[Request]:
        return sorted(prefilling, key=lambda r: r.seniority)


class LongestPrefix:
    """The longest cached prefix first (SGLang's LPM), so that what is cached is used before it is evicted.

    The LPM_WINDOW oldest requests are compared, and each comparison is remembered until the tree changes, so ten
    thousand waiting requests cost no more than a few dozen. Whoever has waited for `patience` goes first.
    """

    concurrent_prefills = False

    def __init__(self, kv: KVManager, patience_s: float = 10.0) -> None:
        self._kv = kv
        self._fcfs = Fcfs()
        self._patience = int(patience_s * SECOND)
        self._known: dict[int, tuple[int, int]] = {}  # rid -> (tree version, cached tokens)

    def __len__(self) -> int:
        return len(self._fcfs)

    def add(self, request: Request) -> None:
        self._fcfs.add(request)

    def remove(self, request: Request) -> None:
        self._fcfs.remove(request)
        self._known.pop(request.rid, None)

    def order(self, now: int) -> Iterator[Request]:
        window = list(islice(self._fcfs.order(now), LPM_WINDOW))
        if window and now - window[0].arrival >= self._patience:
            return iter(window)
        return iter(sorted(window, key=self._cached, reverse=True))

    def _cached(self, request: Request) -> int:
        version, cached = self._known.get(request.rid, (-1, 0))
        if version != self._kv.tree.version:
            cached = self._kv.cached(request)
            self._known[request.rid] = (self._kv.tree.version, cached)
        return cached

    def chunk_order(self, prefilling: list[Request]) -> list[Request]:
        return prefilling


def make_policy(name: str, kv: KVManager, ageing_s: float) -> Policy:
    """The policy of a flag's value. Raises KeyError when there is none of that name."""
    match name:
        case "fcfs":
            return Fcfs()
        case "lpm":
            return LongestPrefix(kv, ageing_s)
        case "round-robin":
            return RoundRobin()
        case "priority":
            return Priority(ageing_s)
    raise KeyError(name)
