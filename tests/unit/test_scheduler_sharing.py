"""Prefix sharing: exact to the token, copy-on-write, namespaces, in-batch sharing."""

import pytest

from common.messages import AddRequest, Finish, ints
from common.sampling_params import DrawParams
from scheduler_proc.planner import LOOK_AHEAD
from tests.paper_worker import solo_output
from tests.rig import Rig


def test_a_match_inside_a_page_is_copied_and_goes_on_in_the_copy():
    rig = Rig(page_size=4)
    rig.add(1, range(16), 5)
    rig.run()
    rig.add(2, range(16), 5)
    plans = rig.run()
    assert rig.cached == {1: 0, 2: 15}, "to the token: only the last prompt token is computed again"
    assert rig.scheduler.stats()["copied_pages"] == 1
    assert list(plans[0].enter_lens) == [15] and list(plans[0].chunk_lens) == [1] and len(plans[0].copies) == 2
    turn = [*range(16), *rig.out[1][:4], 7]  # the next turn of a conversation: the answer is in the tree too
    rig.add(3, turn, 5)
    rig.run()
    assert rig.cached[3] == 20
    assert rig.out[1] == rig.out[2] == solo_output(list(range(16)), 5)
    assert rig.out[3] == solo_output(turn, 5)


@pytest.mark.parametrize("draw", [DrawParams(), DrawParams(prompt_logprobs=0)])
def test_what_is_cached_of_its_answer_is_not_counted_as_cached_of_its_prompt(draw):
    """Nor is a prompt computed again whose log probabilities are known."""
    rig = Rig()
    rig.add(1, range(10), 5)
    rig.run()
    tokens = ints(*range(10), *rig.out[1][:3])
    again = AddRequest(
        2, tokens, 5, ints(), draw, generated=3, scored=9 if draw.prompt_logprobs == 0 else 0, waited_ms=1
    )
    rig.take(rig.scheduler.handle(again, rig.now))
    assert list(rig.step().enter_lens) == [12]
    rig.run()
    assert rig.cached[2] == 9


def test_namespaces_share_nothing():
    rig = Rig()
    for rid, salt in enumerate(["", "a", "b", "a", ""]):
        rig.add(rid, range(20), 3, salt=salt)
        rig.run()
    assert rig.cached == {0: 0, 1: 0, 2: 0, 3: 19, 4: 19}


def test_of_requests_with_a_common_prefix_one_computes_it():
    rig = Rig(page_size=4, max_batch_tokens=64)
    for rid in range(6):
        rig.add(rid, [*range(100), 200 + rid], 3)
    plans = rig.run()
    assert sum(len(plan.chunk_tokens) for plan in plans) == 101 + 5, "the common prefix once, then one token each"
    assert rig.out == {rid: solo_output([*range(100), 200 + rid], 3) for rid in range(6)}
    assert [rig.cached[rid] for rid in range(6)] == [0, 100, 100, 100, 100, 100]


def test_whoever_waits_for_a_prefix_goes_on_alone_when_its_maker_is_aborted():
    rig = Rig(page_size=4, max_batch_tokens=32)
    rig.add(1, range(100), 3)
    rig.add(2, range(90), 3)
    rig.step()
    rig.abort(1)
    rig.run()
    assert rig.out[2] == solo_output(list(range(90)), 3) and rig.cached[2] == 32


def test_waiting_for_a_prefix_is_never_longer_than_computing_it():
    """The steps until the follower's first token, with sharing and with a prefix of its own of the same length."""
    steps = {}
    for name, prompt in (("shared", [*range(96), 5]), ("own", [*range(200, 296), 5])):
        rig = Rig(page_size=4, max_batch_tokens=32, policy="round-robin")
        rig.add(1, range(100), 3)
        rig.add(2, prompt, 3)
        steps[name] = 0
        while 2 not in rig.out:
            rig.step()
            steps[name] += 1
    assert steps["shared"] <= steps["own"]


