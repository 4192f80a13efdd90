"""Under pressure: preemption, admission rules, deadlines, full queues."""

import pytest

from common.messages import ErrorCode
from scheduler_proc.admission import NewTokenRatio
from scheduler_proc.invariants import check
from tests.paper_worker import solo_output
from tests.rig import Rig


def pressed(policy="fcfs", **more):
    """Requests that fit one by one but not together, with an admission that hopes for the best."""
    rig = Rig(pages=8, page_size=2, admission="ratio", policy=policy, **more)
    rig.scheduler.planner.admission = NewTokenRatio(initial=0.0, least=0.0)
    return rig


@pytest.mark.parametrize("in_flight", [1, 2])
def test_preempted_requests_emit_exactly_what_they_would_have(in_flight):
    rig = pressed(steps_in_flight=in_flight)
    prompts = {rid: [rid, rid + 1, 3] for rid in range(5)}
    for rid, prompt in prompts.items():
        rig.add(rid, prompt, 12)
    rig.run()
    assert rig.scheduler.stats()["preempted"] > 0
    assert rig.out == {rid: solo_output(prompt, 12) for rid, prompt in prompts.items()}


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


def test_a_full_queue_learns_when_to_ask_again():
    rig = Rig(max_waiting=1, max_running=1)
    for rid in range(60):
        rig.now += 2 * 10**9
        rig.add(rid, [rid, 2], 2)
        rig.run()
    rig.add(100, [5], 2)
    assert 1.5 < rig.add(101, [5], 2)[0].retry_after_s < 2.5


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
