"""What the scheduler counts: each number under its own name, in its own unit."""

import pytest

from common.messages import ints
from common.metrics import SUM_UNIT
from common.sampling_params import DrawParams
from scheduler_proc.measures import Measures
from scheduler_proc.request import Request


def test_what_happened_is_counted_in_seconds_tokens_and_times() -> None:
    measures = Measures()
    request = Request(1, ints(5, 6), 2, 9, frozenset(), DrawParams(), arrival=2_000_000_000, preemptions=3)
    measures.started(request, 2_400_000_000)
    measures.ended(request)
    measures.step(7, 0.002)
    flat = measures.flat()
    sums = {name.split("/")[0]: value / SUM_UNIT for name, value in flat.items() if name.endswith("/sum")}
    assert sums == pytest.approx(
        {"scheduler.queue": 0.4, "scheduler.preemptions": 3, "scheduler.step": 0.002, "scheduler.step_tokens": 7}
    )
    for name in sums:
        assert sum(value for key, value in flat.items() if key.startswith(f"{name}/") and key != f"{name}/sum") == 1


def test_guesses_are_counted_by_their_place() -> None:
    measures = Measures()
    measures.guessed([0, 3, 2])
    for right in (1, 3, 0):
        measures.accepted(right)
    names = ("drafts", "draft_tokens", "accepted_tokens")
    assert [measures.counts[name] for name in names] == [2, 5, 4]
    places = {name: count for name, count in measures.flat().items() if "accepted_at" in name}
    assert places == {f"scheduler.accepted_at/{depth}": count for depth, count in enumerate((2, 1, 1))}
