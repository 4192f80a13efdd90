"""The scheduler's rules one by one, with the paper worker in place of a model."""

from array import array
from dataclasses import replace
from itertools import product

import pytest

from common.logprobs import LogprobRows, Logprobs
from common.messages import Abort, AddRequest, ErrorCode, Finish, GetStats, StepResult, ints
from common.sampling_params import DrawParams, LogitEdits
from scheduler_proc.invariants import InvariantViolation, check
from scheduler_proc.request import TRANSITIONS, Event, IllegalTransition, Request, Status
from scheduler_proc.scheduler import ProtocolError
from scheduler_proc.step import Start
from tests.paper_worker import solo_output
from tests.rig import Rig


def test_only_the_transitions_of_the_table_are_legal():
    for status, event in product(Status, Event):
        request = Request(1, ints(1), 1, 1, frozenset(), DrawParams())
        request.status = status
        if (status, event) in TRANSITIONS:
            request.on(event)
            assert request.status is TRANSITIONS[status, event]
        else:
            with pytest.raises(IllegalTransition, match=f"{event.name} in {status.name}"):
                request.on(event)
    assert not any(status in (Status.FINISHED, Status.ABORTED) for status, _ in TRANSITIONS), "the ends are ends"


def test_decodes_and_a_prefill_chunk_share_one_step():
    rig = Rig()
    rig.add(1, range(10), 20)
    rig.step()
    rig.add(2, range(30, 60), 3)
    plan = rig.step()
    assert plan.decode[0] == 1 and list(plan.chunk_lens) == [8] and list(plan.chunk_samples) == [0]
    rig.run()
    assert rig.out[1] == solo_output(list(range(10)), 20)
    assert rig.out[2] == solo_output(list(range(30, 60)), 3)


def test_without_decodes_a_prompt_is_cut_only_at_the_budget():
    rig = Rig(max_batch_tokens=64, chunk_tokens=8)
    rig.add(1, range(100))
    assert list(rig.step().chunk_lens) == [64]
    assert list(rig.step().chunk_lens) == [36]


@pytest.mark.parametrize("chunk", [4, 16])
def test_the_budget_bounds_every_step(chunk):
    rig = Rig(max_batch_tokens=16, chunk_tokens=chunk)
    for rid in range(6):
        draw = DrawParams(prompt_logprobs=0 if rid % 2 else None)
        prompt = ints(*range(rid * 20, rid * 20 + 15))
        rig.take(rig.scheduler.handle(AddRequest(rid, prompt, 6, ints(), draw), rig.now))
    for plan in rig.run():
        tokens = len(plan.chunk_tokens) + sum(byte.bit_count() for byte in plan.decode)
        assert tokens <= 16 and all(plan.chunk_lens)
        if any(plan.decode):
            assert len(plan.chunk_tokens) <= chunk
    assert sorted(rig.finish) == list(range(6))


def test_no_more_prompts_start_than_fill_a_step():
    rig = Rig(max_batch_tokens=64)
    for rid in range(6):
        rig.add(rid, [rid] * 32)
    rig.step()
    assert sorted(rig.out) == [0, 1] and len(rig.scheduler.holders()) == 2
    long = Rig(max_batch_tokens=64, chunk_slowdown=0)
    for rid in range(3):
        long.add(rid, range(1000 * rid, 1000 * rid + 180), 1)
    running = []
    while 0 not in long.finish:
        long.step()
        running.append(len(long.scheduler.holders()))
    assert running == [1, 1, 1], "the second one with the rest of the first"


def test_what_requests_allow_counts_in_the_size_of_the_plan_that_they_enter_with(monkeypatch):
    monkeypatch.setattr("scheduler_proc.planner.MOST_ENTERING", 10)
    rig = Rig()
    edits = LogitEdits(allowed=ints(*range(5)), bad_words=(ints(1),))
    for rid in (1, 2):
        rig.scheduler.handle(AddRequest(rid, ints(rid), 1, ints(), DrawParams(edits=edits)), rig.now)
    assert [len(rig.step().enter_slots) for _ in range(2)] == [1, 1]


