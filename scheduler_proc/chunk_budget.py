"""How many prompt tokens a step takes, beside decodes and without.

Prompt tokens make a step longer for every request that decodes (Sarathi-Serve, Agrawal et al., 2024, sizes chunks by a
bound on that time). How long a step may be depends on what it delays and what waits: with few prompts waiting, at most
`slowdown` times a step without them; with many, longer by a part of the waiting tokens, which falls faster than the
number of those who decode grows, because a long step is felt by all of them. So a burst of prompts starts in large
chunks, and the more answers are under way, the less each arrival is felt.

Chunks that are too small for what comes make prompts queue until fewer decode: first tokens come late and the weights
are read for fewer tokens, so nothing is gained. Where as many requests start as finish, each token of an answer goes
with as many prompt tokens as an answer has on average; a step takes somewhat more than that for its decodes, even
where `slowdown` says less.

Where nobody decodes, prompts that wait together would all get their first tokens at the end of one long step. A step
takes the next prompt whole, and more only while its fixed time (reading the weights) is still a large part of it:
beyond that, prompts one after the other take as long in all, and all but the last have their first tokens sooner.
"""

from scheduler_proc.request import Request
from scheduler_proc.step_time import StepShape, StepTimeModel

LEAST_TOKENS = 16  # so that prompts advance whatever is asked for
UNKNOWN_TOKENS = 256  # at most, while too few steps with prompts have been timed
LEAST_ALONE = 64  # tokens without decodes: fewer use the hardware badly, whatever was learned
_FIXED_SHARE = 0.1  # of a step's time, up to which more prompts in it save time
CROWD = 1.6  # power of the number of decodes: more means less ITL p99 in bursts, and less output (docs/benchmarks.md)
HEADROOM = 1.5  # over the rate at which prompt tokens come where as many requests start as finish
_NEAR = 0.9  # weight of what earlier requests had, per later one


class ChunkBudget:
    """The budget of steps, from the times of earlier ones."""

    def __init__(self, step_time: StepTimeModel, most: int, slowdown: float, target_s: float):
        """A step takes at most `most` tokens of prompts, fewer where `slowdown` (0 is off) or the time `target_s` in
        seconds (0 is off, and counts before `slowdown`, without `most`) ask for it."""
        self._step_time = step_time
        self._most = most
        self._slowdown = slowdown
        self._target_s = target_s
        self.typical_prompt = 0.0  # tokens that a request has to compute when it is admitted
        self._answer = 0.0  # tokens that a request has generated when it finishes

    def admitted(self, tokens: int) -> None:
        """A request has started, of whose prompt so many tokens are not cached."""
        self.typical_prompt = _mean(self.typical_prompt, tokens)

    def finished(self, tokens: int) -> None:
        """A request has got all of its tokens, so many."""
        self._answer = _mean(self._answer, tokens)

    def likely_answer(self, request: Request) -> float:
        """Tokens: as many as recent answers had, where it may end before its limit."""
        return request.max_tokens if request.ends_at_limit else min(request.max_tokens, self._answer)

    def most(self, decodes: StepShape) -> int | None:
        """What `tokens` will not exceed, whatever waits; None is no limit."""
        if not decodes.tokens:
            return self._alone()
        if self._target_s:
            known = self._step_time.tokens_within(self._target_s, decodes.context)
            if known is not None:
                return max(min(LEAST_TOKENS, self._most), known - decodes.tokens)
        return self._most

    def tokens(self, decodes: StepShape, prefilling: int, waiting: int, whole: int = 0, guesses: int = 0) -> int | None:
        """The budget of a step with these decodes, when `prefilling` tokens of prompts that have started are left, and
        `waiting` requests have not; None is no limit. Without decodes, the `whole` tokens of one are not cut. Of the
        decodes' tokens so many are `guesses`, the others are one for each answer under way."""
        most = self.most(decodes)
        if most is not None and not decodes.tokens:
            return max(most, whole)
        if most is None or self._target_s or not self._slowdown:
            return most
        share = self._step_time.tokens_for(self._slowdown, decodes)
        if share is None:
            return min(most, UNKNOWN_TOKENS)
        backlog = prefilling + waiting * self.typical_prompt
        answers = decodes.tokens - guesses
        keep_up = HEADROOM * answers * self.typical_prompt / self._answer if self._answer else 0.0
        return min(most, max(LEAST_TOKENS, int(max(share, keep_up) + backlog / answers**CROWD)))

    def _alone(self) -> int | None:
        """Without decodes, the tokens after which the fixed time of a step is a small part of it."""
        if not (self._slowdown or self._target_s):
            return None
        known = self._step_time.tokens_beside_fixed(_FIXED_SHARE)
        return max(LEAST_ALONE, UNKNOWN_TOKENS if known is None else known)


def _mean(of_earlier: float, tokens: int) -> float:
    """With one request more; 0 while there are none."""
    return _NEAR * of_earlier + (1 - _NEAR) * tokens if of_earlier else float(tokens)
