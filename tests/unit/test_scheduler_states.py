"""Recurrent layers: who starts from which snapshot, who leaves one where, and that no state is ever a wrong one."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize, rule

from common.config import ADMISSIONS, POLICIES, SchedulerConfig
from common.messages import AddRequest, ints
from common.sampling_params import DrawParams
from scheduler_proc.invariants import InvariantViolation, check
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler
from tests.paper_worker import solo_output
from tests.rig import Rig
from tests.unit.test_scheduler_machine import SchedulerMachine, run_machine

SYSTEM = list(range(100, 122))  # five pages of four tokens, and two tokens
PROMPT = [*SYSTEM, *range(4)]  # whose last four tokens may get another form: it leaves a snapshot of five pages


class StatesMachine(SchedulerMachine):
    """Prompts that share beginnings, with few snapshots."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        tokens=st.integers(24, 90),
        snapshots=st.sampled_from([0, 1, 2, 3, 8]),
        running=st.integers(2, 5),
        budget=st.integers(9, 40),
        chunk=st.integers(1, 9),
        in_flight=st.integers(1, 2),
        prefix_cache=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from(POLICIES),
        admission=st.sampled_from(ADMISSIONS),
        gain=st.sampled_from([1, 4]),
    )
    def start(
        self, page_size, tokens, snapshots, running, budget, chunk, in_flight, prefix_cache, policy, admission, gain
    ):
        SchedulerMachine.start(
            self, page_size, max(3, tokens // page_size), running, budget, chunk, in_flight, prefix_cache, policy,
            admission, 0.0, gain, "off", 0, snapshots,
        )  # fmt: skip

    @rule(
        kinds=st.lists(st.integers(0, 11), min_size=1, max_size=5),
        length=st.integers(2, 18),
        max_tokens=st.integers(1, 14),
        steps=st.integers(1, 12),
    )
    def burst(self, kinds, length, max_tokens, steps):
        """Requests that come together; some begin alike, some are the same."""
        for kind in kinds:
            question = [7 + kind % 2] * (kind % 6) + [kind % 4]
            self.arrive([2 + kind // 6] * length + question, max_tokens, set(), "", 0, 0, DrawParams())
        self.hope()
        self.work(steps)

    @rule(
        which=st.integers(0, 9),
        dropped=st.sampled_from([0, 0, 0, 1, 5]),
        more=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        max_tokens=st.integers(1, 14),
        stop=st.sets(st.integers(0, 49), max_size=6),
        steps=st.integers(0, 12),
    )
    def go_on(self, which, dropped, more, max_tokens, stop, steps):
        """The next turn of a conversation, whose prompt may have less of the last one than there is."""
        ended = [rid for rid in self.ended if self.got[rid]][-10:]
        if ended:
            rid = ended[which % len(ended)]
            before = [*self.asked[rid].prompt, *self.got[rid]]
            self.arrive([*before[: len(before) - dropped], *more], max_tokens, stop, "", 0, 0, DrawParams())
            self.hope()
            self.work(steps)


def test_random_schedules_of_recurrent_models(request, monkeypatch):
    """As many runs as `--soak N` says, else 40. A state that is wrong, stale, missing or applied twice is noticed."""
    run_machine(StatesMachine, request.config.getoption("--soak") or 40, monkeypatch)


def talk(rig, rid, prompt, max_tokens=2, **more):
    """One request from its beginning to its end. Returns how many of its prompt's tokens were cached, and the lengths
    of which that left snapshots."""
    rig.add(rid, prompt, max_tokens, **more)
    plans = rig.run()
    assert rig.out[rid] == solo_output(list(prompt), max_tokens)
    return rig.cached[rid], prompt_saves(plans)


def prompt_saves(plans):
    """The lengths of which snapshots are taken, but for those of answers."""
    columns = [(plan, plan.state_saves[::3], plan.state_saves[1::3]) for plan in plans]
    return [n for plan, *both in columns for slot, n in zip(*both, strict=True) if slot in plan.chunk_slots]


def rig_of(snapshots, **options):
    return Rig(snapshots=snapshots, **{"in_batch_gain": 1} | options)


def test_the_third_request_starts_where_the_second_one_left_the_first():
    rig = rig_of(9)
    assert talk(rig, 0, [*SYSTEM, *[1] * 14]) == (0, [28])
    assert talk(rig, 1, [*SYSTEM, *[2] * 14]) == (0, [20, 28])
    assert talk(rig, 2, [*SYSTEM, *[3] * 14]) == (20, [28])
    stats = rig.scheduler.stats()
    assert [stats[f"{name}_snapshots"] for name in ("total", "used", "saved", "loaded")] == [9, 4, 4, 1]


@pytest.mark.parametrize("length", range(1, 14))
def test_the_same_prompt_again_computes_at_most_a_page_and_four_tokens_and_then_at_most_a_page(length):
    """The second one leaves a snapshot where its answer begins, as more requests may."""
    rig = rig_of(9)
    prompt, end, whole = list(range(length)), max(0, length - 5) // 4 * 4, (length - 1) // 4 * 4
    assert talk(rig, 0, prompt) == (0, [end] * (end > 0))
    assert talk(rig, 1, prompt) == (end, [whole] * (whole > end))
    assert talk(rig, 2, prompt) == (whole, [])


@pytest.mark.parametrize("length", range(60, 68))
@pytest.mark.parametrize("changed", range(5))
def test_the_next_turn_starts_near_the_end_of_a_prompt_whose_last_tokens_it_has_in_another_form(length, changed):
    """As templates do that put more before an answer that is to come than before one of earlier turns."""
    rig = rig_of(9)
    kept = list(range(length - changed))
    _, saves = talk(rig, 0, [*kept, *range(100, 100 + changed)], 12)
    cached, _ = talk(rig, 1, [*kept, *range(200, 220)])
    assert saves == [cached] and length - 8 <= cached


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_next_turn_of_a_conversation_starts_at_the_last_page_of_the_answer(in_flight):
    rig = rig_of(9, steps_in_flight=in_flight)
    prompt = SYSTEM
    for rid, answer in enumerate((9, 2, 1, 30)):
        rig.add(rid, prompt, answer)
        saves = [n for plan in rig.run() for n in plan.state_saves[1::3] if n > len(prompt)]
        computed = len(prompt) + answer - 1
        assert saves == list(range(len(prompt) // 4 * 4 + 4, computed + 1, 4)), "one that moves on"
        assert rig.out[rid] == solo_output(list(prompt), answer)
        last = saves[-1] if saves else (len(prompt) - 5) // 4 * 4
        prompt = [*prompt, *rig.out[rid], 1, 2, 3]
        rig.add(100 + rid, prompt, 1)
        rig.run()
        assert rig.cached[100 + rid] == last
        check(rig.scheduler)


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("end", ["stop", "abort", "preempt"])
def test_a_state_that_saw_what_is_not_in_the_answer_is_dropped(end, length):
    """With two steps in flight one more has been planned when a request ends."""
    rig = rig_of(9, steps_in_flight=2, chunk_tokens=64)
    prompt = [*SYSTEM[: 8 + length], 49]
    answer = solo_output(prompt, 20)
    stops = (next(token for i, token in enumerate(answer) if i > 3 and token not in answer[:i]),)
    rig.add(0, prompt, 20, stops if end == "stop" else ())
    if end == "stop":
        rig.run()
    else:
        for _ in range(6):
            rig.step()
    if end == "abort":
        rig.abort(0)
    elif end == "preempt":
        rig.scheduler.planner._preempt(rig.scheduler.requests[0])
    rig.run()
    known = [*prompt, *rig.out[0]]
    assert rig.out[0] == answer[: len(rig.out[0])]
    rig.add(1, [*known, 1, 2, 3], 5)
    rig.run()
    assert rig.out[1] == solo_output([*known, 1, 2, 3], 5)
    assert rig.cached[1] % 4 == 0 and rig.cached[1] >= len(prompt) // 4 * 4
    assert end != "stop" or rig.cached[1] == len(known) // 4 * 4


def test_an_answer_takes_no_snapshot_that_is_worth_anything():
    rig = rig_of(1)
    talk(rig, 0, PROMPT)
    talk(rig, 1, [7] * 5, 40)
    assert talk(rig, 2, PROMPT)[0] == 20


def test_a_conversation_needs_one_snapshot_beside_another_one():
    """The prompt of each turn takes the place of the turn before it, with all that this was worth."""
    rig = rig_of(3)
    talk(rig, 0, range(60))
    prompt, other = SYSTEM, 100
    for rid in range(1, 9):
        cached, _ = talk(rig, rid, prompt, 9)
        assert cached == (0 if rid == 1 else (len(prompt) - 8) // 4 * 4)
        prompt = [*prompt, *rig.out[rid], *range(7)]
    assert talk(rig, other, range(60))[0] == 52


def test_where_others_went_elsewhere_nothing_is_superseded():
    rig = rig_of(3)
    for rid in range(8):
        cached, _ = talk(rig, rid, [*SYSTEM, *[rid + 1] * 10])
        assert cached == (20 if rid > 1 else 0)


def test_an_aborted_answer_and_one_whose_grammar_fails_leave_no_snapshot_behind():
    rig = rig_of(2, steps_in_flight=2)
    for rid in range(6):
        rig.add(rid, [rid + 1] * 9, 30)
        for _ in range(4 + rid):
            rig.step()
        rig.abort(rid)
        rig.run()
        check(rig.scheduler)
    assert rig.scheduler.stats()["used_snapshots"] <= 2


def test_less_than_what_is_worth_waiting_for_is_not_worth_a_snapshot():
    rig = rig_of(9, in_batch_gain=8)
    assert talk(rig, 0, SYSTEM[:8]) == (0, [])
    assert talk(rig, 1, SYSTEM[:9]) == (0, [8])
    assert talk(rig, 2, [*SYSTEM[:9], *[1] * 7]) == (8, [])
    assert talk(rig, 3, [*SYSTEM[:9], *[1] * 8]) == (8, [16])


def test_pages_without_a_snapshot_are_computed_again_and_held_once():
    rig = rig_of(0)
    for rid in range(3):
        assert talk(rig, rid, [*SYSTEM, rid]) == (0, [])
    stats = rig.scheduler.stats()
    assert stats["evictable_pages"] == 6 + 2, "the tree took the later ones' pages, and freed its own"
    assert stats["saved_snapshots"] == stats["loaded_snapshots"] == 0


def test_what_another_one_uses_is_not_taken_from_it():
    """The second one cannot put what follows into the tree, so it leaves a snapshot of what is there already alone."""
    rig = rig_of(9)
    rig.add(0, [*SYSTEM, *[1] * 10], max_tokens=30)
    for _ in range(6):
        rig.step()
    rig.add(1, [*SYSTEM, *[2] * 10], max_tokens=3)
    plans = rig.run()
    assert prompt_saves(plans) == [20]
    assert talk(rig, 2, [*SYSTEM, *[3] * 14]) == (20, [28])
    for rid, last in ((0, 1), (1, 2)):
        assert rig.out[rid] == solo_output([*SYSTEM, *[last] * 10], len(rig.out[rid]))


def test_choices_of_one_prompt_wait_for_its_snapshot():
    rig = rig_of(9)
    for rid in range(4):
        rig.add(rid, SYSTEM, 3)
    plans = rig.run()
    assert [rig.cached[rid] for rid in range(4)] == [0, 20, 20, 20]
    assert sum(len(plan.chunk_tokens) for plan in plans) == 22 + 3 * 2
    assert len({tuple(tokens) for tokens in rig.out.values()}) == 1


def test_choices_share_their_prompt_beside_a_snapshot_that_is_worth_more():
    rig = rig_of(1)
    talk(rig, 0, list(range(60)))
    assert talk(rig, 1, SYSTEM) == (0, []), "one alone does not take its place"
    for rid in range(2, 5):
        rig.add(rid, [*SYSTEM, 1, 2, 3], 2)
    rig.run()
    assert [rig.cached[rid] for rid in range(2, 5)] == [0, 24, 24]


def test_a_burst_with_a_common_beginning_waits_for_a_snapshot_of_it():
    """The one at work had not been asked for one there."""
    rig = rig_of(9)
    prompts = [[*SYSTEM, *[rid] * 10] for rid in range(4)]
    for rid, prompt in enumerate(prompts):
        rig.add(rid, prompt, 3)
    rig.run()
    assert [rig.cached[rid] for rid in range(4)] == [0, 20, 20, 20]
    for rid, prompt in enumerate(prompts):
        assert rig.out[rid] == solo_output(prompt, 3)


def test_nobody_waits_for_a_snapshot_that_cannot_be_kept():
    """The second one computes beside the pages of the first one: what follows comes to the tree when it ends. The third
    one starts from the snapshot of what all have in common as soon as it is there, and leaves one for the last."""
    rig = rig_of(9, policy="round-robin")
    rig.add(0, [*SYSTEM, *[1] * 10], max_tokens=60)
    for _ in range(6):
        rig.step()
    for rid in range(1, 4):
        rig.add(rid, [*SYSTEM, *[2] * 10], max_tokens=3)
    plans = rig.run()
    assert [rig.cached[rid] for rid in range(1, 4)] == [0, 20, 28]
    after = {length: number + 1 for number, plan in enumerate(plans) for length in prompt_saves([plan])}
    enters = [number for number, plan in enumerate(plans) if plan.enter_slots]
    assert list(after) == [20, 24, 28] and enters[1:] == [after[20], after[28]]


def test_nobody_waits_where_no_snapshot_will_be():
    for options in ({"snapshots": 0}, {"snapshots": 9, "in_batch_gain": 32}):
        rig = rig_of(**options)
        for rid in range(3):
            rig.add(rid, [*SYSTEM, rid], 2)
        rig.run()
        assert [rig.cached[rid] for rid in range(3)] == [0, 0, 0]


def test_the_snapshot_that_was_used_longest_ago_gives_way():
    rig = rig_of(2, in_batch_gain=8)
    first, second, third = ([n] * 13 for n in (1, 2, 3))
    talk(rig, 0, first)
    talk(rig, 1, second)
    assert talk(rig, 2, first)[0] == 8
    talk(rig, 3, third)
    assert rig.scheduler.stats()["used_snapshots"] == 2
    assert talk(rig, 4, first)[0] == 8
    assert talk(rig, 5, second)[0] == 0


def test_two_requests_of_one_step_do_not_share_the_only_snapshot():
    rig = rig_of(1, chunk_tokens=64)
    for rid in range(2):
        rig.add(rid, [rid] * 13, 1)
    plans = rig.run()
    assert [len(plan.chunk_slots) for plan in plans] == [2]
    assert plans[0].state_saves[1::3] == ints(8)
    check(rig.scheduler)


def test_evicted_pages_take_their_snapshots_with_them():
    rig = rig_of(9)
    talk(rig, 0, PROMPT, 1)
    talk(rig, 1, [*SYSTEM[:10], *[1] * 9], 1)
    kv = rig.scheduler.kv
    assert sorted(kv.snapshots.owners()) == [0, 1, 2]
    kv.tree.evict(3)
    check(rig.scheduler)
    assert kv.snapshots.used == 2, "of twenty tokens there is none any more"
    kv.tree.evict(99)
    check(rig.scheduler)
    assert kv.snapshots.used == 0
    assert talk(rig, 2, PROMPT) == (0, [20])


def test_an_aborted_prompt_leaves_the_snapshots_that_were_planned():
    rig = rig_of(9, steps_in_flight=2, chunk_tokens=64)
    rig.add(0, PROMPT, 5)
    plan = rig.scheduler.plan(rig.now)
    rig.abort(0)
    rig.take(rig.scheduler.commit(rig.worker.execute(plan), rig.now))
    check(rig.scheduler)
    assert talk(rig, 1, PROMPT) == (20, [])


def test_lost_workers_take_all_snapshots_with_them():
    rig = rig_of(9)
    talk(rig, 0, SYSTEM)
    rig.add(1, [*SYSTEM, 1, 2, 3], 3)
    rig.step()
    rig.scheduler.reset(0, rig.now, crashed=False)
    rig.restart_worker()
    assert rig.scheduler.stats()["used_snapshots"] == 0
    rig.run()
    assert rig.out[1] == solo_output([*SYSTEM, 1, 2, 3], 3)
    assert talk(rig, 2, SYSTEM[:18]) == (0, [16])


def test_other_namespaces_have_other_snapshots():
    rig = rig_of(9)
    talk(rig, 0, SYSTEM)
    assert talk(rig, 1, PROMPT, salt="a") == (0, [20])
    assert talk(rig, 2, PROMPT, salt="a") == (20, [24])


def test_scoring_a_prompt_computes_all_of_it():
    rig = rig_of(9)
    talk(rig, 0, SYSTEM)
    rig.take(rig.scheduler.handle(AddRequest(1, ints(*SYSTEM), 2, ints(), DrawParams(prompt_logprobs=0)), rig.now))
    rig.run()
    assert rig.cached[1] == 0 and rig.out[1] == solo_output(SYSTEM, 2)
    assert talk(rig, 2, SYSTEM) == (20, [])


def test_a_preempted_request_goes_on_from_a_snapshot():
    rig = rig_of(9, pages=14, max_running=2, admission="ratio", chunk_tokens=64)
    rig.scheduler.admission.ratio = 0.0
    prompts = [[rid] * 13 for rid in range(2)]
    for rid, prompt in enumerate(prompts):
        rig.add(rid, prompt, 30)
    plans = rig.run()
    saves = prompt_saves(plans)
    loads = [plan.enter_lens[0] for plan in plans if plan.state_loads]
    assert rig.scheduler.stats()["preempted"] == len(loads) == 1
    assert saves[:2] == [8, 8] and saves[2:] > loads == [8], "and leaves another one at the end of what it had"
    for rid, prompt in enumerate(prompts):
        assert rig.out[rid] == solo_output(prompt, 30)


def test_what_does_not_go_with_states_is_refused():
    with pytest.raises(ValueError, match="host tier"):
        KVManager(8, 4, host_pages=1, recurrent=True)
    with pytest.raises(ValueError, match="guesses"):
        Scheduler(SchedulerConfig(speculation="ngram"), KVManager(8, 4, recurrent=True), 100)


def planted():
    rig = rig_of(3)
    talk(rig, 0, SYSTEM)
    return rig.scheduler, rig.scheduler.kv.snapshots, next(n for n in rig.scheduler.kv.tree.nodes() if n.states)


def test_a_planted_leak_of_a_snapshot_is_caught():
    scheduler, _, node = planted()
    node.states = None
    with pytest.raises(InvariantViolation, match="free or at a place"):
        check(scheduler)


def test_a_planted_snapshot_in_two_places_is_caught():
    scheduler, _, node = planted()
    node.states[1] = next(iter(node.states.values()))
    with pytest.raises(InvariantViolation, match="free or at a place"):
        check(scheduler)


def test_a_planted_snapshot_behind_the_last_page_is_caught():
    scheduler, _, node = planted()
    node.states = {len(node.pages): number for number in node.states.values()}
    with pytest.raises(InvariantViolation, match="end of a whole page"):
        check(scheduler)
