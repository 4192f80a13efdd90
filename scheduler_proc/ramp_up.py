"""Answers that have only begun wait until the prompts that came with them are computed.

A burst's first tokens come one after the other. Where each answer goes on at once, the steps that compute the other
prompts compute its tokens, too: later prompts get their first tokens later, every answer is slow as long as the burst
lasts, and they end one by one, the last ones in small batches. So prompts go first as long as no answer is past its
first few tokens (in SGLang they always do), and then all answers go on together.

That holds up each answer once, by at most the time that an answer takes, and LONGEST_S. Where the prompts of a burst
take longer, and beside answers that are under way, prompts come in chunks (chunk_budget.py).
"""

from collections.abc import Sequence

from scheduler_proc.chunk_budget import ChunkBudget
from scheduler_proc.request import Request
from scheduler_proc.step_time import StepShape, StepTimeModel

BEGUN = 4  # tokens: some are planned before all requests of a burst have come
LONGEST_S = 15.0  # after which a reader would think that an answer has got stuck


class RampUp:
    def __init__(self, step_time: StepTimeModel, chunks: ChunkBudget):
        self._step_time = step_time
        self._chunks = chunks
        self._since = 0  # ns; when answers began to wait, 0 while none does

    def holds(self, decoding: Sequence[Request], prefilling: Sequence[Request], starting: int, now: int) -> bool:
        """Whether the answers of `decoding` wait in the next step: for prompts that have started, and for those of
        `starting` requests that have not, but find a slot. `now` in ns."""
        if not (decoding and all(r.cached_len < r.prompt_len + BEGUN for r in decoding)):
            self._since = 0
            return False
        if not (prefilling or starting):
            return False
        self._since = self._since or now
        left = sum(r.extend_len for r in prefilling) + int(starting * self._chunks.typical_prompt)
        rest = self._step_time.seconds_of_prompts(left)
        if rest is None:
            return False
        # what has passed is measured: prompts may be longer than the typical one, and cost more than their tokens tell
        delay = (now - self._since) / 1e9 + rest
        answer = sum(map(self._chunks.likely_answer, decoding)) / len(decoding)
        context = left + sum(r.cached_len for r in (*decoding, *prefilling))
        together = StepShape(len(decoding) + len(prefilling) + starting, context)
        return delay <= min(answer * self._step_time.predict(together), LONGEST_S)
