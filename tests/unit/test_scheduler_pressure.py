"""Under pressure: preemption, admission rules, deadlines, full queues."""

from array import array

import pytest

from common.codec import decode, encode
from common.config import SchedulerConfig
from common.messages import AddRequest, ErrorCode, StepPlan, StepResult, ints
from common.sampling_params import DrawParams
from scheduler_proc.admission import NewTokenRatio
from scheduler_proc.invariants import check
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.request import Request
from scheduler_proc.scheduler import Scheduler
from tests.paper_worker import solo_output
from tests.rig import Rig


def pressed(policy="fcfs", **more):
    """Requests that fit one by one but not together, with an admission that hopes for the best."""
    rig = Rig(pages=8, page_size=2, admission="ratio", policy=policy, **more)
    rig.scheduler.planner.admission = NewTokenRatio(initial=0.0, least=0.0)
    return rig


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_requests_emit_exactly_what_they_would_have(in_flight, prefix_cache):
    rig = pressed(steps_in_flight=in_flight)
    rig.scheduler.kv.prefix_cache = prefix_cache
    prompts = {rid: [rid, rid + 1, 3] for rid in range(5)}
    for rid, prompt in prompts.items():
        rig.add(rid, prompt, 12)
    rig.run()
    stats = rig.scheduler.stats()
    assert stats["preempted"] > 0 and stats["prompt_tokens"] == 5 * 3, "counted once"
    assert rig.out == {rid: solo_output(prompt, 12) for rid, prompt in prompts.items()}


def test_the_ratio_falls_with_each_step_unless_somebody_is_preempted_for_it():
    rig = pressed()
    rule = rig.scheduler.planner.admission = NewTokenRatio(initial=0.2, least=0.0, steps_to_least=20)
    for rid in range(4):
        rig.add(rid, [rid, 1, 2], 12)
    while rig.scheduler.has_work:
        before, preempted = rule.ratio, rig.scheduler.stats()["preempted"]
        rig.step()
        gave_way = rig.scheduler.stats()["preempted"] > preempted
        assert rule.ratio == pytest.approx(1.0 if gave_way else max(0.0, before - 0.01))
    before = rule.ratio
    assert rig.scheduler.stats()["preempted"] > 0 and rig.step() is None and rule.ratio == before


def test_a_prompt_that_is_half_computed_gives_way_and_starts_again():
    rig = pressed(chunk_tokens=1, chunk_slowdown=0)
    prompts = {0: [1, 2, 3], 1: [*range(10, 19)]}
    rig.add(0, prompts[0], 12)
    rig.step()
    rig.add(1, prompts[1], 3)
    victim = rig.scheduler.requests[1]
    while not victim.preemptions:
        assert victim.generated == 0
        rig.step()
    rig.run()
    assert rig.out == {rid: solo_output(prompts[rid], 12 if rid == 0 else 3) for rid in prompts}


class Unteachable(NewTokenRatio):
    """Hopes for the best whatever happens."""

    def after_preemption(self, running):
        pass


def test_nobody_is_admitted_in_a_step_that_preempts():
    rig = pressed()
    rig.scheduler.planner.admission = Unteachable(initial=0.0, least=0.0)
    for rid in range(6):
        rig.add(rid, [rid, 1, 2], 12)
    while rig.scheduler.has_work:
        before = rig.scheduler.stats()["preempted"]
        plan = rig.step()
        assert rig.scheduler.stats()["preempted"] == before or not plan.enter_slots
    assert before > 0


def test_nothing_is_reserved_for_who_has_ended_though_a_step_has_it_still():
    rig = Rig(pages=20, page_size=1, context=20, admission="reserve", steps_in_flight=2)
    rig.add(1, [1, 2], 15)
    rig.add(2, [3, 4], 10)
    assert list(rig.scheduler.plan(rig.now).enter_lens) == [0], "not both"
    rig.abort(1)
    assert list(rig.scheduler.plan(rig.now).enter_slots) == [1]


