"""Workloads: who asks what and when. Pure and seeded, and the same objects drive the simulator and a real cluster.

A workload is a list of sessions; a session is a list of turns, each of which is one request. A turn's prompt is the
session's history (all earlier prompts and answers) and then its own text. Sessions start at given times (open loop),
or `concurrency` of them are kept going (closed loop). `Traffic` walks through a workload as time passes.
"""

import heapq
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Self

from common.fields import IntArray

SECOND = 10**9
KINDS = ("random", "shared-prefix", "qa", "chat")


class WorkloadError(ValueError):
    """A workload's description is wrong; the text names the option, or the line and the field."""


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens by number: equal numbers are equal text, and of two lengths the shorter one is a prefix of the longer."""

    number: int
    length: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `max_tokens` is what is asked for; the answer ends after `output_tokens`, which is at most that.

    It is sent `think_s` after the previous turn's answer, and not before `not_before_s` from the start.
    """

    own: tuple[Text, ...]
    output_tokens: int
    max_tokens: int
    think_s: float = 0.0
    not_before_s: float = 0.0

    @property
    def own_tokens(self) -> int:
        return sum(text.length for text in self.own)


@dataclass(frozen=True, slots=True)
class Session:
    turns: tuple[Turn, ...]
    salt: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids from `first` on, `size` of them, drawn by `seed`.

    Texts of different numbers begin with different tokens as long as there are fewer texts than tokens, so that
    nothing is shared that is not meant to be.
    """

    first: int = 1
    size: int = 2**30
    seed: int = 0

    def tokens(self, text: Text) -> IntArray:
        words = array("I", random.Random(f"{self.seed}/{text.number}").randbytes(4 * text.length))
        tokens = array("i", [self.first + word % self.size for word in words])
        tokens[0] = self.first + text.number % self.size
        return tokens

    def answer(self, request: int, position: int) -> int:
        """The token that a simulated model gives: of the request alone, so that a batch cannot change it."""
        return self.first + (request * 2654435761 + position * 40503 + self.seed) % self.size

    def answers(self, request: int, position: int, count: int) -> IntArray:
        """`answer` at so many positions, from `position` on."""
        first, size, start = self.first, self.size, request * 2654435761 + self.seed
        return array("i", [first + (start + i * 40503) % size for i in range(position, position + count)])


@dataclass(frozen=True, slots=True)
class Workload:
    """`concurrency` None: every session starts when its first turn may be sent. Else that many are kept going."""

    sessions: tuple[Session, ...]
    concurrency: int | None = None

    @property
    def num_requests(self) -> int:
        return sum(len(s.turns) for s in self.sessions)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest answer that it may get."""
        most = 0
        for session in self.sessions:
            history = 0
            for turn in session.turns:
                history += turn.own_tokens
                most = max(most, history + turn.max_tokens)
                history += turn.output_tokens
        return most


@dataclass(frozen=True, slots=True)
class Submission:
    """A request to be sent now. `number` counts turns through the whole workload."""

    number: int
    prompt: IntArray
    output_tokens: int
    max_tokens: int
    salt: str
    priority: int


class Traffic:
    """Which requests are to be sent, given which have ended. Times are nanoseconds from the start."""

    def __init__(self, workload: Workload, vocabulary: Vocabulary):
        self._sessions = workload.sessions
        self._tokens = lru_cache(256)(vocabulary.tokens)  # prefixes come again and again
        self._first = list(accumulate((len(s.turns) for s in self._sessions), initial=0))
        self._history: dict[int, IntArray] = {}
        self._live: dict[int, int] = {}  # request number -> session
        self._due: list[tuple[int, int, int]] = []  # a heap of (when, session, turn)
        self._rest: Iterator[int] = iter(range(len(self._sessions)))
        for _ in range(workload.concurrency or len(self._sessions)):
            self._start_next(0)
        if workload.concurrency is None:
            self._rest = iter(())

    @property
    def next_due(self) -> int | None:
        """When something is to be sent next, as far as is known now."""
        return self._due[0][0] if self._due else None

    @property
    def done(self) -> bool:
        """Everything was sent and has ended."""
        return not self._due and not self._live

    def due(self, now: int) -> list[Submission]:
        """The requests to be sent at `now`."""
        out = []
        while self._due and self._due[0][0] <= now:
            _, at, index = heapq.heappop(self._due)
            session, number = self._sessions[at], self._first[at] + index
            turn = session.turns[index]
            prompt = self._history.pop(at, array("i"))
            for text in turn.own:
                prompt.extend(self._tokens(text))
            if index + 1 < len(session.turns):
                self._history[at] = prompt
            self._live[number] = at
            out.append(Submission(number, prompt, turn.output_tokens, turn.max_tokens, session.salt, session.priority))
        return out

    def ended(self, number: int, answer: Sequence[int] | None, now: int) -> None:
        """A request's last token came, or it was refused (None), which ends its session."""
        at = self._live.pop(number)
        index = number - self._first[at] + 1
        turns = self._sessions[at].turns
        if index == len(turns) or answer is None:
            self._history.pop(at, None)
            self._start_next(now)
            return
        self._history[at] = self._history[at] + array("i", answer)  # a new array: the prompt was handed out
        when = max(now + int(turns[index].think_s * SECOND), int(turns[index].not_before_s * SECOND))
        heapq.heappush(self._due, (when, at, index))

    def _start_next(self, now: int) -> None:
        at = next(self._rest, None)
        if at is not None:
            first = self._sessions[at].turns[0]
            heapq.heappush(self._due, (max(now, int(first.not_before_s * SECOND)), at, 0))


