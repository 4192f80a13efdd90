"""A step in flight."""

from dataclasses import dataclass
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
    """Its id, when it was planned (ns), all its rows, those that get tokens with the number of guesses of each, the
    prompt tokens that it scores, and its shape. `plain`: there are no chunks of prompts in it."""

    step_id: int
    planned: int
    rows: list[Request]
    sampled: list[Request]
    guesses: list[int]
    scored: list[Scored]
    shape: StepShape
    plain: bool
    start: Start
