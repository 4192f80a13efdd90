"""How many prompt tokens a step takes beside its decodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_proc.chunk_budget import LEAST_ALONE, LEAST_TOKENS, UNKNOWN_TOKENS, ChunkBudget
from scheduler_proc.ramp_up import BEGUN
from scheduler_proc.step_time import StepShape, StepTimeModel
from tests.rig import Rig

BASE, PER_TOKEN = 0.040, 0.0005  # seconds


def learned(plain: int = 50, mixed: int = 50) -> StepTimeModel:
    model = StepTimeModel()
    for i in range(plain):
        model.learn(StepShape(1 + i % 32, 0), BASE + PER_TOKEN * (1 + i % 32))
    for i in range(mixed):
        model.learn(StepShape(8 + 40 * (i % 7), 0, plain=False), BASE + PER_TOKEN * (8 + 40 * (i % 7)))
    return model


def test_a_lone_arrival_makes_a_step_longer_by_the_slowdown_and_its_share():
    budget = ChunkBudget(learned(), 512, 1.5, 0.0)
    decodes = StepShape(8, 0)
    # half of 40 + 4 ms are 44 tokens; 8 that decode let 1 / 8**1.6 of the 128 tokens pass
    assert budget.tokens(decodes, 128, 0) == pytest.approx(44 + 5, abs=2)


def test_waiting_requests_count_as_what_was_admitted_lately():
    budget = ChunkBudget(learned(), 512, 1.5, 0.0)
    decodes = StepShape(8, 0)
    before = budget.tokens(decodes, 128, 4)
    for _ in range(100):
        budget.admitted(64)  # of longer prompts, whose rest was cached
    assert budget.tokens(decodes, 128, 0) == before
    assert budget.tokens(decodes, 128, 4) == pytest.approx(before + 4 * 64 / 8**1.6, abs=1)


def test_what_came_lately_weighs_a_tenth():
    budget = ChunkBudget(learned(), 512, 1.5, 0.0)
    for tokens in (100, 200):
        budget.admitted(tokens)
    assert budget.typical_prompt == pytest.approx(110)


def test_chunks_keep_up_with_what_comes():
    budget = ChunkBudget(learned(), 512, 1.5, 0.0)
    decodes = StepShape(8, 0)
    alone = budget.tokens(decodes, 0, 0)
    budget.admitted(512)
    assert budget.tokens(decodes, 0, 0) == alone, "how long answers are is not known yet"
    budget.finished(64)
    assert budget.tokens(decodes, 0, 0) == 1.5 * 8 * 512 / 64, "each token of an answer goes with eight of a prompt"
    assert budget.tokens(StepShape(4, 0), 0, 0) == 1.5 * 4 * 512 / 64
    for _ in range(200):
        budget.finished(2000)
    assert budget.tokens(decodes, 0, 0) == alone, "two tokens of prompts per step come, and more pass anyway"


@given(prompt=st.integers(1, 10**5), answer=st.integers(1, 10**5), decodes=st.integers(1, 256))
def test_what_comes_is_one_request_for_each_that_ends(prompt, answer, decodes):
    budget = ChunkBudget(learned(), 2**40, 1.0, 0.0)  # no step may take longer for prompts
    budget.admitted(prompt)
    budget.finished(answer)
    steps_per_request = answer / decodes
    assert budget.tokens(StepShape(decodes, 0), 0, 0) >= int(prompt / steps_per_request)


def test_what_comes_does_not_exceed_the_most_or_a_target():
    for most, slowdown, target in ((100, 1.5, 0.0), (100, 0.0, 0.0), (512, 1.5, 0.1)):
        budget = ChunkBudget(learned(), most, slowdown, target)
        before = budget.tokens(StepShape(8, 0), 0, 0)
        budget.admitted(4096)
        budget.finished(1)
        assert budget.tokens(StepShape(8, 0), 0, 0) == (before if target else 100)


def test_a_burst_before_few_decodes_comes_in_the_largest_chunks():
    assert ChunkBudget(learned(), 512, 1.5, 0.0).tokens(StepShape(2, 0), 4000, 0) == 512


ALONE = StepShape(0, 0)


@pytest.mark.parametrize("slowdown, target", [(1.5, 0.0), (0.0, 0.01)])
def test_where_nobody_decodes_a_step_is_as_long_as_makes_its_fixed_time_a_tenth(slowdown, target):
    budget = ChunkBudget(learned(), 512, slowdown, target)
    assert budget.tokens(ALONE, 4000, 0) == budget.most(ALONE) == pytest.approx(9 * BASE / PER_TOKEN, rel=0.01)


def test_where_nobody_decodes_the_next_prompt_is_not_cut():
    budget = ChunkBudget(learned(), 512, 1.5, 0.0)
    assert budget.tokens(ALONE, 4000, 0, whole=900) == 900
    assert budget.tokens(ALONE, 4000, 0, whole=100) == budget.most(ALONE)
    assert budget.tokens(StepShape(8, 0), 900, 0, whole=900) == budget.tokens(StepShape(8, 0), 900, 0)


def test_where_nobody_decodes_and_little_is_known_a_step_is_moderate():
    assert ChunkBudget(learned(mixed=7), 512, 1.5, 0.0).tokens(ALONE, 4000, 0) == UNKNOWN_TOKENS


def test_where_nobody_decodes_a_step_without_fixed_time_still_has_the_least():
    model = StepTimeModel()
    for i in range(50):
        model.learn(StepShape(8 + i, 0, plain=False), PER_TOKEN * (8 + i))
    assert ChunkBudget(model, 512, 1.5, 0.0).tokens(ALONE, 4000, 0) == LEAST_ALONE


def test_nothing_bounds_a_step_without_decodes_where_chunks_have_one_size():
    assert ChunkBudget(learned(), 300, 0.0, 0.0).tokens(ALONE, 4000, 0) is None


def test_the_most_where_slowdown_is_off():
    assert ChunkBudget(learned(), 300, 0.0, 0.0).tokens(StepShape(8, 0), 128, 0) == 300


@pytest.mark.parametrize("model", [StepTimeModel(), learned(mixed=7)])
def test_a_moderate_chunk_while_too_little_is_known(model):
    assert ChunkBudget(model, 300, 1.5, 0.0).tokens(StepShape(8, 0), 128, 0) == UNKNOWN_TOKENS
    assert ChunkBudget(model, 200, 1.5, 0.0).tokens(StepShape(8, 0), 128, 0) == 200


def test_a_target_counts_before_the_slowdown():
    decodes = StepShape(8, 0)
    budget = ChunkBudget(learned(), 32, 1.5, 0.1)
    assert budget.tokens(decodes, 128, 0) == pytest.approx(112, abs=2), "60 ms are 120 tokens, 8 of which decode"
    for most in (5, 512):
        assert ChunkBudget(learned(), most, 1.5, 0.001).tokens(decodes, 128, 0) == min(most, LEAST_TOKENS)


@given(
    decodes=st.integers(1, 256), context=st.integers(0, 10**6), prefilling=st.integers(0, 10**6),
    waiting=st.integers(0, 10**4), typical=st.integers(0, 10**5), most=st.integers(1, 2048),
    slowdown=st.floats(1.0, 100.0),
)  # fmt: skip
def test_between_the_least_and_the_most_and_more_when_more_waits(
    decodes, context, prefilling, waiting, typical, most, slowdown
):
    budget = ChunkBudget(learned(), most, slowdown, 0.0)
    budget.admitted(typical)
    shape = StepShape(decodes, context)
    tokens = budget.tokens(shape, prefilling, waiting)
    assert min(most, LEAST_TOKENS) <= tokens <= most == budget.most(shape)
    assert tokens <= budget.tokens(shape, prefilling + 100, waiting)
    assert tokens <= budget.tokens(shape, prefilling, waiting + 1)


@given(decodes=st.integers(1, 255), backlog=st.integers(0, 10**6))
def test_what_all_who_decode_let_pass_together_falls_with_their_number(decodes, backlog):
    budget = ChunkBudget(learned(), 2**30, 1.0, 0.0)  # without a share for those who decode
    few, more = (budget.tokens(StepShape(n, 0), backlog, 0) for n in (decodes, decodes + 1))
    assert LEAST_TOKENS <= more <= few
    assert more == LEAST_TOKENS or more * (decodes + 1) <= (few + 1) * decodes


def test_what_prompts_cost_is_not_forgotten_while_answers_are_written():
    model = learned()
    before = model.tokens_for(1.5, StepShape(8, 0))
    for _ in range(5000):
        model.learn(StepShape(8, 0), BASE + PER_TOKEN * 8)
    assert model.tokens_for(1.5, StepShape(8, 0)) == pytest.approx(before, rel=0.05)


def test_the_scheduler_takes_small_chunks_beside_answers_and_large_ones_before_them():
    rig = timed_rig()
    for rid in range(6):
        rig.add(rid, range(10 * rid, 10 * rid + 8), 500)
    assert prefilled(rig) == 48, "all at once"
    assert not any(prefilled(rig) for _ in range(BEGUN)), "now answers are under way"
    rig.add(10, range(1000, 1090), 5)
    first = prefilled(rig)
    assert first == pytest.approx(43 + 5, abs=3), "half of 40 + 3 ms are 43 tokens, and 1 / 6**1.6 of the 90"
    assert prefilled(rig) == 90 - first


def test_the_scheduler_learns_how_long_answers_are():
    rig = timed_rig()
    for rid in range(6):
        rig.add(rid, range(10 * rid, 10 * rid + 60), 500 if rid else 2)
    while prefilled(rig):
        pass
    while 0 in rig.scheduler.requests:
        prefilled(rig)
    assert not any(prefilled(rig) for _ in range(BEGUN)), "now answers are under way"
    rig.add(10, range(1000, 1900), 5)
    assert prefilled(rig) == 200, "1.5 * 5 * 60 / 2 keep up, and 200 are the most"


def timed_rig() -> Rig:
    rig = Rig(chunk_tokens=200, chunk_slowdown=1.5, max_batch_tokens=512, pages=2000, context=2000)
    for i in range(60):
        tokens = 8 + 40 * (i % 7)
        rig.scheduler.step_time.learn(StepShape(tokens, 0, plain=i % 7 == 0), BASE + PER_TOKEN * tokens)
    return rig


def prefilled(rig: Rig) -> int:
    """Tokens of prompts in the next step, which is executed."""
    plan = rig.scheduler.plan(rig.now)
    result = rig.worker.execute(plan)
    del result.times[:]  # the paper worker's times are not to be learned
    rig.take(rig.scheduler.commit(result, rig.now))
    return sum(plan.chunk_lens)


ONE_BY_ONE = [[150, 30], [70, 110], [590], [10]]  # 180 tokens, or the next prompt's whole rest
IN_TURNS = [[150, 30], [70, 110], [180], [10, 170], [180], [60]]  # no more than 180 tokens, whose-ever they are


@pytest.mark.parametrize("policy, expected", [("fcfs", ONE_BY_ONE), ("round-robin", IN_TURNS)])
def test_a_burst_before_no_answers_gets_its_first_tokens_one_prompt_after_the_other(policy, expected):
    rig = Rig(policy=policy, chunk_slowdown=1.5, max_batch_tokens=2048, pages=2000, context=2000, steps_in_flight=1)
    for i in range(60):  # the fixed time is that of 20 tokens: 180 make it a tenth
        tokens = 8 + 40 * (i % 7)
        rig.scheduler.step_time.learn(StepShape(tokens, 0, plain=i % 7 == 0), PER_TOKEN * (20 + tokens))
    for rid, length in enumerate((150, 100, 700, 10)):
        rig.add(rid, range(1000 * rid, 1000 * rid + length), 1)
    chunks = []
    while (plan := rig.scheduler.plan(rig.now)) is not None:
        chunks.append(list(plan.chunk_lens))
        result = rig.worker.execute(plan)
        del result.times[:]
        rig.take(rig.scheduler.commit(result, rig.now))
    assert chunks == expected


def test_guesses_are_not_counted_as_answers():
    budget = ChunkBudget(learned(), 2**20, 1.0, 0.0)
    without = budget.tokens(StepShape(8, 0), 4000, 0)
    assert budget.tokens(StepShape(72, 0), 4000, 0, guesses=64) == without
    assert budget.tokens(StepShape(72, 0), 4000, 0) < without