def test_a_running_prompt_is_shared_before_its_request_ends():
    rig = Rig(page_size=4)
    rig.add(1, range(16), 50)
    rig.step()
    rig.add(2, [*range(16), 99], 2)
    rig.step()
    assert rig.scheduler.stats()["cached_tokens"] == 16


def test_eos_and_length_end_requests():
    alone = solo_output([1, 2, 3], 20)
    rig = Rig()
    rig.add(1, [1, 2, 3], 20, stop=[alone[4]])
    rig.add(2, [1, 2, 3], 4)
    rig.run()
    assert rig.out[1] == alone[: alone.index(alone[4]) + 1] and rig.finish[1] is Finish.STOP
    assert rig.out[2] == alone[:4] and rig.finish[2] is Finish.LENGTH


def test_the_context_window_and_the_pool_cut_max_tokens():
    rig = Rig(context=10)
    rig.add(1, [1, 2, 3], 100)
    small = Rig(pages=2, page_size=4)
    small.add(1, [1, 2, 3], 100)
    rig.run(), small.run()
    assert len(rig.out[1]) == 7 and len(small.out[1]) == 5
    assert rig.finish[1] is small.finish[1] is Finish.LENGTH


@pytest.mark.parametrize(
    ("pages", "context", "prompt", "words", "limit"),
    [
        (100, 10, range(10), "context window holds 10", 10),
        (2, 100, range(8), "KV cache holds 8", 8),
        (2, 100, [], "empty", 1),
    ],
)
def test_what_can_never_fit_is_refused_at_once_with_the_limit(pages, context, prompt, words, limit):
    rig = Rig(pages=pages, context=context)
    (error,) = rig.add(1, prompt)
    assert words in error.problem and error.limit == limit and error.field == "prompt"
    assert not rig.scheduler.has_work
    rig.add(2, [1, 2], 2)
    rig.run()
    assert rig.out == {2: solo_output([1, 2], 2)}


def test_a_full_queue_answers_with_retry_after():
    rig = Rig(max_waiting=2)
    answers = [rig.add(rid, [rid, 1]) for rid in range(4)]
    assert answers[:2] == [[], []]
    assert [a[0].code for a in answers[2:]] == [ErrorCode.OVERLOADED] * 2
    assert answers[2][0].retry_after_s > 0 and answers[2][0].limit == 2


def test_a_request_id_in_use_is_refused_and_the_first_goes_on():
    rig = Rig()
    rig.add(1, [1, 2], 3)
    assert rig.add(1, [3, 4], 3)[0].code == ErrorCode.INTERNAL
    rig.run()
    assert rig.out[1] == solo_output([1, 2], 3)


def test_abort_in_every_state_answers_once_and_frees_everything():
    rig = Rig(max_running=1, pages=20, max_batch_tokens=16)
    rig.add(1, range(60), 5)  # four chunks: stays in PREFILLING after the first
    rig.add(2, [5, 6], 3)
    rig.abort(2)  # WAITING
    rig.step()
    rig.abort(1)  # PREFILLING
    rig.add(3, [7, 8, 9], 30)
    rig.step(), rig.step()
    rig.abort(3)  # DECODING
    assert rig.scheduler.handle(Abort(3), 1) == []
    check(rig.scheduler)
    assert rig.finish == {1: Finish.ABORT, 2: Finish.ABORT, 3: Finish.ABORT}
    rig.add(4, [7, 8, 9, 0, 1], 30)
    rig.step()
    rig.abort(4)
    assert rig.cached == {1: 0, 2: 0, 3: 0, 4: 3}
    stats = rig.scheduler.stats()
    assert stats["free_pages"] + stats["evictable_pages"] == 20 and stats["running"] == 0


def test_an_abort_while_a_step_is_in_flight_keeps_the_pages_until_it_returns():
    rig = Rig(page_size=1)
    rig.add(1, range(10), 9)
    plan = rig.scheduler.plan(0)
    rig.abort(1)
    check(rig.scheduler)
    assert rig.scheduler.stats()["locked_pages"] == 10 and rig.scheduler.has_work
    assert rig.scheduler.commit(rig.worker.execute(plan), 0) == [], "the token of an aborted request is for nobody"
    assert rig.scheduler.stats()["locked_pages"] == 0 and not rig.scheduler.has_work
    check(rig.scheduler)


