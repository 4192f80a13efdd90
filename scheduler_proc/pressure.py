"""Room for decodes when pages run out: juniors give theirs back for seniors (lowest priority first, then newest)."""

from collections.abc import Callable, Iterable, Sequence

from scheduler_proc.kv_manager import KVManager
from scheduler_proc.request import Request, Status


def spare_pages(kv: KVManager, decoding: Iterable[Request]) -> int:
    """Pages that can be had beside those that one more token for each of `decoding` takes; negative when short."""
    size = kv.page_size  # as _at_page_end, without a call for each row of each step
    return kv.available - sum([r.cached_len == len(r.pages) * size for r in decoding])


def make_room(
    ready: Iterable[Request],
    kv: KVManager,
    holders: Callable[[], Sequence[Request]],
    preempt: Callable[[Request], None],
) -> list[Request]:
    """Those of `ready` that can decode now, in slot order, after `preempt` was called for as many juniors as needed.

    `holders` gives all requests with a slot. A victim with a step in flight gives its pages back only when that
    returns; its senior skips a step meanwhile, and nobody else is preempted for the same page.
    """
    able: list[Request] = []
    awaiting = 0  # seniors whose page comes with a victim that is still in flight
    for request in sorted(ready, key=lambda r: r.seniority):
        if request.status is not Status.DECODING:
            continue  # it gave way to a senior
        needs_page = _at_page_end(kv, request)
        while (
            needs_page
            and spare_pages(kv, able) < 1
            and _coming_back(holders()) <= awaiting
            and (junior := _most_junior(holders(), request)) is not None
        ):
            preempt(junior)
        if not needs_page or spare_pages(kv, able) >= 1:
            able.append(request)
        else:
            awaiting += 1
    return sorted(able, key=lambda r: r.slot)


def _at_page_end(kv: KVManager, request: Request) -> bool:
    return request.cached_len == len(request.pages) * kv.page_size


def _coming_back(holders: Iterable[Request]) -> int:
    """Pages that preempted requests give back when their last step returns."""
    return sum(len(r.pages) - r.shared_pages for r in holders if r.status is Status.PREEMPTED)


def _most_junior(holders: Iterable[Request], than: Request) -> Request | None:
    running = (r for r in holders if r.is_running and r.seniority > than.seniority)
    return max(running, key=lambda r: r.seniority, default=None)
