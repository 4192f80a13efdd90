"""Plans are functions of seed and number, and only ask for what there is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faults.catalog import CATALOG
from tests.faults.plan import SHAPES, Conduct, End, Kind, end_of, plan_round, shape_of

SEEDS = st.integers(0, 2**31)
NUMBERS = st.integers(0, 10_000)


@given(SEEDS, NUMBERS)
def test_a_plan_is_a_function_of_seed_and_number(seed: int, number: int) -> None:
    assert plan_round(seed, number) == plan_round(seed, number)
    assert end_of(seed, number) == end_of(seed, number)


@given(SEEDS, NUMBERS, st.sampled_from(SHAPES))
def test_plans_ask_for_what_there_is(seed: int, number: int, shape) -> None:  # type: ignore[no-untyped-def]
    plan = plan_round(seed, number, shape)
    assert 1 <= len(plan.faults) <= 4 and list(plan.faults) == sorted(plan.faults, key=lambda fault: fault.at)
    for fault in plan.faults:
        assert 0 <= fault.at <= 1
        others = {Kind.RENEW: "workers", Kind.SUSPEND: "cluster", Kind.PAUSE: "launcher"}
        assert fault.target in (*shape.processes, others.get(fault.kind))
        assert bool(fault.hold_ms) == (fault.kind in (Kind.PAUSE, Kind.SUSPEND))
    for ask in plan.asks:
        request = CATALOG[ask.request]
        assert shape.http or not ask.http
        assert not ask.http or (request.http is not None and ask.conduct is not Conduct.CANCEL)
        assert ask.http or ask.conduct is not Conduct.HALF
        if request.endless:  # somebody ends it
            assert ask.conduct in (Conduct.CANCEL, Conduct.DISCONNECT, Conduct.DEADLINE)
        if ask.conduct is Conduct.CANCEL:
            assert 1 <= ask.after_ms <= 50


def test_all_there_is_happens() -> None:
    plans = [plan_round(7, number) for number in range(300)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(Kind)
    assert {ask.conduct for plan in plans for ask in plan.asks} == set(Conduct)
    assert {ask.request for plan in plans for ask in plan.asks} == set(CATALOG)
    assert {shape_of(7, number) for number in range(300)} == set(SHAPES)
    assert {end_of(7, number) for number in range(100)} == set(End)
    hurt = {fault.target for plan in plans for fault in plan.faults}
    assert hurt == {"workers", "cluster", "launcher", *(name for shape in SHAPES for name in shape.processes)}
    assert 0.15 < sum(plan.has_burst for plan in plans) / len(plans) < 0.35


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_request_fits_alone(shape) -> None:  # type: ignore[no-untyped-def]
    for request in CATALOG.values():
        if not request.endless:
            assert len(request.prompt) + (request.params.max_tokens or 0) < shape.kv_tokens
