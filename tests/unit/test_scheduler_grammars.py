"""Grammars on their way through the scheduler. The paper worker checks that they see exactly the answer so far."""

import pytest

from common.codec import MAX_FRAME_BYTES, encode
from common.messages import ErrorCode, Finish
from common.sampling_params import MAX_GRAMMAR_CHARS, Grammar
from scheduler_proc.admission import NewTokenRatio
from tests.paper_worker import solo_output
from tests.rig import Rig

FOLLOWED = Grammar("lark")


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_grammar_sees_the_answer_so_far_after_preemption(in_flight: int) -> None:
    rig = Rig(pages=8, page_size=2, admission="ratio", steps_in_flight=in_flight)
    rig.scheduler.planner.admission = NewTokenRatio(initial=0.0, least=0.0)
    prompts = {rid: [rid, rid + 1, 3] for rid in range(5)}
    for rid, prompt in prompts.items():
        rig.add(rid, prompt, 12, grammar=FOLLOWED if rid != 2 else None, ignore_eos=rid == 1)
    plans = rig.run()
    assert rig.scheduler.stats()["preempted"] > 0
    assert rig.out == {rid: solo_output(prompt, 12) for rid, prompt in prompts.items()}
    entered = [entered for plan in plans for entered in plan.enter_grammars]
    assert any(entered.generated for entered in entered), "one enters again"
    assert sum(len(plan.enter_slots) for plan in plans) > len(entered), "and the one without a grammar has none"


def test_a_resumed_grammar_sees_what_the_client_has_already() -> None:
    """As after a loss: the end of the prompt is output, and only what comes after it is sent."""
    whole, rig = solo_output([1, 5], 9), Rig()
    rig.add(1, [1, 5, *whole[:4]], 9, grammar=FOLLOWED, generated=4, waited_ms=1)
    (first,) = [plan for plan in rig.run() if plan.enter_grammars]
    assert first.enter_grammars[0].generated.tolist() == whole[:4]
    assert rig.out[1] == whole[4:]


def test_a_loss_of_the_workers_starts_grammars_again() -> None:
    rig = Rig()
    rig.add(1, [1, 5], 9, grammar=FOLLOWED)
    for _ in range(4):
        rig.step()
    had = len(rig.out[1])
    assert had
    rig.scheduler.reset(1, rig.now, crashed=False)
    rig.restart_worker()
    (plan,) = [plan for plan in rig.run() if plan.enter_grammars]
    assert plan.enter_grammars[0].generated.tolist() == solo_output([1, 5], 9)[:had]
    assert rig.out[1] == solo_output([1, 5], 9)


def test_chunks_and_shared_prefixes_change_nothing_for_a_grammar() -> None:
    rig = Rig(chunk_tokens=4, max_batch_tokens=16)
    for rid in range(4):
        rig.add(rid, [*range(30), rid % 2], 9, grammar=FOLLOWED)
    rig.run()
    assert rig.out == {rid: solo_output([*range(30), rid % 2], 9) for rid in range(4)}


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("after", [1, 4])
def test_a_failed_grammar_ends_its_request_alone(in_flight: int, after: int) -> None:
    rig = Rig(steps_in_flight=in_flight)
    for rid in range(3):
        rig.add(rid, [rid, 5], 10, grammar=Grammar("lark", str(after)) if rid == 1 else FOLLOWED)
    rig.run()
    error = rig.errors.pop(1)
    assert (error.code, error.problem, error.field) == (ErrorCode.INVALID, "a reason", "params.grammar")
    assert not rig.errors and sorted(rig.finish) == [0, 2]
    assert rig.out.get(1, []) == solo_output([1, 5], 10)[: after - 1], "the failed token is not shown"
    for rid in (0, 2):
        assert rig.out[rid] == solo_output([rid, 5], 10)
    stats = rig.scheduler.stats()
    assert stats["failed"] == 1 and stats["held_pages"] == stats["running"] == 0


def test_a_token_that_ends_the_answer_is_not_drawn_under_a_failure() -> None:
    """The row of a request that has ended meanwhile is discarded, failed or not."""
    alone = solo_output([1, 5], 10)
    rig = Rig(steps_in_flight=2)
    rig.add(1, [1, 5], 10, stop=[alone[2]], grammar=Grammar("lark", str(alone.index(alone[2]) + 2)))
    rig.run()
    assert rig.finish[1] is Finish.STOP and not rig.errors


def test_a_plan_with_many_large_grammars_fits_in_a_frame() -> None:
    largest = Grammar("lark", " " * (MAX_GRAMMAR_CHARS - 2) + "-1")
    rig = Rig(pages=1000, max_running=64, max_batch_tokens=256)
    for rid in range(64):
        rig.add(rid, [rid, 1], 3, grammar=largest)
    plans = rig.run()
    assert max(len(encode(plan)) for plan in plans) < MAX_FRAME_BYTES / 4
    assert sorted(rig.finish) == list(range(64))