def test_the_newest_is_preempted_first_and_the_oldest_never():
    rig = pressed()
    for rid in range(4):
        rig.add(rid, [rid, 1, 2], 12)
    requests = dict(rig.scheduler.requests)
    rig.run()
    counts = [requests[rid].preemptions for rid in range(4)]
    assert counts[0] == 0 and sum(counts) > 0
    assert list(rig.finish) == [0, 1, 2, 3]


def test_high_priority_keeps_its_pages_and_goes_first():
    rig = pressed(policy="priority", max_running=3)
    for rid in range(3):
        rig.add(rid, [rid, 1, 2], 12)
    rig.add(9, [9, 1, 2], 12, priority=5)
    requests = dict(rig.scheduler.requests)
    rig.run()
    assert next(iter(rig.finish)) == 9 and requests[9].preemptions == 0


@pytest.mark.soak
@pytest.mark.parametrize("admission", ["ratio", "peak", "reserve"])
def test_32_pages_and_64_requests_that_fit_one_by_one_all_finish_as_if_alone(admission):
    rig = Rig(pages=32, page_size=4, context=128, max_running=64, max_batch_tokens=64, admission=admission)
    prompts = {rid: [(rid * k) % 7 for k in range(1, 9 + rid % 30)] for rid in range(64)}
    for rid, prompt in prompts.items():
        rig.add(rid, prompt, 128 - len(prompt))
    rig.run()
    assert rig.out == {rid: solo_output(prompt, 128 - len(prompt)) for rid, prompt in prompts.items()}


def test_a_deadline_ends_a_request_wherever_it_is():
    rig = Rig(max_running=1)
    rig.now = 7 * 10**9
    rig.add(1, range(20), 30, deadline_ms=10)
    rig.add(2, [5, 6], 3, deadline_ms=10)
    rig.add(3, [7, 8], 3, deadline_ms=10**6)
    rig.step()
    assert rig.scheduler.expire(rig.now) == []
    rig.now = rig.scheduler.next_deadline
    errors = rig.scheduler.expire(rig.now)
    assert [(e.rid, e.code, e.limit) for e in errors] == [(1, ErrorCode.DEADLINE, 10), (2, ErrorCode.DEADLINE, 10)]
    check(rig.scheduler)
    rig.run()
    assert rig.out[3] == solo_output([7, 8], 3) and 2 not in rig.out


def test_a_request_that_comes_again_has_the_deadline_that_it_comes_with():
    rig = Rig()
    rig.add(1, [1, 2], 3, deadline_ms=10)
    rig.abort(1)
    rig.add(1, [1, 2], 3, deadline_ms=1000)
    rig.now += 20 * 10**6
    assert rig.scheduler.expire(rig.now) == [] and 1 in rig.scheduler.requests


def test_a_full_queue_learns_when_to_ask_again():
    rig = Rig(max_waiting=2, max_running=1)
    for rid in range(0, 60, 2):
        rig.now += 8 * 3600 * 10**9  # with nothing to do, which is not what a request takes
        rig.add(rid, [rid, 2], 2)
        while rig.scheduler.has_work:
            rig.now += 10**9
            rig.step()
            if rid in rig.scheduler.requests:
                rig.add(rid + 1, [rid, 3], 2)
    rig.add(100, [5], 2)
    rig.add(101, [5], 2)
    assert rig.add(102, [5], 2)[0].retry_after_s == pytest.approx(4.0, rel=0.05), "each of the two takes two steps"
    assert rig.add(103, range(300), 2)[0].code == ErrorCode.TOO_LONG, "to ask again would not help"


def test_no_more_are_preempted_than_pages_are_missing():
    """With steps in flight a victim's pages come back later; that is no reason to preempt the next one."""
    rig = pressed(steps_in_flight=2)
    rig.scheduler.kv.prefix_cache = False
    for rid, length in enumerate((2, 2, 4, 7)):  # their pages end at different steps
        rig.add(rid, [rid] + [1] * (length - 1), 14)
    worst = 0
    while rig.scheduler.has_work:
        before = rig.scheduler.stats()["preempted"]
        rig.step()
        worst = max(worst, rig.scheduler.stats()["preempted"] - before)
    assert rig.scheduler.stats()["preempted"] > 0 and worst == 1


