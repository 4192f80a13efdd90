"""The scheduler with guesses, right and wrong, behind the paper worker: tokens are those of no guesses."""

from array import array

import pytest

from common.messages import AddRequest, Finish, StepResult, ints
from common.sampling_params import DrawParams, Grammar, LogitEdits
from scheduler_proc.admission import NewTokenRatio
from scheduler_proc.residents import Residents
from scheduler_proc.scheduler import ProtocolError
from tests.paper_worker import solo_output
from tests.random_guesses import RandomGuesses, speculate
from tests.rig import Rig


class Oracle(RandomGuesses):
    """Guesses that are all right, and that nobody waits for beforehand."""

    def __init__(self, count: int):
        super().__init__(0, count)
        self._random.random = lambda: 0.5  # type: ignore[method-assign]  # neither skips a request nor spoils a token
        self._random.randint = lambda least, most: most  # type: ignore[method-assign]

    def better_wait(self, residents: Residents) -> bool:
        return False


def rig_with(count: int, **config) -> Rig:
    rig = Rig(**config)
    rig.scheduler.speculation = rig.scheduler.planner._speculation = Oracle(count)
    return rig


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_guesses_change_no_token(page_size, in_flight):
    rig = Rig(page_size=page_size, pages=400 // page_size, steps_in_flight=in_flight)
    speculate(rig.scheduler, 7)
    for rid in range(6):
        rig.add(rid, range(rid, rid + 9), 30 + rid)
    rig.run()
    stats = rig.scheduler.stats()
    for rid in range(6):
        assert rig.out[rid] == solo_output(list(range(rid, rid + 9)), 30 + rid)
    assert 0 < stats["accepted_tokens"] < stats["draft_tokens"] and stats["drafts"] > 20
    assert stats["steps"] < 60


def test_right_guesses_save_steps():
    rig = rig_with(4)
    rig.add(1, range(5), 21)
    plans = rig.run()
    assert rig.out[1] == solo_output(list(range(5)), 21)
    assert len(plans) == 5  # the prompt with its first token, then five at a time
    counts = rig.scheduler.stats()
    assert (counts["drafts"], counts["draft_tokens"], counts["accepted_tokens"]) == (4, 16, 16)
    assert list(plans[1].chunk_drafts) == [4] and list(plans[1].chunk_lens) == [5] and not any(plans[1].decode)


def test_a_step_without_prompts_is_told_from_those_with_them():
    rig = rig_with(4, max_batch_tokens=16, chunk_slowdown=0)
    kinds = []
    rig.add(1, range(20), 12)
    for more in (False, False, False, True, True, True):
        if more and 2 not in rig.scheduler.requests:
            rig.add(2, range(100, 120), 12)
        plan = rig.scheduler.plan(rig.now)
        kinds.append(rig.scheduler.in_flight[-1].shape.plain)
        rig.take(rig.scheduler.commit(rig.worker.execute(plan), rig.now))
    assert kinds == [False, False, True, False, False, False]


def test_a_request_never_has_more_guesses_than_tokens_left():
    rig = rig_with(9)
    rig.add(1, range(5), 8)
    plans = rig.run()
    assert [list(plan.chunk_drafts) for plan in plans] == [[], [6]]
    assert rig.finish[1] is Finish.LENGTH and len(rig.out[1]) == 8


def test_tokens_after_a_stop_token_are_for_nobody():
    alone = solo_output(list(range(5)), 20)
    stop = next(token for i, token in enumerate(alone) if i > 4 and token not in alone[:i])
    end = alone.index(stop) + 1
    rig = rig_with(9)
    rig.add(1, range(5), 20, stop=[stop])
    rig.run()
    assert rig.out[1] == alone[:end] and rig.finish[1] is Finish.STOP
    assert rig.scheduler.stats()["discarded_tokens"] == 11 - end
    # what is in the cache of them is what was answered, and no more
    assert rig.scheduler.kv.tree.peek(ints(*range(5), *alone).tobytes(), 25) <= 5 + end


def test_an_abort_while_guesses_are_in_flight_gives_everything_back():
    rig = rig_with(4)
    rig.add(1, range(5), 20)
    rig.step()
    plan = rig.scheduler.plan(1)
    assert list(plan.chunk_drafts) == [4]
    rig.abort(1)
    rig.take(rig.scheduler.commit(rig.worker.execute(plan), 1))
    stats = rig.scheduler.stats()
    assert stats["held_pages"] == stats["locked_pages"] == 0 and not rig.scheduler.has_work
    assert stats["discarded_tokens"] == 5


def test_guesses_take_no_page_from_a_decode():
    """Pages of one token, which are not reserved: four are free, of which each of two decodes needs one."""
    rig = rig_with(4, pages=10, page_size=1, context=10)
    rig.scheduler.planner.admission = NewTokenRatio(initial=0.0, least=0.0)
    rig.add(1, [1, 2, 3], 7)
    rig.add(2, [4, 5, 6], 3)
    rig.step()
    plan = rig.step()
    assert list(plan.chunk_slots) == [1] and list(plan.chunk_drafts) == [1], "four find no room, one does"
    rig.run()
    assert rig.out == {1: solo_output([1, 2, 3], 7), 2: solo_output([4, 5, 6], 3)}
    assert rig.scheduler.stats()["preempted"] == 0


@pytest.mark.parametrize(
    "more",
    [{"draw": DrawParams(edits=LogitEdits(presence_penalty=0.5))}, {"grammar": Grammar("regex", "")}],
)
def test_requests_that_follow_single_tokens_have_no_guesses(more):
    rig = rig_with(4)
    message = AddRequest(1, ints(1, 2), 9, ints(), more.get("draw", DrawParams()), grammar=more.get("grammar"))
    rig.scheduler.handle(message, 1)
    plans = rig.run()
    assert rig.out[1] == solo_output([1, 2], 9)
    assert not any(any(plan.chunk_drafts) for plan in plans)


@pytest.mark.parametrize(
    ("tokens", "accepted", "words"),
    [
        ([1], [], r"\[4\] guesses were to be verified, \[\] were right"),
        ([1] * 6, [5], r"\[4\] guesses were to be verified, \[5\] were right"),
        ([1, 2], [2], "1 rows, got 2 tokens, 2 of them right guesses"),
        ([1, 2, 3, 4], [2], "1 rows, got 4 tokens, 2 of them right guesses"),
    ],
)
def test_a_verdict_that_does_not_fit_is_a_protocol_error(tokens, accepted, words):
    rig = rig_with(4)
    rig.add(1, range(5), 20)
    rig.step()
    plan = rig.scheduler.plan(1)
    result = StepResult(plan.step_id, 0, "0", ints(*tokens), array("q"), accepted=ints(*accepted))
    with pytest.raises(ProtocolError, match=words):
        rig.scheduler.commit(result, 1)


def test_what_follows_guesses_waits_for_them():
    rig = rig_with(4, steps_in_flight=2)
    rig.add(1, range(5), 20)
    first = rig.scheduler.plan(1)
    rig.take(rig.scheduler.commit(rig.worker.execute(first), 1))
    guessed = rig.scheduler.plan(1)
    rig.add(2, range(30, 40), 3)
    assert list(guessed.chunk_drafts) == [4]
    assert rig.scheduler.plan(1) is None
    rig.take(rig.scheduler.commit(rig.worker.execute(guessed), 1))
    both = rig.scheduler.plan(1)
    assert list(both.chunk_slots) == [0, 1]


def test_a_loss_of_the_workers_while_guesses_are_in_flight():
    rig = rig_with(4)
    rig.add(1, range(5), 20)
    rig.step()
    rig.scheduler.plan(1)
    assert rig.scheduler.reset(1, rig.now, crashed=True) == []
    rig.restart_worker()
    rig.run()
    assert rig.out[1] == solo_output(list(range(5)), 20)


def test_guesses_leave_prompts_their_part_of_a_step():
    rig = rig_with(30, max_batch_tokens=32, chunk_tokens=32, context=2000, pages=2000)
    for rid in range(4):
        rig.add(rid, range(rid, rid + 5), 900)
    while len(rig.out) < 4:
        rig.step()
    plan = rig.step()
    assert sum(plan.chunk_drafts) == 32 - 4, "without prompts, all of it"
    rig.add(4, range(200, 240), 1)
    steps = 0
    while 4 not in rig.out:
        plan = rig.step()
        steps += 1
        assert sum(plan.chunk_drafts) == (32 - 4) // 2 and len(plan.chunk_tokens) <= 32
    assert steps <= 4 and rig.out[4] == solo_output(list(range(200, 240)), 1)
