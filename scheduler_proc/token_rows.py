"""One step's answer to the outside: a TokenBatch under construction."""

from array import array
from operator import gt
from typing import NamedTuple

from common.fields import IntArray
from common.logprobs import LogprobRows, Logprobs
from common.messages import Finish, StepResult, TokenBatch, ints
from scheduler_proc.plan_builder import Scored
from scheduler_proc.request import Request
from scheduler_proc.step import Step


class TokenRows:
    """A row per request: new tokens, scored prompt tokens, or both."""

    def __init__(self) -> None:
        self._rows: list[tuple[Request, IntArray, Finish]] = []
        self._logprobs: dict[int, Logprobs] = {}
        self._prompt_logprobs: dict[int, Logprobs] = {}
        self._started: dict[int, int] = {}
        self._scored: dict[int, tuple[Request, Logprobs]] = {}  # by request id: those that have no row yet
        self.num_tokens = 0

    def score(self, request: Request, entries: Logprobs) -> None:
        """Prompt tokens of a request; its new tokens, if it gets any, must be added after them."""
        self._scored[request.rid] = (request, entries)

    def add(self, request: Request, tokens: IntArray, finish: Finish, logprobs: Logprobs | None) -> None:
        """The tokens belong to the batch from now on."""
        count = len(tokens)
        if logprobs is not None:
            self._logprobs[len(self._rows)] = logprobs
        if len(request.tokens) - count == request.prompt_len:
            self._started[len(self._rows)] = request.started
        if self._scored:
            _, entries = self._scored.pop(request.rid, (request, None))
            if entries is not None:
                self._prompt_logprobs[len(self._rows)] = entries
        self._rows.append((request, tokens, finish))
        self.num_tokens += count

    def batch(self, *times: int) -> list[TokenBatch]:
        """The batch, if anything is in it. Nothing can be added afterwards."""
        rows = self._rows
        for request, entries in self._scored.values():
            self._prompt_logprobs[len(rows)] = entries
            rows.append((request, ints(), Finish.NONE))
        if not rows:
            return []
        return [
            TokenBatch(
                array("i", [request.rid for request, _, _ in rows]),
                array("i", [len(tokens) for _, tokens, _ in rows]),
                array("i", [token for _, tokens, _ in rows for token in tokens]),
                bytes([finish for _, _, finish in rows]),
                array("i", [request.cached_prompt for request, _, _ in rows]),
                array("q", times),
                LogprobRows.of(self._logprobs),
                LogprobRows.of(self._prompt_logprobs),
                self._started,
            )
        ]


class DrawnRow(NamedTuple):  # cheaper to make than a dataclass, for every token
    """What a step drew for a request: a token, and one more for each of its `guesses` that was right. `problem` is why
    its grammar cannot be followed, or empty."""

    request: Request
    guesses: int
    tokens: IntArray
    logprobs: Logprobs | None
    problem: str


def drawn_rows(result: StepResult, step: Step) -> list[DrawnRow]:
    """The rows of a step that get tokens. Raises ValueError when the result is not what was asked for."""
    with_guesses = [guesses for guesses in step.guesses if guesses]
    accepted = iter(result.accepted)
    if len(result.accepted) != len(with_guesses) or any(map(gt, result.accepted, with_guesses)):
        raise ValueError(f"{with_guesses} guesses were to be verified, {result.accepted.tolist()} were right")
    if len(result.tokens) != len(step.sampled) + sum(result.accepted):
        right = sum(result.accepted)
        raise ValueError(f"{len(step.sampled)} rows, got {len(result.tokens)} tokens, {right} of them right guesses")
    failed = dict(zip(result.failed, result.problems, strict=True))
    scores = result.logprobs.by_row() if result.logprobs is not None else {}
    if any(len(entries) != 1 for entries in scores.values()):
        raise ValueError("log probabilities of one token have several entries")
    rows, at, asked = [], 0, 0
    for request, guesses in zip(step.sampled, step.sampled_guesses, strict=True):
        end = at + 1 + (next(accepted) if guesses else 0)
        logprobs = None
        if request.draw.logprobs is not None:
            logprobs = Logprobs.empty()
            for number in range(at, end):
                asked += 1
                logprobs.extend(scores.get(number, Logprobs.empty()))
            if len(logprobs) != end - at:
                raise ValueError(f"log probabilities of tokens {at} to {end - 1} were asked for")
        problem = next((failed[number] for number in range(at, end) if number in failed), "") if failed else ""
        rows.append(DrawnRow(request, guesses, result.tokens[at:end], logprobs, problem))
        at = end
    if asked != len(scores):
        raise ValueError(f"log probabilities of {asked} tokens were asked for, those of {len(scores)} came")
    return rows


def prompt_logprobs_of(result: StepResult, scored: list[Scored]) -> list[Logprobs]:
    """Those of a step's scorings, in their order. Raises ValueError when they are not what was asked for."""
    found = result.prompt_logprobs.by_row() if result.prompt_logprobs is not None else {}
    if [(row, len(own)) for row, own in found.items()] != [(i, s.end - s.begin) for i, s in enumerate(scored)]:
        raise ValueError(f"{len(scored)} scorings were asked for, rows {list(found)} came or have other lengths")
    return list(found.values())
