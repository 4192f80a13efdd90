"""Workloads of the serving benchmark: who says how much when. Lengths are in tokens, times in seconds from the start.

A workload is a list of conversations; most have one turn. The tokens of a prompt are random ids, so that lengths are
exact and nothing but what shall be shared is in any prefix cache.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FIRST_TOKEN = 16  # below are, in most vocabularies, the special tokens
# Words that are one token in most vocabularies, for servers that take text only.
WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then
them these so some her would make like him into time has look two more write go see number no way could people my
than first water been call who its now find long down day did get come made may part over new sound take only little
work know place year live me back give most very after thing our just name good sentence man think say great where
help through much before line right too mean old any same tell boy follow came want show also around form three
small set put end does another well large must big even such because turn here why ask went men read need land
different home us move try kind hand picture again change off play spell air away animal house point
""".split()  # noqa: SIM905 (shorter to read than a list)


class LoadError(ValueError):
    """A workload cannot be made; the text names the option or the line."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What is new in a turn: tokens of the user, and how many are to be generated. It is sent not before `at_s`, and
    not before the answer to the turn before it has ended."""

    tokens: tuple[int, ...]
    output_len: int
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversation:
    turns: tuple[Turn, ...]

    @property
    def start_s(self) -> float:
        return self.turns[0].at_s


@dataclass(frozen=True, slots=True)
class Length:
    """`N`, or uniform in `LOW:HIGH`."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, flag: str) -> "Length":
        """Raises LoadError with the name of the flag."""
        low, _, high = text.partition(":")
        try:
            found = cls(int(low), int(high or low))
        except ValueError:
            raise LoadError(f"{flag}: a length is N or LOW:HIGH in tokens, got {text!r}") from None
        if not 1 <= found.low <= found.high <= 2**22:
            raise LoadError(f"{flag}: a length must be between 1 and {2**22} and LOW at most HIGH, got {text!r}")
        return found

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(slots=True)
class Tokens:
    """Draws tokens of a vocabulary of this size."""

    vocab_size: int
    rng: random.Random

    def draw(self, count: int) -> tuple[int, ...]:
        low = min(FIRST_TOKEN, self.vocab_size - 1)
        return tuple(self.rng.choices(range(low, self.vocab_size), k=count))


def text_of(tokens: Sequence[int]) -> str:
    """Words, about one token each, for servers that take no token ids."""
    return "".join(f" {WORDS[token % len(WORDS)]}" for token in tokens)


def single(count: int, inputs: Length, outputs: Length, tokens: Tokens) -> list[Conversation]:
    """`random`: nothing in common."""
    rng = tokens.rng
    return [Conversation((Turn(tokens.draw(inputs.draw(rng)), outputs.draw(rng)),)) for _ in range(count)]


def shared_prefix(
    count: int, inputs: Length, outputs: Length, tokens: Tokens, groups: int, prefix_len: int
) -> list[Conversation]:
    """`shared-prefix`: each prompt begins with one of `groups` prefixes, in turn, and goes on with `inputs` tokens of
    its own: system prompts, few-shot examples, questions about documents."""
    prefixes = [tokens.draw(prefix_len) for _ in range(groups)]
    bare = single(count, inputs, outputs, tokens)
    return [
        Conversation((Turn(prefixes[i % groups] + c.turns[0].tokens, c.turns[0].output_len),))
        for i, c in enumerate(bare)
    ]


def multi_turn(
    count: int, inputs: Length, outputs: Length, tokens: Tokens, turns: int, prefix_len: int
) -> list[Conversation]:
    """`multi-turn`: `count` requests in conversations of `turns`; all begin with the same prefix. A turn's prompt is
    all that was said before, the answers included, and `inputs` new tokens."""
    prefix = tokens.draw(prefix_len) if prefix_len else ()
    rng = tokens.rng
    found = []
    left = count
    while left:
        said = [Turn(tokens.draw(inputs.draw(rng)), outputs.draw(rng)) for _ in range(min(turns, left))]
        said[0] = Turn(prefix + said[0].tokens, said[0].output_len)
        found.append(Conversation(tuple(said)))
        left -= len(said)
    return found


def arrivals(count: int, rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """`count` arrival times, seconds, at `rate` per second on average. The gaps follow a gamma distribution of shape
    `burstiness`: 1 is a Poisson process, less is burstier, more is more even (as in vLLM's serving benchmark)."""
    now = 0.0
    for _ in range(count):
        yield now
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))


def at_times(conversations: list[Conversation], times: Iterator[float]) -> list[Conversation]:
    """The same conversations, beginning at these times."""
    found = []
    for conversation, at in zip(conversations, times, strict=True):
        first, *more = conversation.turns
        found.append(Conversation((Turn(first.tokens, first.output_len, at), *more)))
    return found
