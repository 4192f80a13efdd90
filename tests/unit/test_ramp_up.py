"""Answers that have only begun wait for the prompts that came with them, and for nothing else."""

from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import ints
from common.sampling_params import DrawParams
from scheduler_proc.chunk_budget import ChunkBudget
from scheduler_proc.ramp_up import BEGUN, RampUp
from scheduler_proc.request import Request
from scheduler_proc.step_time import StepShape, StepTimeModel
from tests.rig import Rig

BASE, PER_TOKEN = 0.040, 0.001  # seconds
SECOND = NOW = 10**9  # ns


def learn(model: StepTimeModel) -> None:
    for i in range(60):
        tokens = 8 + 40 * (i % 7)
        model.learn(StepShape(tokens, 0, plain=i % 7 == 0), BASE + PER_TOKEN * tokens)


def begun(prompt: int, max_tokens: int, decoded: int = 0, stop: bool = False) -> Request:
    """A request whose first token is sampled, and then so many more."""
    ends = frozenset({7} if stop else ())
    request = Request(0, ints(*range(prompt)), prompt, max_tokens, ends, DrawParams())
    request.cached_len, request.pending = prompt + decoded, 1 + decoded
    return request


def ramp_up(answers: int = 0) -> RampUp:
    """Where recent prompts had 100 tokens, and answers so many."""
    model = StepTimeModel()
    learn(model)
    chunks = ChunkBudget(model, 512, 1.5, 0.0)
    chunks.admitted(100)
    if answers:
        chunks.finished(answers)
    return RampUp(model, chunks)


def test_answers_wait_while_none_is_past_its_first_few_tokens():
    assert ramp_up().holds([begun(100, 50), begun(90, 50)], [], starting=2, now=NOW)
    assert ramp_up().holds([begun(100, 50), begun(90, 50, decoded=BEGUN - 1)], [], starting=2, now=NOW)
    assert not ramp_up().holds([begun(100, 50), begun(90, 50, decoded=BEGUN)], [], starting=2, now=NOW)
    assert not ramp_up().holds([begun(100, 50)], [], starting=0, now=NOW), "nothing to wait for"
    prompt = Request(1, ints(*range(200)), 200, 50, frozenset(), DrawParams())
    assert ramp_up().holds([begun(100, 50)], [prompt], starting=0, now=NOW)
    assert not ramp_up().holds([], [], starting=2, now=NOW), "nobody waits"


def test_prompts_that_take_longer_than_an_answer_are_not_waited_for():
    # ten rows take 50 ms a step, and 50 steps as long as 2500 tokens of prompts
    assert ramp_up().holds([begun(100, 50)] * 2, [], starting=24, now=NOW)
    assert not ramp_up().holds([begun(100, 50)] * 2, [], starting=60, now=NOW)
    prompt = Request(1, ints(*range(5000)), 5000, 50, frozenset(), DrawParams())
    assert not ramp_up().holds([begun(100, 50)], [prompt], starting=0, now=NOW)


def test_no_answer_waits_for_long():
    assert ramp_up().holds([begun(100, 10**6)], [], starting=140, now=NOW)
    assert not ramp_up().holds([begun(100, 10**6)], [], starting=160, now=NOW), "16 seconds"


def test_an_answer_that_may_end_counts_as_recent_ones():
    assert not ramp_up(answers=2).holds([begun(100, 1000, stop=True)], [], starting=8, now=NOW)
    assert ramp_up(answers=2).holds([begun(100, 1000)], [], starting=8, now=NOW), "it has no end but its limit"
    assert ramp_up(answers=500).holds([begun(100, 1000, stop=True)], [], starting=8, now=NOW)
    assert not ramp_up(answers=500).holds([begun(100, 2, stop=True)], [], starting=8, now=NOW)
    assert not ramp_up().holds([begun(100, 1000, stop=True)], [], starting=8, now=NOW), (
        "nobody knows how long answers are"
    )


def test_nobody_waits_while_the_time_of_prompts_is_not_known():
    model = StepTimeModel()
    chunks = ChunkBudget(model, 512, 1.5, 0.0)
    chunks.admitted(100)
    for i in range(50):
        model.learn(StepShape(1 + i % 8, 0), BASE + PER_TOKEN * (1 + i % 8))
    assert not RampUp(model, chunks).holds([begun(100, 10**6)], [], starting=1, now=NOW)


@given(arrivals=st.lists(st.integers(1, 400), min_size=1), max_tokens=st.integers(1, 200))
def test_prompts_that_keep_coming_hold_answers_no_longer_than_one_takes(arrivals, max_tokens):
    one, held, context, now = ramp_up(), 0, 100 + 400, NOW
    for tokens in cycle(arrivals):
        prompt = Request(1, ints(*range(tokens)), tokens, 50, frozenset(), DrawParams())
        if not one.holds([begun(100, max_tokens)], [prompt], starting=0, now=now):
            break
        now += int(tokens * PER_TOKEN * SECOND)
        held += tokens
        assert held * PER_TOKEN <= max_tokens * (BASE + PER_TOKEN * 2 + 1e-6 * context) * 1.01