def test_what_a_victim_alone_has_locked_comes_back_with_it():
    """Its prompt's pages, which it has published, count as well as those of its answer."""
    preempted = []
    for in_flight in (1, 2):
        rig = Rig(18, 16, 400, max_batch_tokens=512, chunk_tokens=512, steps_in_flight=in_flight)
        rig.scheduler.planner.admission = NewTokenRatio(initial=0.1, least=0.1)
        for rid in range(8):
            rig.add(rid, [rid] * 32, 20)
        for _ in range(4):
            rig.step()
        preempted.append(rig.scheduler.stats()["preempted"])
        rig.run()
        assert all(rig.out[rid] == solo_output([rid] * 32, 20) for rid in range(8))
    assert preempted == [2, 2]


def test_deadlines_of_requests_that_have_ended_are_forgotten():
    rig = Rig()
    rig.add(1, [1, 2, 3], 5, deadline_ms=3_700_000)
    rig.add(2, [1, 2, 3], 5, deadline_ms=3_600_000)
    rig.add(3, [1, 2, 3], 5)
    for rid in range(10, 300):
        rig.add(rid, [1, 2, 3], 1, deadline_ms=3_500_000)
        rig.abort(rid)
        assert rig.scheduler.next_deadline <= rig.now + 3_600_000 * 10**6
    assert len(rig.scheduler._deadlines) < 100
    rig.now += 3_600_000 * 10**6
    assert rig.scheduler.next_deadline <= rig.now
    assert [e.rid for e in rig.scheduler.expire(rig.now)] == [2] and set(rig.scheduler.requests) == {1, 3}
    assert rig.scheduler.next_deadline == rig.now + 100_000 * 10**6


def test_a_plan_for_many_answers_to_a_long_prompt_fits_its_message():
    scheduler = Scheduler(SchedulerConfig(), KVManager(200_000, 1), 131_072)
    prompt = ints(*range(70_000))
    for rid in range(64):
        scheduler.handle(AddRequest(rid, prompt, 2, ints(), DrawParams(seed=rid)), 1)
    finished = 0
    while (plan := scheduler.plan(1)) is not None:
        assert decode(encode(plan), {StepPlan}) == plan
        sampled = sum(plan.chunk_samples) + int.from_bytes(plan.decode, "little").bit_count()
        for batch in scheduler.commit(StepResult(plan.step_id, 0, "0", ints(*[1] * sampled), array("q")), 1):
            finished += sum(map(bool, batch.finish))
    assert finished == 64


def test_lost_workers_do_not_make_anybody_wait_in_the_queue_again():
    rig = Rig()
    for rid in range(4):
        rig.add(rid, [rid] * 8, 50)
    rig.step()
    rig.now += 60 * 10**9
    rig.scheduler.reset(1, rig.now, crashed=False)
    plan = rig.scheduler.plan(rig.now)
    assert (plan.step_id, plan.epoch) == (0, 1)
    waits = rig.scheduler.measures.flat()
    assert sum(count for name, count in waits.items() if name.startswith("scheduler.queue/")) == 4


@pytest.mark.parametrize("admission", ["ratio", "peak", "reserve"])
def test_a_burst_is_admitted_without_a_look_at_everybody_for_each(admission, monkeypatch):
    looks = 0

    def counted(asked):
        def look(request):
            nonlocal looks
            looks += 1
            return asked(request)

        return property(look)

    for name in ("remaining", "kv_len_at_end", "is_running"):
        monkeypatch.setattr(Request, name, counted(getattr(Request, name).fget))
    rig = Rig(1000, 4, max_running=256, max_batch_tokens=1024, chunk_slowdown=0, admission=admission)
    for rid in range(256):
        rig.add(rid, [rid], 4)
    rig.scheduler.plan(rig.now)
    assert len(rig.scheduler.holders()) == 256 and looks < 10 * 256
