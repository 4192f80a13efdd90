"""One step's answer to the outside: a TokenBatch under construction."""

from array import array

from common.logprobs import LogprobRows, Logprobs
from common.messages import Finish, StepResult, TokenBatch, ints
from scheduler_proc.plan_builder import Scored
from scheduler_proc.request import Request


class TokenRows:
    """A row per request: a new token, scored prompt tokens, or both."""

    def __init__(self) -> None:
        self._rids, self._counts, self._tokens, self._cached = ints(), ints(), ints(), ints()
        self._finish = bytearray()
        self._logprobs: dict[int, Logprobs] = {}
        self._prompt_logprobs: dict[int, Logprobs] = {}
        self._started: dict[int, int] = {}
        self._scored: dict[int, tuple[Request, Logprobs]] = {}  # by request id: those that have no row yet

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def score(self, request: Request, entries: Logprobs) -> None:
        """Prompt tokens of a request; its new token, if it gets one, must be added after them."""
        self._scored[request.rid] = (request, entries)

    def add(self, request: Request, token: int, finish: Finish, logprobs: Logprobs | None) -> None:
        if logprobs is not None:
            self._logprobs[len(self._rids)] = logprobs
        if len(request.tokens) == request.prompt_len + 1:
            self._started[len(self._rids)] = request.started
        _, entries = self._scored.pop(request.rid, (request, None))
        self._add_row(request, ints(token), finish, entries)

    def batch(self, *times: int) -> list[TokenBatch]:
        """The batch, if anything is in it. Nothing can be added afterwards."""
        for request, entries in self._scored.values():
            self._add_row(request, ints(), Finish.NONE, entries)
        if not self._rids:
            return []
        return [
            TokenBatch(
                self._rids,
                self._counts,
                self._tokens,
                bytes(self._finish),
                self._cached,
                array("q", times),
                LogprobRows.of(self._logprobs),
                LogprobRows.of(self._prompt_logprobs),
                self._started,
            )
        ]

    def _add_row(self, request: Request, tokens: "array[int]", finish: Finish, entries: Logprobs | None) -> None:
        if entries is not None:
            self._prompt_logprobs[len(self._rids)] = entries
        self._rids.append(request.rid)
        self._counts.append(len(tokens))
        self._tokens.extend(tokens)
        self._finish.append(finish)
        self._cached.append(request.cached_prompt)


def logprobs_of(result: StepResult, sampled: list[Request]) -> dict[int, Logprobs]:
    """The log probabilities of a step's tokens by row. Raises ValueError when they are not what was asked for."""
    asked = [row for row, request in enumerate(sampled) if request.draw.logprobs is not None]
    found = result.logprobs.by_row() if result.logprobs is not None else {}
    if list(found) != asked or any(len(entries) != 1 for entries in found.values()):
        raise ValueError(f"log probabilities of rows {asked} were asked for, those of {list(found)} came")
    return found


def prompt_logprobs_of(result: StepResult, scored: list[Scored]) -> list[Logprobs]:
    """Those of a step's scorings, in their order. Raises ValueError when they are not what was asked for."""
    found = result.prompt_logprobs.by_row() if result.prompt_logprobs is not None else {}
    if [(row, len(own)) for row, own in found.items()] != [(i, s.end - s.begin) for i, s in enumerate(scored)]:
        raise ValueError(f"{len(scored)} scorings were asked for, rows {list(found)} came or have other lengths")
    return list(found.values())
