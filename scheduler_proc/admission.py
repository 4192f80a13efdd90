"""Admission: may a waiting request start, so that the pool still holds all who run? One small class per answer.

`fits` is asked after the request's cached prefix was locked, because locking takes its pages out of what can be
evicted. All known tokens of the request get their pages at once; the classes differ in what they keep for tokens to
come. Only FullReservation can do without preemption.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from scheduler_proc.kv_manager import KVManager
from scheduler_proc.request import Request


class Admission(Protocol):
    """Whoever is tried costs about the same, however many run: a burst may start hundreds in one step."""

    def begin(self, kv: KVManager, running: Sequence[Request]) -> None:
        """Requests are to be tried beside `running`, which do not change until `begin` is called again."""
        ...

    def fits(self, kv: KVManager, request: Request) -> bool:
        """Whether `request` may start beside them: there must be pages for its known tokens at least."""
        ...

    def started(self, kv: KVManager, request: Request) -> None:
        """`request` has got its pages and is one of them now."""
        ...

    def after_step(self) -> None:
        """A step was planned without preemption."""

    def after_preemption(self, running: Sequence[Request]) -> None:
        """A request had to give its pages back; `running` are those left."""


def promised(kv: KVManager, running: Iterable[Request]) -> int:
    """Pages that running requests may still take until their longest possible end."""
    return sum(kv.pages_for(r.kv_len_at_end) - len(r.pages) for r in running)


class FullReservation(Admission):
    """Reserves every request's longest possible length. It cannot overcommit; it wastes what early stops leave."""

    def __init__(self) -> None:
        self._promised = 0

    def begin(self, kv: KVManager, running: Sequence[Request]) -> None:
        self._promised = promised(kv, running)

    def fits(self, kv: KVManager, request: Request) -> bool:
        return self._promised + promised(kv, (request,)) <= kv.available

    def started(self, kv: KVManager, request: Request) -> None:
        self._promised += promised(kv, (request,))


class NewTokenRatio(Admission):
    """SGLang's rule: reserve `ratio` of the output that running requests may still produce, at most `clip` each.

    The ratio falls a little with every step that goes well and rises on preemption to what the running requests have
    shown to need.
    """

    def __init__(self, initial: float = 0.7, least: float = 0.1, steps_to_least: int = 600, clip: int = 4096):
        self.ratio = initial
        self._least = least
        self._decay = (initial - least) / steps_to_least
        self._clip = clip
        self._alone = True
        self._later = 0  # tokens, of those who run

    def begin(self, kv: KVManager, running: Sequence[Request]) -> None:
        self._alone = not running
        self._later = sum(min(r.remaining, self._clip) for r in running)

    def fits(self, kv: KVManager, request: Request) -> bool:
        now = kv.pages_for(len(request.tokens) + 1) - len(request.pages)
        if self._alone:
            return now <= kv.available
        later = self._later + min(request.remaining, self._clip)
        return now + kv.pages_for(int(later * self.ratio)) <= kv.available

    def started(self, kv: KVManager, request: Request) -> None:
        self._alone = False
        self._later += min(request.remaining, self._clip)

    def after_step(self) -> None:
        self.ratio = max(self._least, self.ratio - self._decay)

    def after_preemption(self, running: Sequence[Request]) -> None:
        done = sum(r.generated for r in running)
        total = sum(r.max_tokens for r in running)
        if total:  # 20 tokens of head room each, as SGLang takes
            self.ratio = min(1.0, max(self.ratio, (done + 20 * len(running)) / total))


class ExactPeak(Admission):
    """LightLLM's rule (Past-Future scheduler, Gong et al., ASPLOS 2025): the largest need at any future end.

    With requests sorted by remaining output, descending, the pool is fullest just before some request ends; then
    those with more remaining still run, each grown by as many tokens. It assumes that all advance together, which
    chunked prefill can break, so preemption stands behind it.
    """

    def __init__(self) -> None:
        self._needs: list[_Need] = []  # of those who run, the one with the most tokens to come first
        self._held = 0  # pages that they alone hold

    def begin(self, kv: KVManager, running: Sequence[Request]) -> None:
        self._needs = sorted((_need(kv, r) for r in running), key=_last_first)
        self._held = sum(len(r.pages) - r.shared_pages for r in running)

    def fits(self, kv: KVManager, request: Request) -> bool:
        room = kv.available + self._held
        needs = self._needs.copy()
        insort(needs, _need(kv, request), key=_last_first)
        own = needs[0].own
        if own + needs[0].alone > room:
            return False
        for i, (_, more, growth, _) in enumerate(needs[1:], 2):
            own += more
            if own + i * growth > room:
                return False
        return True

    def started(self, kv: KVManager, request: Request) -> None:
        insort(self._needs, _need(kv, request), key=_last_first)
        self._held += len(request.pages) - request.shared_pages


class _Need(NamedTuple):
    """Tokens that a request may still get, and in pages: what it alone holds with its next token, and what the tokens
    to come take, rounded up beside others, exactly when it runs alone."""

    remaining: int
    own: int
    growth: int
    alone: int


def _need(kv: KVManager, r: Request) -> _Need:
    held = max(len(r.pages), kv.pages_for(len(r.tokens) + 1))
    alone = max(0, kv.pages_for(r.kv_len_at_end) - held)
    return _Need(r.remaining, held - r.shared_pages, kv.pages_for(r.remaining), alone)


def _last_first(need: _Need) -> int:
    return -need.remaining


ADMISSIONS: dict[str, Callable[[], Admission]] = {
    "reserve": FullReservation,
    "ratio": NewTokenRatio,
    "peak": ExactPeak,
}