def test_when_a_step_was_planned_is_known():
    rig = Rig(steps_in_flight=2)

    def planned():
        plan = rig.scheduler.plan(rig.now)
        return rig.scheduler.in_flight[-1].start, rig.worker.execute(plan)

    rig.add(1, range(5), 4)
    starts, results = zip(planned(), planned(), strict=True)
    for result in results:
        rig.take(rig.scheduler.commit(result, rig.now))
    for _ in range(2):
        start, result = planned()
        starts += (start,)
        rig.take(rig.scheduler.commit(result, rig.now))
    assert 1 in rig.finish and rig.scheduler.plan(rig.now) is None
    rig.add(2, range(5), 4)
    assert (*starts, planned()[0]) == (Start.IDLE, Start.AHEAD, Start.AFTER, Start.AFTER, Start.IDLE)


def test_two_steps_in_flight_discard_the_token_after_the_end():
    alone = solo_output([4, 4], 30)
    rig = Rig(steps_in_flight=2)
    rig.add(1, [4, 4], 30, stop=[alone[3]])
    first, second = rig.scheduler.plan(1), rig.scheduler.plan(1)
    assert first is not None and second is not None and rig.scheduler.plan(1) is None
    rig.take(rig.scheduler.commit(rig.worker.execute(first), 1))
    rig.take(rig.scheduler.commit(rig.worker.execute(second), 1))
    rig.run()
    assert rig.out[1] == alone[: alone.index(alone[3]) + 1]
    assert rig.scheduler.stats()["discarded_tokens"] == 1
    assert not rig.scheduler.has_work


@pytest.mark.parametrize("in_flight", [1, 2])
def test_tokens_that_were_sent_are_counted_and_no_others(in_flight):
    rig = Rig(steps_in_flight=in_flight)
    answers = {rid: solo_output([rid, 2, 3], 9) for rid in range(4)}
    for rid, answer in answers.items():
        rig.add(rid, [rid, 2, 3], 9, answer[4:5])
    rig.run()
    stats = rig.scheduler.stats()
    assert stats["output_tokens"] == sum(map(len, rig.out.values())) > 0
    assert (stats["discarded_tokens"] > 0) == (in_flight == 2)


def test_a_crowd_waits_for_pages_and_all_finish_as_if_alone():
    rig = Rig(pages=8, page_size=2)
    prompts = {rid: [rid % 3, rid % 2, rid] for rid in range(20)}
    for rid, prompt in prompts.items():
        rig.add(rid, prompt, 6)
    rig.run()
    assert rig.out == {rid: solo_output(prompt, 6) for rid, prompt in prompts.items()}
    assert rig.scheduler.stats()["evicted_pages"] > 0


def test_a_result_that_was_not_asked_for_is_a_protocol_error():
    rig = Rig()
    with pytest.raises(ProtocolError, match="was not awaited"):
        rig.scheduler.commit(StepResult(0, 0, "0", ints(), array("q")), 0)
    rig.add(1, [1, 2])
    plan = rig.scheduler.plan(0)
    with pytest.raises(ProtocolError, match="was not awaited"):
        rig.scheduler.commit(StepResult(plan.step_id + 1, 0, "0", ints(1), array("q")), 0)
    with pytest.raises(ProtocolError, match="1 rows, got 0 tokens"):
        rig.scheduler.commit(StepResult(plan.step_id, 0, "0", ints(), array("q")), 0)


def scores(row, count):
    """Those of so many tokens, in one row."""
    columns = ints(*[1] * count), array("f", [-1.0] * count), ints(*[1] * count), ints(*[0] * count)
    return LogprobRows.of({row: Logprobs(*columns, ints(), array("f"))})


