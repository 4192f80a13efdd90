"""A step in flight."""

from dataclasses import dataclass, field
from enum import Enum, auto

from scheduler_proc.plan_builder import Scored
from scheduler_proc.request import Request
from scheduler_proc.step_time import StepShape


class Start(Enum):
    """When a step was planned, which decides how long the worker pauses before it."""

    AHEAD = auto()  # while the step before it ran
    AFTER = auto()  # as soon as that one's tokens had come
    IDLE = auto()  # when something to do came


@dataclass(frozen=True, slots=True)
class Step:
    """Its id, when it was planned (ns), all its rows, those that get a token, the prompt tokens that it scores, its
    shape, and how many guesses each row that gets a token has (empty where none has any)."""

    step_id: int
    planned: int
    rows: list[Request]
    sampled: list[Request]
    scored: list[Scored]
    shape: StepShape
    guesses: list[int] = field(default_factory=list)
    start: Start = Start.AHEAD

    @property
    def sampled_guesses(self) -> list[int]:
        """How many guesses each of `sampled` has."""
        return self.guesses or [0] * len(self.sampled)
