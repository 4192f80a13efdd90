"""Admission: may a waiting request start, so that the pool still holds all who run? One small class per answer.

`fits` is asked after the request's cached prefix was locked, because locking takes its pages out of what can be
evicted. All known tokens of the request get their pages at once; the classes differ in what they keep for tokens to
come. Only FullReservation can do without preemption.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from scheduler_proc.kv_manager import KVManager
from scheduler_proc.request import Request


class Admission(Protocol):
    def fits(self, kv: KVManager, running: Sequence[Request], request: Request) -> bool:
        """Whether `request` may start beside `running`."""
        ...

    def after_step(self) -> None:
        """A step was planned without preemption."""

    def after_preemption(self, running: Sequence[Request]) -> None:
        """A request had to give its pages back; `running` are those left."""


def promised(kv: KVManager, running: Sequence[Request]) -> int:
    """Pages that running requests may still take until their longest possible end."""
    return sum(kv.pages_for(r.kv_len_at_end) - len(r.pages) for r in running)


class FullReservation(Admission):
    """Reserves every request's longest possible length. It cannot overcommit; it wastes what early stops leave."""

    def fits(self, kv: KVManager, running: Sequence[Request], request: Request) -> bool:
        return promised(kv, [*running, request]) <= kv.available


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

    def fits(self, kv: KVManager, running: Sequence[Request], request: Request) -> bool:
        now = kv.pages_for(len(request.tokens) + 1) - len(request.pages)
        if not running:
            return now <= kv.available
        later = sum(min(r.remaining, self._clip) for r in running) + min(request.remaining, self._clip)
        return now + kv.pages_for(int(later * self.ratio)) <= kv.available

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

    def fits(self, kv: KVManager, running: Sequence[Request], request: Request) -> bool:
        everyone = sorted((*running, request), key=lambda r: r.remaining, reverse=True)
        room = kv.available + sum(len(r.pages) - r.shared_pages for r in running)
        own = 0
        for i, r in enumerate(everyone, 1):
            own += max(len(r.pages), kv.pages_for(len(r.tokens) + 1)) - r.shared_pages
            growth = i * kv.pages_for(r.remaining) if i > 1 else self._alone(kv, r)
            if own + growth > room:
                return False
        return True

    def _alone(self, kv: KVManager, r: Request) -> int:
        return max(0, kv.pages_for(r.kv_len_at_end) - max(len(r.pages), kv.pages_for(len(r.tokens) + 1)))


ADMISSIONS: dict[str, Callable[[], Admission]] = {
    "reserve": FullReservation,
    "ratio": NewTokenRatio,
    "peak": ExactPeak,
}
