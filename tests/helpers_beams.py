"""A beam search over a function that says what follows, and the table of random numbers behind such functions."""

import math
from collections.abc import Callable
from functools import cache
from heapq import nlargest
from random import Random

from tokenizer_proc.beam_search import BeamSearch, Hypothesis

PROMPT = [1, 2]
VOCAB = 12


@cache
def table(seed: int) -> list[list[float]]:
    """A row of logits for each of seven lengths and each pair of last tokens."""
    rng = Random(seed)
    return [[rng.gauss(0, 2) for _ in range(VOCAB)] for _ in range(7 * VOCAB * VOCAB)]


def row_of(tokens: list[int]) -> int:
    """Which row of a table follows `tokens`."""
    return (len(tokens) % 7 * VOCAB + tokens[-2]) * VOCAB + tokens[-1]


def logprobs_by(seed: int) -> Callable[[list[int]], list[float]]:
    """Log probabilities that depend on the last two tokens and the length."""

    def logprobs(tokens: list[int]) -> list[float]:
        logits = table(seed)[row_of(tokens)]
        norm = math.log(sum(map(math.exp, logits)))
        return [logit - norm for logit in logits]

    return logprobs


def searched(search: BeamSearch, most: int, logprobs: Callable[[list[int]], list[float]]) -> list[Hypothesis]:
    """What a search of at most `most` tokens after PROMPT finds."""
    steps = 0
    while not search.done:
        following = []
        for beam in search.beams:
            values = logprobs([*PROMPT, *beam.tokens])
            following.append(
                [(i, values[i]) for i in nlargest(search.num_candidates, range(VOCAB), values.__getitem__)]
            )
        search.advance(following)
        steps += 1
        assert steps <= most
    return search.hypotheses