@pytest.mark.parametrize("followers, starts", [(LOOK_AHEAD, True), (LOOK_AHEAD + 1, False)])
def test_so_many_may_be_passed_over_in_one_step(followers, starts):
    rig = Rig(max_batch_tokens=64, max_running=64, pages=300)
    rig.add(1, range(50), 3)
    for rid in range(2, 2 + followers):
        rig.add(rid, [*range(50), rid], 3)
    rig.add(100, range(100, 110), 3)
    rig.step()
    assert sorted(rig.out) == ([1, 100] if starts else [1])


def test_equal_prompts_are_computed_once_with_two_steps_in_flight():
    """As the choices of one request are: the second step shares what the first one computes, before its result."""
    for page_size, shared in ((1, 99), (4, 99), (16, 96)):
        rig = Rig(pages=1000, page_size=page_size, max_batch_tokens=128, steps_in_flight=2)
        for rid in range(4):
            rig.add(rid, range(100), 3)
        rig.run()
        assert rig.cached == {0: 0, 1: shared, 2: shared, 3: shared}
        assert list(rig.out.values()) == [solo_output(list(range(100)), 3)] * 4


def scored(rig, rid, prompt):
    """A request for the log probabilities of its prompt, of which few tokens are computed in a step."""
    rig.take(rig.scheduler.handle(AddRequest(rid, ints(*prompt), 2, ints(), DrawParams(prompt_logprobs=0)), rig.now))


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "round-robin", "priority"])
def test_prompts_that_are_scored_leave_the_rest_of_the_step_to_others(policy, monkeypatch):
    monkeypatch.setattr("scheduler_proc.planner.SCORED_TOKENS", 8)
    rig = Rig(policy=policy, chunk_slowdown=0)
    scored(rig, 1, range(80))
    scored(rig, 2, range(100, 110))
    for rid in range(3, 6):
        rig.add(rid, [rid, *range(40)], 1)
    tokens = [len(rig.step().chunk_tokens) for _ in range(3)]
    assert tokens == [64, 64, 8 + 3 * 41 - 2 * 56] and sorted(rig.finish) == [3, 4, 5]
    rig.run()
    assert rig.out[2] == solo_output(list(range(100, 110)), 2)


def test_prompts_that_are_scored_start_as_they_are_scored(monkeypatch):
    monkeypatch.setattr("scheduler_proc.planner.SCORED_TOKENS", 8)
    rig = Rig(chunk_slowdown=0)
    scored(rig, 1, range(8))
    scored(rig, 2, range(100, 108))
    rig.add(3, range(200, 256))
    rig.add(4, range(300, 310))
    rig.scheduler.plan(rig.now)
    assert [one.rid for one in rig.scheduler.holders()] == [1, 3], "these two fill the step"


def test_a_prompt_that_is_scored_gets_on_one_token_at_a_time(monkeypatch):
    monkeypatch.setattr("scheduler_proc.planner.SCORED_TOKENS", 1)
    rig = Rig()
    scored(rig, 1, range(6))
    assert [len(plan.chunk_tokens) for plan in rig.run()][:6] == [1] * 6 and 1 in rig.finish


def test_what_one_prompt_leaves_to_be_scored_in_a_step_is_for_the_next(monkeypatch):
    monkeypatch.setattr("scheduler_proc.planner.SCORED_TOKENS", 8)
    rig = Rig()
    scored(rig, 1, range(12))
    scored(rig, 2, range(100, 120))
    assert [sorted(rig.step().chunk_lens) for _ in range(3)] == [[8], [4, 5], [8]], "the last token is not scored"


def test_nobody_waits_for_a_prefix_that_is_scored(monkeypatch):
    monkeypatch.setattr("scheduler_proc.planner.SCORED_TOKENS", 8)
    rig = Rig(chunk_slowdown=0)
    scored(rig, 1, range(80))
    rig.step()
    rig.add(2, [*range(80), 2], 1)
    rig.step()
    rig.step()
    assert rig.finish[2] == Finish.LENGTH