def timed_rig(**config) -> Rig:
    rig = Rig(**{"chunk_slowdown": 1.5, "max_batch_tokens": 64, "chunk_tokens": 32, "pages": 500} | config)
    learn(rig.scheduler.step_time)
    return rig


def shapes(rig: Rig, seconds: int = 0) -> list[tuple[int, int]]:
    """(rows that decode, tokens of prompts) of each step until nothing is left, of so many seconds each; the times that
    were learned stay."""
    found = []
    while (plan := rig.scheduler.plan(rig.now)) is not None:
        found.append((int.from_bytes(plan.decode).bit_count(), sum(plan.chunk_lens)))
        result = rig.worker.execute(plan)
        rig.now += seconds * SECOND
        del result.times[:]
        rig.take(rig.scheduler.commit(result, rig.now))
    return found


def burst(rig: Rig, count: int = 4, **more) -> None:
    for rid in range(count):
        rig.add(rid, range(100 * rid, 100 * rid + 64), 20, **more)


def test_a_burst_has_its_first_tokens_before_any_second_one():
    rig = timed_rig()
    burst(rig)
    assert shapes(rig) == [(0, 64)] * 4 + [(4, 0)] * 19
    assert all(len(rig.out[rid]) == 20 for rid in range(4))


def test_no_answer_waits_longer_than_one_takes_where_prompts_take_longer_than_expected():
    """Attention in very long ones does, and those that wait may be longer than recent ones were."""
    rig = timed_rig()
    for rid in range(8):
        rig.add(rid, range(100 * rid, 100 * rid + 64), 125)  # an answer takes 6 s
    assert [rows for rows, _ in shapes(rig, 5)][:4] == [0, 0, 0, 3]


@pytest.mark.parametrize("config", [{"policy": "priority"}, {"chunk_slowdown": 0.0}, {"itl_target_ms": 90.0}])
def test_answers_go_on_at_once_where_something_else_is_asked_for(config):
    rig = timed_rig(**config)
    burst(rig)
    assert shapes(rig)[1][0] == 1


def test_the_first_of_a_burst_is_held_though_its_next_tokens_are_planned_when_the_others_come():
    rig = timed_rig(steps_in_flight=2)
    rig.add(9, range(5000, 5064), 20)
    ahead = [rig.scheduler.plan(rig.now), rig.scheduler.plan(rig.now)]
    assert [int.from_bytes(plan.decode).bit_count() for plan in ahead] == [0, 1]
    burst(rig)
    for plan in ahead:
        result = rig.worker.execute(plan)
        del result.times[:]
        rig.take(rig.scheduler.commit(result, rig.now))
    assert shapes(rig)[:5] == [(0, 64)] * 4 + [(5, 0)]


def test_answers_that_waited_do_not_wait_as_long_again():
    one, answers = ramp_up(), [begun(100, 50)]
    assert one.holds(answers, [], starting=10, now=NOW)
    assert not one.holds(answers, [], starting=0, now=NOW + 10**9)
    assert not one.holds(answers, [], starting=10, now=NOW + 2 * 10**9), "50 tokens take 2.5 s"
    assert not one.holds([], [], starting=0, now=NOW + 3 * 10**9)
    assert one.holds(answers, [], starting=10, now=NOW + 4 * 10**9), "the next burst is another one"


def test_answers_under_way_do_not_wait():
    rig = timed_rig()
    rig.add(9, range(5000, 5064), 100)
    for _ in range(1 + BEGUN):
        rig.step()
    burst(rig)
    assert all(rows for rows, _ in shapes(rig))


def test_answers_go_on_where_those_that_wait_find_no_pages():
    rig = timed_rig(pages=40, admission="reserve")  # of 4 tokens: for one request of 64 and 20, and not for two
    burst(rig, 3)
    assert shapes(rig) == ([(0, 64)] + [(1, 0)] * 19) * 3


def test_answers_go_on_where_there_is_no_slot():
    rig = timed_rig(max_running=2)
    burst(rig, 3)
    assert shapes(rig)[:3] == [(0, 64), (0, 64), (2, 0)]


def test_those_that_find_no_slot_are_not_waited_for():
    """All sixty would take longer than an answer, the first eight do not."""
    rig = timed_rig(max_running=8, pages=1000)
    burst(rig, 60)
    assert shapes(rig)[:9] == [(0, 64)] * 8 + [(8, 0)]