# ---- generated workloads ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths: `128`, `uniform:LOW:HIGH` or `lognormal:MEDIAN:SIGMA`; never below 1."""

    kind: str
    a: float
    b: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises WorkloadError with the three forms when `text` is none of them."""
        kind, _, rest = text.partition(":") if ":" in text else ("fixed", ":", text)
        try:
            numbers = [float(x) for x in rest.split(":")]
        except ValueError:
            numbers = []
        ok = {"fixed": len(numbers) == 1, "uniform": len(numbers) == 2, "lognormal": len(numbers) == 2}
        if not ok.get(kind) or not 1 <= numbers[0] <= 2**22:
            raise WorkloadError(f"lengths must be N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA, got {text!r}")
        if (kind == "uniform" and numbers[1] < numbers[0]) or (kind == "lognormal" and not 0 <= numbers[1] <= 4):
            raise WorkloadError(f"lengths: HIGH must be at least LOW, and SIGMA from 0 to 4, got {text!r}")
        return cls(kind, *numbers)

    def draw(self, rng: random.Random) -> int:
        match self.kind:
            case "uniform":
                return rng.randint(int(self.a), int(self.b))
            case "lognormal":
                return max(1, round(self.a * rng.lognormvariate(0.0, self.b)))
        return int(self.a)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to generate a workload; see `generate`.

    `prompt` is a request's own text, `prefix_tokens` come before it: `prefixes` different ones in all. `limit` is what
    requests ask for as max_tokens, None asks for exactly the answer's length.
    """

    kind: str = "random"
    requests: int = 1000
    prompt: Lengths = Lengths("fixed", 256)
    output: Lengths = Lengths("fixed", 128)
    limit: int | None = None
    prefixes: int = 1
    prefix_tokens: int = 512
    turns: int = 4
    think_s: float = 0.0
    rate: float | None = None
    concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            (self.kind in KINDS, "workload", f"one of {', '.join(KINDS)}"),
            (self.requests >= 1, "requests", "at least 1"),
            (self.prefixes >= 1, "prefixes", "at least 1"),
            (self.prefix_tokens >= 0, "prefix_tokens", "at least 0"),
            (self.turns >= 1, "turns", "at least 1"),
            (self.think_s >= 0, "think_s", "at least 0"),
            (self.limit is None or self.limit >= 1, "limit", "at least 1"),
            (self.rate is None or self.rate > 0, "rate", "more than 0 per second"),
            (self.concurrency is None or self.concurrency >= 1, "concurrency", "at least 1"),
            (self.rate is None or self.concurrency is None, "rate", "given without concurrency, or that without it"),
        )
        for ok, field, rule in checks:
            if not ok:
                raise WorkloadError(f"{field} must be {rule}")


def generate(recipe: Recipe) -> Workload:
    """Sessions in order of arrival.

    random         one turn, nothing shared
    shared-prefix  one turn, the prefixes take turns: few-shot examples, system prompts
    qa             one turn, the prefixes are documents, their questions come in random order
    chat           `turns` turns; the first one begins with a prefix (a system prompt)

    With a rate, sessions arrive as a Poisson process; with neither rate nor concurrency, all at once.
    """
    rng = random.Random(f"workload/{recipe.seed}")
    per_session = recipe.turns if recipe.kind == "chat" else 1
    count = -(-recipe.requests // per_session)
    prefix_of = [i % recipe.prefixes for i in range(count)]
    if recipe.kind == "qa":
        rng.shuffle(prefix_of)
    with_prefix = recipe.kind != "random" and recipe.prefix_tokens > 0
    number = recipe.prefixes  # texts below are the prefixes
    sessions: list[Session] = []
    arrival = 0.0
    for i in range(count):
        arrival += rng.expovariate(recipe.rate) if recipe.rate else 0.0
        turns: list[Turn] = []
        for k in range(min(per_session, recipe.requests - i * per_session)):
            own = Text(number, recipe.prompt.draw(rng))
            number += 1
            prefix = (Text(prefix_of[i], recipe.prefix_tokens),) if with_prefix and k == 0 else ()
            output = recipe.output.draw(rng)
            if recipe.limit is not None:
                output = min(output, recipe.limit)
            start = arrival if k == 0 else 0.0
            think = recipe.think_s if k else 0.0
            turns.append(Turn((*prefix, own), output, recipe.limit or output, think, start))
        sessions.append(Session(tuple(turns)))
    return Workload(tuple(sessions), recipe.concurrency)
