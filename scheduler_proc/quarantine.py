"""Requests that may have killed the workers: each runs alone until it is past the place where it may have done so.

When the workers are lost, whoever was in a step in flight is suspected. Suspects are tried again one at a time, with
nobody else in the batch, so that a second loss has one cause. A request that is lost MAX_LOSSES times at one place, or
MAX_ALL_LOSSES times in all, the last time alone, is the culprit: it ends with an error, and a request that asks for the
same is refused for a while, because clients try again by themselves. One culprit costs as many losses, whatever else
was in its batch; workers that are killed from outside now and then cost nobody the answer.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from hashlib import blake2b

from common.fields import IntArray
from common.messages import AddRequest, ErrorCode, RequestError
from common.sampling_params import DrawParams, Grammar
from scheduler_proc.request import Request, Status

MAX_LOSSES = 2
MAX_ALL_LOSSES = 4  # fewer than the restarts that a cluster has within a minute
REFUSED_NS = 600 * 10**9  # for so long, requests like a culprit are refused: it may have been a coincidence
MAX_REFUSED = 1024  # kinds of requests that are remembered


class Quarantine:
    """Suspects, in the order in which they arrived, and what culprits looked like. Times are nanoseconds."""

    def __init__(self) -> None:
        self._suspects: dict[int, Request] = {}
        self._refused: dict[bytes, int] = {}  # what it asked for, as a digest -> until when

    def __bool__(self) -> bool:
        """Whether somebody is suspected, so that nobody else may run."""
        return bool(self._suspects)

    def __len__(self) -> int:
        return len(self._suspects)

    def suspect(self, in_flight: Collection[Request], live: Iterable[Request], now: int) -> list[Request]:
        """The workers were lost with these requests in their steps, whose lengths are still those of the plans. Returns
        the culprit, if it is known now, with all others of the `live` ones that ask for the same."""
        for request in in_flight:
            request.losses += 1
            request.all_losses += 1
            if not request.ended:
                request.suspected_len = request.device_len
                self._suspects[request.rid] = request
        self._suspects = dict(sorted(self._suspects.items(), key=lambda item: item[1].seq))
        culprit = next(iter(in_flight), None)
        if culprit is None or len(in_flight) > 1 or culprit.ended:
            return []
        if culprit.losses < MAX_LOSSES and culprit.all_losses < MAX_ALL_LOSSES:
            return []
        if len(self._refused) >= MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        asked = _asked_by(culprit)
        self._refused[asked] = now + REFUSED_NS
        return [request for request in live if _asked_by(request) == asked]

    def next(self) -> Request | None:
        """The suspect to be tried now, when nothing runs."""
        return next((r for r in self._suspects.values() if r.status is Status.WAITING), None)

    def acquit(self, request: Request) -> bool:
        """Whether a suspect is none any more, because what it died of is behind it or it has ended."""
        if request.rid not in self._suspects or not (request.ended or len(request.tokens) > request.suspected_len):
            return False
        del self._suspects[request.rid]
        request.losses = 0
        return True

    def refusal(self, msg: AddRequest, now: int) -> RequestError | None:
        """Why a request that asks for what a culprit asked for is not tried."""
        if not self._refused:
            return None
        asked = _digest(msg.prompt[: len(msg.prompt) - msg.generated], msg.draw, msg.grammar)
        if self._refused.get(asked, 0) <= now:
            return None
        return verdict(msg.rid)


def verdict(rid: int) -> RequestError:
    """What a culprit is told."""
    problem = "the workers died again and again while they computed this request, the last time nothing else"
    return RequestError(rid, ErrorCode.INTERNAL, problem)


def _asked_by(request: Request) -> bytes:
    return _digest(request.tokens[: request.prompt_len], request.draw, request.grammar)


def _digest(prompt: IntArray, draw: DrawParams, grammar: Grammar | None) -> bytes:
    """What a request asks for, without its seed, which differs whenever a client has not given one."""
    digest = blake2b(prompt.tobytes(), digest_size=16)
    digest.update(repr((replace(draw, seed=0), grammar)).encode())
    return digest.digest()