@pytest.mark.parametrize(
    ("asked", "found", "words"),
    [
        ("logprobs", None, "of tokens 0 to 0 were asked for"),
        ("logprobs", scores(1, 1), "of tokens 0 to 0 were asked for"),
        ("logprobs", scores(0, 2), "one token have several entries"),
        ("prompt_logprobs", None, r"1 scorings were asked for, rows \[\] came"),
        ("prompt_logprobs", scores(0, 1), r"rows \[0\] came or have other lengths"),
        ("prompt_logprobs", scores(1, 2), r"rows \[1\] came or have other lengths"),
    ],
)
def test_scores_that_do_not_fit_are_a_protocol_error(asked, found, words):
    rig = Rig()
    rig.take(rig.scheduler.handle(AddRequest(1, ints(1, 2, 3), 5, ints(), DrawParams(**{asked: 0})), rig.now))
    result = rig.worker.execute(rig.scheduler.plan(rig.now))
    with pytest.raises(ProtocolError, match=words):
        rig.scheduler.commit(replace(result, **{asked: found}), rig.now)
    rig.take(rig.scheduler.commit(result, rig.now))


def test_scores_that_nobody_asked_for_are_a_protocol_error():
    rig = Rig()
    rig.add(1, [1, 2, 3])
    result = replace(rig.worker.execute(rig.scheduler.plan(rig.now)), logprobs=scores(0, 1))
    with pytest.raises(ProtocolError, match="of 0 tokens were asked for, those of 1 came"):
        rig.scheduler.commit(result, rig.now)


def test_stats_sum_to_the_total():
    rig = Rig()
    rig.add(1, range(20), 30)
    rig.step()
    (answer,) = rig.scheduler.handle(GetStats(7), 1)
    pages = {k: answer.values[f"scheduler.{k}_pages"] for k in ("free", "evictable", "locked", "held", "total")}
    assert answer.query == 7 and answer.values["scheduler.running"] == 1
    assert pages["free"] + pages["evictable"] + pages["locked"] + pages["held"] == pages["total"] == 100
    assert pages["locked"] == 5 and pages["held"] == 0


def test_a_steady_decode_of_256_requests_is_a_small_frame():
    rig = Rig(pages=4096, page_size=16, max_running=256, max_batch_tokens=4096, context=4096)
    for rid in range(256):
        rig.add(rid, [rid, *range(rid % 16)], 100)
    while rig.step().chunk_slots:
        pass
    rig.worker.largest_frame = 0
    for _ in range(20):
        rig.step()
    assert 0 < rig.worker.largest_frame < 400


def running_rig():
    rig = Rig()
    rig.add(1, range(20), 30)
    rig.step()
    check(rig.scheduler)
    return rig


def test_a_planted_leak_is_caught():
    rig = running_rig()
    rig.scheduler.kv.pool.allocate(1)
    with pytest.raises(InvariantViolation, match="has 0 owners, its reference count says 1"):
        check(rig.scheduler)


def test_a_planted_double_free_is_caught():
    rig = running_rig()
    rig.scheduler.kv.pool.release(rig.scheduler.requests[1].pages[:1])
    with pytest.raises(InvariantViolation, match="has 2 owners, its reference count says 1"):
        check(rig.scheduler)


def test_a_planted_lost_lock_is_caught():
    rig = running_rig()
    rig.scheduler.kv.tree.unlock(rig.scheduler.requests[1].node)
    with pytest.raises(InvariantViolation, match="0 locks, requests hold 1"):
        check(rig.scheduler)


def test_a_planted_overcommitment_is_caught():
    rig = Rig(admission="reserve")
    rig.add(1, range(20), 30)
    rig.step()
    rig.scheduler.requests[1].max_tokens = 10**4
    with pytest.raises(InvariantViolation, match="pages are promised"):
        check(rig.scheduler)


def test_the_first_token_tells_when_its_prompt_was_begun():
    rig = Rig(max_batch_tokens=8, pages=20)
    batches = []
    take, rig.take = rig.take, lambda messages: (batches.extend(messages), take(messages))
    rig.add(1, range(20), 3)
    while rig.step() is not None:
        rig.now += 1
    found = [(batch.rids[row], when) for batch in batches for row, when in batch.started.items()]
    assert found == [(1, 1)], "the step of the first chunk, once"
