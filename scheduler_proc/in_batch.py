"""In-batch sharing: of several requests with a common prefix that is not cached yet, one computes it.

The others wait for it, but no longer than computing it themselves would take: whoever they wait for is already as far
as they would start from, and computes the same tokens at the same rate. (Under round-robin it shares its steps with
other prompts, as they would. By priority it must be the first one at work, or go before them.)

With a recurrent model, they wait for a snapshot (snapshots.py), which the one at work is asked to leave if need be.
"""

from collections.abc import Iterator, Sequence

from scheduler_proc.kv_manager import KVManager
from scheduler_proc.radix_node import TOKEN_BYTES, common_prefix
from scheduler_proc.request import Request
from scheduler_proc.snapshots import MOST_POINTS, Saving


def better_off_waiting(request: Request, kv: KVManager, prefilling: Sequence[Request], least_gain: int) -> bool:
    """Whether somebody in `prefilling` is about to compute more of `request`'s prefix than is cached now.

    For less than `least_gain` tokens a step of waiting does not pay.
    """
    common = _common_with_those_as_far(request, kv.cached(request), prefilling, least_gain)
    return any(other.cached_len < length for other, length in common)


def awaited_snapshot(
    request: Request, kv: KVManager, prefilling: Sequence[Request], least_gain: int
) -> tuple[Saving, int] | None:
    """The same for a recurrent model, where pages are no use without a snapshot: whose, and of how many tokens. It is
    one that somebody leaves in any case, or at the end of what they have in common if that is enough further."""
    cached, size = kv.cached(request), kv.page_size
    for other, length in _common_with_those_as_far(request, cached, prefilling, least_gain):
        saving = other.saving
        if saving is None:
            continue
        end = min(length, request.match_limit, saving.reach) // size * size
        left = max((point for point in saving.points if cached + least_gain <= point <= end), default=cached)
        if end > other.cached_len and end - left >= least_gain and len(saving.points) < MOST_POINTS:
            return saving, end
        if left > cached:
            return saving, left
    return None


def _common_with_those_as_far(
    request: Request, cached: int, prefilling: Sequence[Request], least_gain: int
) -> Iterator[tuple[Request, int]]:
    """Those who compute what follows the `cached` tokens of `request`, each with how many tokens they have in common,
    at least `least_gain` of them beyond those."""
    limit = request.match_limit
    for other in prefilling:
        if other.salt != request.salt or other.cached_len < cached or other.cached_len >= limit:
            continue
        if other.unscored:
            continue  # it computes fewer tokens a step
        near = cached + least_gain
        if limit < near or request.tokens[cached:near] != other.tokens[cached:near]:
            continue
        yield other, len(common_prefix(request.tokens.tobytes(), other.tokens.tobytes())) // TOKEN_BYTES
