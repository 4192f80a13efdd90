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
    returns, as one that has ended does; its senior skips a step meanwhile, and nobody else is preempted for the same
    page.
    """
    able: list[Request] = []
    taken = 0  # pages, by those that are able
    awaiting = 0  # seniors whose page comes with somebody who is still in flight
    coming = sum(kv.returned_by(r) for r in holders() if not r.is_running)
    victims = sorted((r for r in holders() if r.is_running), key=lambda r: r.seniority)
    for request in sorted(ready, key=lambda r: r.seniority):
        if request.status is not Status.DECODING:
            continue  # it gave way to a senior
        if not _at_page_end(kv, request):
            able.append(request)
            continue
        while kv.available - taken < 1 and coming <= awaiting and victims[-1].seniority > request.seniority:
            preempt(junior := victims.pop())
            if junior.status is Status.PREEMPTED:  # a step in flight has it still
                coming += kv.returned_by(junior)
        if kv.available - taken >= 1:
            able.append(request)
            taken += 1
        else:
            awaiting += 1
    return sorted(able, key=lambda r: r.slot)


def _at_page_end(kv: KVManager, request: Request) -> bool:
    return request.cached_len == len(request.pages) * kv.page_size
