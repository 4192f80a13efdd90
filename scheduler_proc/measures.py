"""What the scheduler measures: how often things happen, how long requests wait, and how long and large steps are."""

from collections.abc import Sequence

from common.metrics import histogram
from scheduler_proc.request import Request

COUNTERS = (
    "steps", "requests", "finished", "aborted", "refused", "expired", "failed", "preempted",
    "suspected", "condemned", "prompt_tokens", "cached_tokens", "host_cached_tokens",
    "output_tokens", "discarded_tokens", "copied_pages",
    "drafts", "draft_tokens", "accepted_tokens",
)  # fmt: skip


class Measures:
    """Counters and histograms by name. Times are nanoseconds."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(COUNTERS, 0)
        self._accepted_at: list[int] = []  # how often a guess was right, by how many came before it in its draft
        self._queue = histogram("scheduler.queue")
        self._preemptions = histogram("scheduler.preemptions")
        self._step = histogram("scheduler.step")
        self._step_tokens = histogram("scheduler.step_tokens")

    def started(self, request: Request, now: int) -> None:
        """A request starts for the first time: its wait in the queue is over."""
        self._queue.observe((now - request.arrival) / 1e9)

    def found(self, request: Request, from_host: int) -> None:
        """A request starts with what of its prompt is cached, so many tokens of it in the host tier."""
        self.counts["prompt_tokens"] += request.prompt_len
        self.counts["cached_tokens"] += request.cached_prompt
        self.counts["host_cached_tokens"] += from_host

    def ended(self, request: Request) -> None:
        """A request is over, however it ended."""
        self._preemptions.observe(request.preemptions)

    def step(self, tokens: int, seconds: float) -> None:
        """The workers have done a step."""
        self._step.observe(seconds)
        self._step_tokens.observe(tokens)

    def guessed(self, guesses: Sequence[int]) -> None:
        """A step with guesses was planned, so many for each row."""
        self.counts["drafts"] += sum(map(bool, guesses))
        self.counts["draft_tokens"] += sum(guesses)

    def accepted(self, guesses: int) -> None:
        """So many of a row's guesses were right."""
        self.counts["accepted_tokens"] += guesses
        self._accepted_at += [0] * (guesses - len(self._accepted_at))
        for depth in range(guesses):
            self._accepted_at[depth] += 1

    def flat(self) -> dict[str, int]:
        """The histograms as counters."""
        accepted = {f"scheduler.accepted_at/{depth}": count for depth, count in enumerate(self._accepted_at)}
        return accepted | (
            self._queue.flat("scheduler.queue")
            | self._preemptions.flat("scheduler.preemptions")
            | self._step.flat("scheduler.step")
            | self._step_tokens.flat("scheduler.step_tokens")
        )
