"""What the scheduler measures: how often things happen, how long requests wait, and how long and large steps are."""

from common.metrics import histogram
from scheduler_proc.request import Request

COUNTERS = (
    "steps", "requests", "finished", "aborted", "refused", "expired", "failed", "preempted",
    "suspected", "condemned", "prompt_tokens", "cached_tokens", "output_tokens", "discarded_tokens", "copied_pages",
)  # fmt: skip


class Measures:
    """Counters and histograms by name. Times are nanoseconds."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(COUNTERS, 0)
        self._queue = histogram("scheduler.queue")
        self._step = histogram("scheduler.step")
        self._step_tokens = histogram("scheduler.step_tokens")

    def admitted(self, request: Request, now: int) -> None:
        """A request starts; only its first start ends its wait in the queue."""
        if not request.preemptions:
            self._queue.observe((now - request.arrival) / 1e9)

    def step(self, tokens: int, seconds: float) -> None:
        """The workers have done a step."""
        self._step.observe(seconds)
        self._step_tokens.observe(tokens)

    def flat(self) -> dict[str, int]:
        """The histograms as counters."""
        return (
            self._queue.flat("scheduler.queue")
            | self._step.flat("scheduler.step")
            | self._step_tokens.flat("scheduler.step_tokens")
        )
