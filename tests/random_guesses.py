"""Guesses without rhyme or reason, for tests: what a scheduler answers must not depend on them."""

import random
from collections.abc import Sequence

from common.fields import IntArray
from common.messages import ints
from scheduler_proc.request import Request
from scheduler_proc.residents import Residents
from scheduler_proc.speculation import Speculation, can_guess, most_guesses
from tests.paper_worker import VOCAB, next_token


class RandomGuesses(Speculation):
    """A Speculation that waits or not, and guesses up to `most` tokens of the paper worker's, right up to some point,
    for some of those who may have guesses."""

    def __init__(self, seed: int, most: int = 5):
        self._random = random.Random(seed)
        self._most = most

    def better_wait(self, residents: Residents) -> bool:
        return self._random.random() < 0.7

    def guesses(self, ready: Sequence[Request], room: int) -> dict[int, IntArray]:
        found: dict[int, IntArray] = {}
        for request in ready:
            most = min(self._most, most_guesses(request), room)
            if request.pending or not can_guess(request) or most < 1 or self._random.random() < 0.2:
                continue
            tokens = ints()
            for _ in range(self._random.randint(1, most)):
                token = next_token([*request.tokens, *tokens])
                tokens.append(token if self._random.random() < 0.8 else (token + 1) % VOCAB)
            room -= len(tokens)
            found[request.rid] = tokens
        return found


def speculate(scheduler, seed: int, most: int = 5) -> None:
    """Let a scheduler guess at random from now on."""
    scheduler.speculation = scheduler.planner._speculation = RandomGuesses(seed, most)
