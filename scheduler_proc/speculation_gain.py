"""Does it pay to verify guesses? What a step takes is measured, how often guesses are right is known without trying.

Two ways to go on are compared by the tokens per second that they give: one token per request and step, planned ahead,
or guesses for those requests that have any, which cannot be planned before the step in flight is known.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_NEAR = 0.15  # weight of the newest measurement
_SHORTEST = 1e-9  # seconds of a step: nothing takes no time
_OUTLIER = 1.5  # a step that was held up counts as at most this many times the usual


class StepCurve:
    """Seconds of a step as a function of its tokens, each of which gets logits: a mean per half octave of tokens."""

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float, int]] = {}  # tokens and seconds (means), how many
        self._known: list[tuple[float, float]] = []  # the same, ascending

    def learn(self, tokens: int, seconds: float) -> None:
        seconds = max(_SHORTEST, seconds)
        key = _place(tokens)
        mean_tokens, mean_seconds, count = self._points.get(key, (0.0, 0.0, 0))
        if count:
            seconds = min(seconds, _OUTLIER * mean_seconds)
        weight = max(_NEAR, 1 / (count + 1))
        mean_tokens += weight * (tokens - mean_tokens)
        mean_seconds += weight * (seconds - mean_seconds)
        self._points[key] = mean_tokens, mean_seconds, count + 1
        self._known = [self._points[key][:2] for key in sorted(self._points)]

    def forget(self, above: int) -> None:
        """Steps of more tokens than that were never tried."""
        self._points = {key: point for key, point in self._points.items() if key <= _place(above)}
        self._known = [self._points[key][:2] for key in sorted(self._points)]

    @property
    def most(self) -> int:
        """The most tokens of a step so far, about; 0 when nothing is known."""
        return round(self._known[-1][0]) if self._known else 0

    def seconds(self, tokens: int) -> float:
        """Between what was measured a straight line, outside of it the nearest: what was never tried counts as cheap,
        so that it is tried, and then it is known."""
        below = above = self._known[0]
        for above in self._known:
            if above[0] >= tokens:
                break
            below = above
        if above is below:
            return above[1]
        return below[1] + (above[1] - below[1]) * (tokens - below[0]) / (above[0] - below[0])


def _place(tokens: int) -> int:
    """The half octave of a number of tokens."""
    return round(2 * math.log2(tokens))


class Gaps:
    """Mean seconds from one step's tokens to the next step's start in the worker, by how the next one was planned."""

    def __init__(self) -> None:
        self._ahead: float | None = None
        self._after: float | None = None
        self._way = 0.0  # from the worker to the scheduler

    def learn(self, seconds: float, *, ahead: bool) -> None:
        """`ahead`: it was planned while the step before it ran, else right after that one's tokens had come."""
        seconds = max(0.0, seconds)
        old = self._ahead if ahead else self._after
        if old is not None:
            seconds = old + _NEAR * (min(seconds, _OUTLIER * old + 1e-3) - old)
        if ahead:
            self._ahead = seconds
        else:
            self._after = seconds

    def forget_after(self) -> None:
        """How long the worker pauses without a plan ahead was never measured."""
        self._after = None

    def learn_way(self, seconds: float) -> None:
        """A result took so long to come back."""
        self._way += _NEAR * (min(max(0.0, seconds), 2 * self._way + 1e-3) - self._way)

    @property
    def ahead(self) -> float:
        return self._ahead if self._ahead is not None else 0.0

    @property
    def after(self) -> float:
        """Guessed from the way of results as long as no step was planned like this."""
        return self._after if self._after is not None else self.ahead + 2 * self._way


class Rate:
    """How often guesses were right, newest counting most: `right` of `of`."""

    __slots__ = ("of", "right")

    def __init__(self, right: float = 0.0, of: float = 0.0):
        self.right = right
        self.of = of

    def learn(self, right: bool, near: float) -> None:
        """`near` is the weight of what came before."""
        self.right = near * self.right + right
        self.of = near * self.of + 1


@dataclass(frozen=True, slots=True)
class Prospect:
    """A request that could have guesses: each is right with probability `chance` if those before it are, at most `most`
    of them. `unseen` is 1 when a token in flight must be the guessed one first."""

    chance: float
    most: int
    unseen: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """Guesses for each prospect, how many times the tokens per second of no guesses that gives, and how many of them
    are expected to be right."""

    counts: list[int]
    gain: float
    right: float = 0.0


def choose(
    prospects: Sequence[Prospect],
    rows: int,
    room: int,
    seconds: Callable[[int], float],
    *,
    gap_ahead: float,
    gap_after: float,
    luck: float = 1.0,
) -> Choice:
    """The guesses that give most tokens per second, for a step of `rows` requests, with `room` guesses at most.

    `luck` is the part of the guesses expected to be right that are. Likely guesses go first, whoever has them: a
    guess behind others is only as likely as all of them together, so those of one request are taken in order.
    """
    likely = sorted(
        ((p.chance ** (depth + p.unseen), i) for i, p in enumerate(prospects) for depth in range(1, p.most + 1)),
        reverse=True,
    )[:room]
    plain = rows / (seconds(rows) + gap_ahead)
    best, best_rate, best_right, right = 0, 0.0, 0.0, 0.0
    for count, (chance, _) in enumerate(likely, 1):
        right += chance
        if count < 8 or count % 8 == 0 or count == len(likely):
            rate = (rows + luck * right) / (seconds(rows + count) + gap_after)
            if rate > best_rate:
                best, best_rate, best_right = count, rate, right
    counts = [0] * len(prospects)
    for _, i in likely[:best]:
        counts[i] += 1
    return Choice(counts, best_rate / plain, best_right)
