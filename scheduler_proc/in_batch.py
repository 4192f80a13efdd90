"""In-batch sharing: of several requests with a common prefix that is not cached yet, one computes it.

The others wait for it, but no longer than computing it themselves would take: whoever they wait for is already as far
as they would start from, and computes the same tokens at the same rate. (Under round-robin it shares its steps with
other prompts, as they would. By priority it must be the first one at work, or go before them.)
"""

from collections.abc import Sequence

from scheduler_proc.kv_manager import KVManager
from scheduler_proc.radix_node import TOKEN_BYTES, common_prefix
from scheduler_proc.request import Request


def better_off_waiting(request: Request, kv: KVManager, prefilling: Sequence[Request], least_gain: int) -> bool:
    """Whether somebody in `prefilling` is about to compute more of `request`'s prefix than is cached now.

    For less than `least_gain` tokens a step of waiting does not pay.
    """
    cached = kv.cached(request)
    limit = request.match_limit
    for other in prefilling:
        if other.salt != request.salt or other.cached_len < cached or other.cached_len >= limit:
            continue
        if other.unscored:
            continue  # it computes fewer tokens a step
        near = cached + least_gain
        if limit < near or request.tokens[cached:near] != other.tokens[cached:near]:
            continue
        common = len(common_prefix(request.tokens.tobytes(), other.tokens.tobytes())) // TOKEN_BYTES
        if other.cached_len < common:
            return True
    return False
