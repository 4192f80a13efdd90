"""When prompt lookup guesses, and how much, by what steps took: asked directly, in steps of a worker that is played."""

from array import array
from collections.abc import Sequence

import pytest

from common.config import DRAWN_TOKENS, SchedulerConfig
from common.messages import StepResult, ints
from common.sampling_params import DrawParams
from scheduler_proc.request import Request
from scheduler_proc.speculation import make_speculation
from scheduler_proc.step import Start, Step
from scheduler_proc.step_time import StepShape


def repeating(rid: int, left: int = 1000) -> Request:
    """A request whose text repeats every three tokens, with so many tokens left to generate."""
    return Request(rid, ints(*range(3), *range(3), *range(3)), 9, left, frozenset(), DrawParams())


class Played:
    """Speculation for `requests`, beside a worker whose steps take what a test says. Times are in seconds."""

    def __init__(self, requests: Sequence[Request], speculation: str = "ngram", **config: int):
        self.speculation = make_speculation(SchedulerConfig(speculation=speculation, **config))  # type: ignore[arg-type]
        self.requests = list(requests)
        self._now = 1_000_000_000
        for request in self.requests:
            self.speculation.follow(request)

    def step(
        self,
        tokens: int,
        seconds: float = 0.1,
        *,
        gap: float = 0.0,
        start: Start = Start.AHEAD,
        plain: bool = True,
        guesses: Sequence[int] = (),
        accepted: Sequence[int] = (),
    ) -> None:
        started = self._now + int(gap * 1e9)
        self._now = started + int(seconds * 1e9)
        shape = StepShape(tokens, 0, plain)
        step = Step(0, 0, self.requests, self.requests, [], shape, list(guesses), start)
        times = array("q", (started, started, self._now))
        self.speculation.done(step, StepResult(0, 0, "g", ints(), times, accepted=ints(*accepted)), self._now)

    def guesses(self, room: int = 10_000) -> dict[int, int]:
        found = self.speculation.guesses(self.requests, room)
        return {rid: len(tokens) for rid, tokens in found.items()}


def test_only_who_waits_for_no_token_has_guesses() -> None:
    played = Played([repeating(1), repeating(2), repeating(3, left=4), repeating(4, left=1)], num_speculative_tokens=8)
    played.requests[1].pending = 1
    played.step(4)
    assert played.guesses() == {1: 8, 3: 3}


def test_nothing_is_guessed_before_the_time_of_a_step_is_known() -> None:
    played = Played([repeating(1)])
    played.step(30, plain=False)  # with a prompt
    assert played.guesses() == {}
    played.step(1)
    assert played.guesses() == {1: 8}


def test_a_step_grows_by_what_was_tried_up_to_the_rows_that_get_logits() -> None:
    played = Played([repeating(rid) for rid in range(8)], num_speculative_tokens=64, max_running=8)
    played.step(8)
    assert sum(played.guesses().values()) == 64 - 8
    played.step(40)
    assert sum(played.guesses().values()) == 4 * 40 - 8
    played.step(128)
    assert sum(played.guesses().values()) == DRAWN_TOKENS - 8
    assert sum(played.guesses(room=17).values()) == 17


def test_now_and_then_a_step_has_no_guesses() -> None:
    """So that what such a step takes stays known."""
    played = Played([repeating(1)])
    played.step(1)
    for _ in range(2):
        steps = 0
        while found := played.guesses():
            played.step(9, guesses=list(found.values()), accepted=[8])
            steps += 1
            assert steps < 1000
        assert steps > 32
        played.step(1)


def test_guesses_that_turn_out_wrong_are_no_longer_made() -> None:
    played = Played([repeating(1)])
    played.step(1)
    for _ in range(100):
        played.step(9, guesses=[8], accepted=[0])
        played.step(1)
        if not played.guesses():
            break
    assert played.guesses() == {}


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_pause_counts_against_guesses_where_steps_are_planned_ahead(in_flight: int) -> None:
    """Else the worker pauses in any case."""
    played = Played([repeating(1)], steps_in_flight=in_flight)
    played.step(1, 0.01)
    for _ in range(5):
        played.step(1, 0.01, gap=1.0, start=Start.AFTER)
    assert bool(played.guesses()) == (in_flight == 1)


def test_always_asks_no_time() -> None:
    """Not even that of a first step; what takes as long as it may, and is never right, is guessed again."""
    played = Played([repeating(1), repeating(2, left=3), repeating(3, left=1)], "ngram-always")
    for _ in range(200):
        assert played.guesses() == {1: 8, 2: 2}
        assert played.guesses(room=4) == {1: 2, 2: 2}
        assert played.guesses(room=0) == {}
        played.step(13, 1000.0, gap=1000.0, start=Start.AFTER, guesses=[8, 2], accepted=[0, 0])
