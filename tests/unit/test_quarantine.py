"""A request that kills the workers is found, ends with an error, and takes nobody with it."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import POLICIES
from common.messages import AddRequest, ErrorCode, StepPlan, StepResult, ints
from common.sampling_params import DrawParams, Grammar
from scheduler_proc.invariants import check
from scheduler_proc.quarantine import MAX_ALL_LOSSES, MAX_LOSSES, REFUSED_NS, Quarantine
from scheduler_proc.request import Event, Request
from tests.examples import examples
from tests.paper_worker import PaperWorker, solo_output
from tests.rig import Rig

POISON = 999  # a token that no worker survives


class Died(Exception):
    pass


class MortalWorker(PaperWorker):
    """Dies when the poison is an input, and of requests whose `bad_lengths` a decode reaches."""

    def execute(self, plan: StepPlan) -> StepResult:
        if POISON in plan.chunk_tokens:
            raise Died
        result = super().execute(plan)
        for state in self.slots.values():
            if state.length in self.bad_lengths and self.read_first(state) == 41:
                raise Died
        return result

    bad_lengths: tuple[int, ...] = ()

    def read_first(self, state) -> int:
        return self.cells[state.pages[0], 0]


class PoisonRig(Rig):
    """Restarts its workers when they die, as the launcher does."""

    def __init__(self, bad_lengths=(), **config):
        super().__init__(**config)
        self.bad_lengths = bad_lengths
        self.deaths = 0
        self.new_worker()

    def new_worker(self):
        self.restart_worker()
        self.worker = MortalWorker(self.worker.page_size)
        self.worker.bad_lengths = self.bad_lengths

    def lose(self, crashed=True):
        self.deaths += crashed
        self.new_worker()
        self.take(self.scheduler.reset(self.scheduler.epoch + 1, self.now, crashed=crashed))
        check(self.scheduler)

    def survive(self, steps=10_000):
        for _ in range(steps):
            self.now += 10**6
            try:
                if self.step() is None:
                    break
            except Died:
                self.lose()


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_culprit_is_found_in_two_losses_and_the_others_do_not_notice(in_flight: int, policy: str) -> None:
    rig = PoisonRig(steps_in_flight=in_flight, policy=policy, max_running=16, pages=200)
    prompts = {rid: [rid, 1, 2, POISON if rid == 7 else 3] for rid in range(12)}
    for rid, prompt in prompts.items():
        rig.add(rid, prompt, 8)
    rig.survive()
    error = rig.errors.pop(7)
    assert error.code == ErrorCode.INTERNAL and "died again and again" in error.problem and not rig.errors
    assert rig.deaths == MAX_LOSSES
    assert rig.out == {rid: solo_output(prompt, 8) for rid, prompt in prompts.items() if rid != 7}
    stats = rig.scheduler.stats()
    assert stats["condemned"] == 1 and stats["suspects"] == stats["held_pages"] == 0


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_request_that_kills_late_in_its_answer_is_found(in_flight: int) -> None:
    rig = PoisonRig(bad_lengths=(14,), steps_in_flight=in_flight, max_running=16, pages=200)
    prompts = {rid: [40 + rid, 1, 2, 3] for rid in range(5)}
    for rid, prompt in prompts.items():
        rig.add(rid, prompt, 20)
    rig.survive()
    assert set(rig.errors) == {1} and rig.deaths == MAX_LOSSES
    shown = rig.out.pop(1)
    assert len(shown) == 10 and shown == solo_output(prompts[1], 10), "what could be computed was"
    assert rig.out == {rid: solo_output(prompt, 20) for rid, prompt in prompts.items() if rid != 1}


def test_what_a_culprit_asked_for_is_refused_for_a_while() -> None:
    rig = PoisonRig()
    rig.add(1, [1, POISON], 5)
    rig.survive()
    assert rig.deaths == 2 and set(rig.errors) == {1}
    (refusal,) = rig.add(2, [1, POISON], 50)
    assert refusal.code == ErrorCode.INTERNAL and rig.deaths == 2
    assert rig.add(3, [1, 2], 5) == []
    (refusal,) = rig.add(4, [1, POISON, 7], 5, generated=1, waited_ms=1)
    assert refusal.rid == 4, "a choice that is handed in again, too"
    rig.survive()
    assert rig.out[3] == solo_output([1, 2], 5)
    rig.now += REFUSED_NS
    assert rig.add(5, [1, POISON], 5) == [], "it may have been a coincidence"


def lose_in_a_step(rig: PoisonRig) -> None:
    rig.now += 1
    if not rig.scheduler.in_flight:
        assert rig.scheduler.plan(rig.now) is not None
    rig.lose()


def test_losses_from_outside_cost_a_lonely_request_nothing_while_it_gets_on() -> None:
    rig = PoisonRig()
    rig.add(1, [1, 2, 3], 30)
    starts = 0
    for _ in range(MAX_ALL_LOSSES - 1):
        for _ in range(4):
            starts += len(rig.step().enter_slots)
        lose_in_a_step(rig)
    assert starts == MAX_ALL_LOSSES - 1, "it makes room for nobody when it is no suspect any more"
    rig.survive()
    assert rig.scheduler.stats()["suspected"] == MAX_ALL_LOSSES - 1 and not rig.errors
    assert rig.out == {1: solo_output([1, 2, 3], 30)}


def test_a_request_that_kills_at_one_place_after_another_is_found() -> None:
    rig = PoisonRig()
    rig.add(1, [1, 2, 3], 60)
    for _ in range(MAX_ALL_LOSSES):
        for _ in range(4):
            rig.step()
        lose_in_a_step(rig)
    assert set(rig.errors) == {1} and rig.out[1] == solo_output([1, 2, 3], 60)[: len(rig.out[1])]


def test_a_loss_from_outside_costs_nobody_the_answer() -> None:
    """Once in company and once more later: nobody was alone both times."""
    rig = PoisonRig(max_running=16, pages=200)
    for rid in range(6):
        rig.add(rid, [rid, 1, 2], 30)
    for _ in range(2):
        for _ in range(4):
            rig.step()
        lose_in_a_step(rig)
        while rig.scheduler.quarantine:
            rig.step()
    rig.survive()
    assert not rig.errors
    assert rig.out == {rid: solo_output([rid, 1, 2], 30) for rid in range(6)}


def test_workers_that_were_told_to_end_make_nobody_suspect() -> None:
    rig = PoisonRig()
    for rid in range(3):
        rig.add(rid, [rid, 1, 2], 30)
    for _ in range(4):
        rig.step()
        rig.lose(crashed=False)
        assert rig.scheduler.stats()["suspects"] == 0
    rig.survive()
    assert rig.out == {rid: solo_output([rid, 1, 2], 30) for rid in range(3)}


def test_suspects_run_alone_and_one_after_the_other() -> None:
    rig = PoisonRig(max_running=16, pages=200, steps_in_flight=2)
    for rid in range(5):
        rig.add(rid, [rid, 1, 2], 30)
    for _ in range(3):
        rig.step()
    rig.lose()
    rig.add(9, [9, 1, 2], 3)
    together = Counter[int]()
    while rig.scheduler.quarantine:
        together[len(rig.scheduler.holders())] += 1
        rig.step()
        assert 9 not in rig.out
    assert set(together) <= {0, 1}
    rig.survive()
    assert rig.out[9] == solo_output([9, 1, 2], 3)


def test_who_had_ended_before_the_loss_is_no_suspect() -> None:
    rig = PoisonRig()
    rig.add(1, [1, 2, 3], 30)
    rig.scheduler.plan(rig.now)
    rig.abort(1)
    rig.add(2, [4, 5], 5)
    rig.lose()
    assert not rig.scheduler.quarantine
    rig.survive()
    assert rig.out[2] == solo_output([4, 5], 5)


def test_suspects_may_leave() -> None:
    rig = PoisonRig()
    for rid in range(3):
        rig.add(rid, [rid, 1, 2], 30, deadline_ms=1 if rid == 1 else 0)
    rig.step()
    rig.lose()
    rig.abort(0)
    rig.now += 10**9
    rig.take(rig.scheduler.expire(rig.now))
    rig.survive()
    assert rig.errors[1].code == ErrorCode.DEADLINE and rig.out[2] == solo_output([2, 1, 2], 30)
    assert not rig.scheduler.quarantine and not rig.scheduler.has_work


def request(seq: int, prompt=(1, 2, 3), answer=(), **more) -> Request:
    tokens = ints(*prompt, *answer)
    draw = more.pop("draw", DrawParams())
    return Request(seq, tokens, len(prompt), 100, frozenset(), draw, seq=seq, **more)


def asks(prompt=(1, 2, 3), draw=DrawParams(), grammar=None) -> AddRequest:  # noqa: B008 - it is frozen
    return AddRequest(99, ints(*prompt), 100, ints(), draw, grammar=grammar)


def test_a_suspect_is_acquitted_past_all_that_was_planned_of_it() -> None:
    """What it died of may be in any step in flight, of which the last may have been the first to come to it."""
    quarantine, one = Quarantine(), request(1, answer=(4, 5))
    one.pending = 2
    assert quarantine.suspect([one], [one], 0) == [] and len(quarantine) == one.losses == 1
    one.pending = 0
    assert not quarantine.acquit(request(2))
    for token in (6, 7):
        one.tokens.append(token)
        assert not quarantine.acquit(one) and quarantine
    one.tokens.append(8)
    assert quarantine.acquit(one) and not quarantine and (one.losses, one.all_losses) == (0, 1)
    assert not quarantine.acquit(one), "it is none any more"


def test_suspects_are_tried_in_the_order_of_their_arrival() -> None:
    quarantine, both = Quarantine(), [request(seq) for seq in (2, 1)]
    assert quarantine.suspect(both, both, 0) == []
    assert quarantine.next() is both[1]
    both[1].on(Event.ADMIT)
    assert quarantine.next() is both[0]


def test_nobody_is_found_guilty_in_company_or_after_its_end() -> None:
    quarantine, both = Quarantine(), [request(seq) for seq in (1, 2)]
    for _ in range(MAX_ALL_LOSSES + 1):
        assert quarantine.suspect(both, both, 0) == []
    both[0].on(Event.ABORT)
    assert quarantine.suspect(both[:1], both, 0) == []
    assert quarantine.refusal(asks(), 0) is None


def condemn(quarantine: Quarantine, one: Request, now: int = 0) -> None:
    one.losses = MAX_LOSSES - 1
    assert quarantine.suspect([one], [one], now) == [one]


def test_what_a_culprit_asked_for_is_prompt_parameters_and_grammar_and_no_seed() -> None:
    quarantine, warm = Quarantine(), DrawParams(temperature=1.0, seed=5)
    grammar = Grammar("regex", "a+")
    condemn(quarantine, request(1, answer=(8, 9), draw=warm, grammar=grammar), 7)
    alike = asks(draw=replace(warm, seed=6), grammar=grammar)
    assert quarantine.refusal(alike, 7 + REFUSED_NS - 1) is not None
    assert quarantine.refusal(alike, 7 + REFUSED_NS) is None
    assert quarantine.refusal(asks((1, 2, 4), warm, grammar), 7) is None
    assert quarantine.refusal(asks(draw=replace(warm, temperature=0.5), grammar=grammar), 7) is None
    assert quarantine.refusal(asks(draw=warm), 7) is None


def test_the_oldest_culprit_is_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_proc.quarantine.MAX_REFUSED", 2)
    quarantine = Quarantine()
    for seq in (1, 2, 3):
        condemn(quarantine, request(seq, (seq,)))
    assert [quarantine.refusal(asks((seq,)), 0) is not None for seq in (1, 2, 3)] == [False, True, True]


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_any_mixture_of_innocents_and_culprits(data: st.DataObject) -> None:
    rig = PoisonRig(
        pages=data.draw(st.integers(12, 60)),
        page_size=data.draw(st.integers(1, 5)),
        context=40,
        steps_in_flight=data.draw(st.integers(1, 2)),
        policy=data.draw(st.sampled_from(POLICIES)),
        chunk_tokens=data.draw(st.integers(1, 8)),
        max_running=data.draw(st.integers(1, 8)),
    )
    prompts = data.draw(
        st.lists(
            st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(-6, 8)), min_size=1, max_size=10
        )
    )
    room = rig.scheduler.kv.pool.num_pages * rig.scheduler.kv.page_size
    asked = {}
    for rid, (prompt, at) in enumerate(prompts):
        poisoned = at >= 0
        asked[rid] = [*prompt[:at], POISON, *prompt[at:]] if poisoned else prompt
        rig.take(rig.add(rid, asked[rid], 12))
        rig.survive(data.draw(st.integers(0, 6)))
    rig.survive()
    bad = [rid for rid, prompt in asked.items() if POISON in prompt]
    assert set(rig.errors) == set(bad)
    assert rig.deaths <= MAX_LOSSES * len({tuple(asked[rid]) for rid in bad})
    for rid, prompt in asked.items():
        if rid not in bad:
            assert rig.out[rid] == solo_output(prompt, min(12, 40 - len(prompt), room - len(prompt)))
    assert not rig.scheduler.has_work and not rig.scheduler.quarantine
