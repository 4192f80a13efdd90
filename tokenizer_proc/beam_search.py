"""Beam search as a state machine: log probabilities in, sequences out. It is that of transformers (5.x), step by step.

In each step every running beam is extended by its likeliest tokens. The best of all extensions go on as the next beams;
those among the first `width` that end become hypotheses, of which the `width` best are kept. Scores are sums of float32
log probabilities, rounded to float32 after each addition as there, so that close calls fall the same way.
"""

import heapq
from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass

Following = Sequence[tuple[int, float]]  # tokens that may follow, likeliest first, with their log probabilities


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """The way to a sequence, of which beams share what they have in common: the log probability and the rank of its
    last token, and the likeliest tokens that might have come in its place."""

    before: "Path | None"
    logprob: float
    rank: int
    top: Following

    def steps(self) -> "list[Path]":
        """From the first token on."""
        found: list[Path] = []
        path: Path | None = self
        while path is not None:
            found.append(path)
            path = path.before
        return found[::-1]


@dataclass(frozen=True, slots=True)
class Beam:
    """A running sequence of output tokens and the sum of their log probabilities."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence that has ended. `score` is its log probability divided by its length to the power of the penalty."""

    tokens: tuple[int, ...]
    score: float
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class _Extension:
    """`place` is that of the token in `following`."""

    beam: Beam
    following: Following
    place: int
    score: float

    @property
    def token(self) -> int:
        return self.following[self.place][0]

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.beam.tokens, self.token)

    def path(self, top: int | None) -> Path | None:
        if top is None:
            return None
        logprob = self.following[self.place][1]
        return Path(self.beam.path, logprob, self.place + 1, tuple(self.following[:top]))


def candidates_per_beam(width: int, num_ends: int) -> int:
    """How many of the likeliest tokens of each beam a search needs: so many that `width` of them do not end."""
    return max(2, 1 + num_ends) * width


class BeamSearch:
    """A search for the `width` best sequences of at most `max_tokens` tokens, which a token of `ends` ends earlier.

    Until `done`, call `advance` with what follows each of `beams`. Then `hypotheses` are the result, best first; where
    `top` says so, with their paths and so many alternatives of each token.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        ends: Set[int],
        *,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        top: int | None = None,
    ):
        self._width = width
        self._max_tokens = max_tokens
        self._ends = ends
        self._penalty = length_penalty
        self._early_stopping = early_stopping
        self._top = top
        self._length = 0
        self.beams: list[Beam] = [Beam()]
        self.hypotheses: list[Hypothesis] = []
        self.done = False

    @property
    def num_candidates(self) -> int:
        return candidates_per_beam(self._width, len(self._ends))

    def advance(self, continuations: Sequence[Following]) -> None:
        """One step: for each of `beams` at least its `num_candidates` likeliest tokens."""
        best = self._best_extensions(continuations)
        self._length += 1
        full = self._length >= self._max_tokens
        going = [e for e in best if not full and e.token not in self._ends]
        ended = [e for e in best[: self._width] if full or e.token in self._ends]
        found = [Hypothesis(e.tokens, self._normalized(e.score), e.path(self._top)) for e in ended]
        # sorting is stable: of equal scores, which are rare, the older hypothesis stays
        self.hypotheses = sorted(self.hypotheses + found, key=lambda h: -h.score)[: self._width]
        self.beams = [Beam(e.tokens, e.score, e.path(self._top)) for e in going[: self._width]]
        self.done = not self.beams or not self._can_improve()

    def _best_extensions(self, continuations: Sequence[Following]) -> list[_Extension]:
        most = self.num_candidates
        every = (
            _Extension(beam, following, place, _float32(beam.score + logprob))
            for beam, following in zip(self.beams, continuations, strict=True)
            for place, (_, logprob) in enumerate(following[:most])
        )
        return heapq.nlargest(self.num_candidates, every, key=lambda e: e.score)

    def _can_improve(self) -> bool:
        """Whether a running beam may still become one of the hypotheses, by the rule of transformers: as if the best
        one ended here (exact unless a longer sequence scores better than its beginning)."""
        if len(self.hypotheses) < self._width:
            return True
        return not self._early_stopping and self._normalized(self.beams[0].score) > self.hypotheses[-1].score

    def _normalized(self, score: float) -> float:
        divisor = self._length**self._penalty
        return _float32(score / (_float32(divisor) or divisor))  # float32 can be too small for it


def _float32(value: float) -> float:
    rounded: float = array("f", [value])[0]
    return rounded
