"""The simulator: closed forms, conservation, and determinism."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_proc.cost_model import LinearCost, Overheads, StepWork
from scheduler_proc.simulator import configure, simulate
from scheduler_proc.workload import KINDS, Lengths, Recipe, Session, Text, Turn, Workload, generate
from tests.unit.simulator_runs import COST, SMALL, VOCABULARY, fixed, one_request, run


def work(tokens, chunks, context, pairs):
    return StepWork(tokens, 1, chunks, 1, context, pairs, 0 if chunks else context)


def alone_ns(prompt, output):
    """Prefill, then a step for every further token, each of which reads what is there and itself."""
    steps = [work(prompt, 1, prompt, prompt * (prompt + 1) // 2)]
    steps += [work(1, 0, prompt + i, prompt + i) for i in range(1, output)]
    return [round(COST.seconds(step) * 1e9) for step in steps]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_one_request_alone_takes_its_prefill_and_its_decodes(in_flight):
    report = run(one_request(100, 20), steps_in_flight=in_flight)
    steps = alone_ns(100, 20)
    assert report.steps == 20
    assert report.report.ttft_s.p50 == pytest.approx(steps[0] / 1e9, abs=1e-15)
    assert report.report.e2e_s.p50 == pytest.approx(sum(steps) / 1e9, abs=1e-15)
    assert report.worker_busy == pytest.approx(1.0)


def test_overheads_add_up_one_step_in_flight():
    ways = Overheads(1e-3, 2e-3, 40e-3, 3e-3, 4e-3, 5e-3, 6e-3)
    steps = alone_ns(50, 3)
    report = run(one_request(50, 3), overheads=ways, steps_in_flight=1).report
    first = 1e-3 + 2e-3 + 3e-3 + 5e-3 + 6e-3  # submit, plan, result, deliver and its one row
    assert report.ttft_s.p50 == pytest.approx(first + steps[0] / 1e9)
    # then each step's plan leaves after the result and the commit of the one before, or when the worker has turned
    # around, whichever is later: here that is the turnaround
    assert report.e2e_s.p50 == pytest.approx(first + sum(steps) / 1e9 + 2 * 40e-3)


def test_two_steps_in_flight_hide_the_way_to_the_scheduler():
    ways = Overheads(plan_s=0.4e-3, result_s=0.3e-3, commit_s=0.2e-3)
    hidden = run(one_request(50, 100), overheads=ways, steps_in_flight=2).report.itl_s
    shown = run(one_request(50, 100), overheads=ways, steps_in_flight=1).report.itl_s
    assert shown.mean - hidden.mean == pytest.approx(0.9e-3, rel=0.02)


def test_a_request_beside_a_running_one_takes_longer_to_come_and_lengthens_the_step():
    """Steps of 10 ms. The second request is sent at 15 ms, is at the scheduler 2 ms later instead of 1, and is in the
    step that is planned when the second result is there, at 20 ms; that step takes 3 ms more."""
    ways = Overheads(submit_s=1e-3, submit_busy_s=1e-3, arrival_s=3e-3)
    first, second = Turn((Text(0, 20),), 9, 9), Turn((Text(1, 20),), 1, 1, 0.0, 15e-3)
    workload = Workload((Session((first,)), Session((second,))))
    report = run(workload, LinearCost(base_s=10e-3), overheads=ways, steps_in_flight=1).report
    assert report.queueing_s.p99 == pytest.approx(4e-3, rel=0.02)  # from 17 to 21 ms, the first one's submission first
    assert report.duration_s == pytest.approx(1e-3 + 9 * 10e-3 + 3e-3)
    assert report.ttft_s.p50 * 2 == pytest.approx((1e-3 + 10e-3) + (31e-3 + 3e-3 - 15e-3))


def test_the_parts_of_a_ttft_are_the_ways_and_the_step():
    ways = Overheads(1e-3, 2e-3, 40e-3, 3e-3, 4e-3, 5e-3, 6e-3)
    report = run(one_request(50, 3), LinearCost(base_s=7e-3), overheads=ways, steps_in_flight=1).report
    expected = {"plan": 1e-3, "take": 2e-3, "compute": 7e-3, "commit": 3e-3, "deliver": 11e-3}
    assert report.ttft_parts_s == pytest.approx(expected)
    assert sum(report.ttft_parts_s.values()) == pytest.approx(report.ttft_s.mean)


def test_a_chunked_prompt_reads_what_its_chunks_before_left():
    """3 chunks of 64 beside nothing: pairs add up to those of the whole prompt."""
    report = run(one_request(192, 1), LinearCost(per_pair_s=1e-6), max_batch_tokens=64)
    assert report.steps == 3
    assert report.report.ttft_s.p50 == pytest.approx(192 * 193 / 2 * 1e-6)


def test_padding_reads_as_much_as_the_longest_for_all():
    """Two requests of 8 and 40 tokens prefill in one step, then decode twice together."""
    turns = [Turn((Text(i, length),), 3, 3) for i, length in enumerate((8, 40))]
    workload = Workload(tuple(Session((turn,)) for turn in turns))
    report = run(workload, LinearCost(per_padded_s=1e-6)).report
    assert report.duration_s == pytest.approx((2 * 41 + 2 * 42) * 1e-6)


def test_same_seed_same_report_other_seed_other_report():
    def report(seed):
        recipe = Recipe("chat", 60, fixed(30), Lengths("uniform", 1, 40), rate=20.0, seed=seed)
        return dataclasses.replace(run(generate(recipe), policy="lpm"), wall_s=0.0)

    first = report(1)
    assert first == report(1)
    assert first != report(2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("load", [{"rate": 50.0}, {"concurrency": 5}, {}])
def test_every_request_ends_with_its_tokens(kind, load):
    recipe = Recipe(
        kind, 40, Lengths("uniform", 1, 60), Lengths("uniform", 1, 30), prefixes=3, prefix_tokens=40, **load
    )
    workload = generate(recipe)
    setup = configure(SMALL, workload.longest, COST)
    report = simulate(setup, workload, VOCABULARY, check_every=1).report
    turns = [turn for session in workload.sessions for turn in session.turns]
    assert (report.requests, report.finished, report.refused) == (40, 40, 0)
    assert report.output_tokens == sum(turn.output_tokens for turn in turns)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    kind=st.sampled_from(KINDS),
    kv_tokens=st.integers(20, 60).map(lambda pages: 16 * pages),
    policy=st.sampled_from(["fcfs", "lpm", "round-robin", "priority"]),
    admission=st.sampled_from(["ratio", "peak", "reserve"]),
    in_flight=st.integers(1, 2),
)
def test_under_pressure_nothing_is_lost_nor_stuck(seed, kind, kv_tokens, policy, admission, in_flight):
    recipe = Recipe(
        kind, 16, Lengths("uniform", 1, 60), Lengths("uniform", 1, 25), 40, prefix_tokens=30, turns=2, seed=seed
    )
    workload = generate(recipe)
    report = run(workload, kv_tokens=kv_tokens, policy=policy, admission=admission, steps_in_flight=in_flight).report
    assert report.finished == 16
    assert report.output_tokens == sum(t.output_tokens for s in workload.sessions for t in s.turns)


def test_an_answer_that_ends_by_itself_discards_what_was_ahead_of_it():
    short = run(one_request(20, 5, limit=50), steps_in_flight=2)
    assert short.report.output_tokens == 5
    assert short.discarded_tokens == 1
    assert run(one_request(20, 5, limit=50), steps_in_flight=1).discarded_tokens == 0


@pytest.mark.parametrize("prefix", [64, 60])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_shared_prefixes_hit_exactly_what_arithmetic_says(prefix, in_flight):
    """One at a time: of 10 requests over 2 prefixes, all but the first of each find the prefix, inside a page too."""
    recipe = Recipe("shared-prefix", 10, fixed(20), fixed(4), prefixes=2, prefix_tokens=prefix, concurrency=1)
    report = run(generate(recipe), steps_in_flight=in_flight).report
    assert report.prompt_tokens == 10 * (prefix + 20)
    assert report.cached_tokens == 8 * prefix


def test_a_conversation_hits_its_whole_history():
    """All but the last token of each answer, which was never an input, is in the cache for the next turn."""
    recipe = Recipe("chat", 3, fixed(30), fixed(10), prefix_tokens=0, turns=3, concurrency=1)
    report = run(generate(recipe)).report
    assert report.prompt_tokens == 30 + 70 + 110
    assert report.cached_tokens == 0 + 39 + 79


def test_a_host_tier_keeps_conversations_that_the_device_cannot_hold():
    """And its transfers take the time that they are said to take."""
    recipe = Recipe("chat", 40, fixed(60), fixed(20), prefix_tokens=0, turns=4, think_s=0.5, concurrency=10)
    workload = generate(recipe)
    without, free, slow = (
        run(workload, kv_tokens=512, host_kv_tokens=host, moving=seconds)
        for host, seconds in ((0, 0.0), (20_000, 0.0), (20_000, 1e-3))
    )
    assert without.offloaded_pages == 0 < free.loaded_pages <= free.offloaded_pages
    assert free.report.hit_rate > without.report.hit_rate + 0.2
    assert slow.report.ttft_s.mean > free.report.ttft_s.mean


def test_a_recurrent_model_hits_what_it_has_snapshots_of():
    """The second request with a prefix leaves one behind it, and a turn one at the end of its answer or prompt."""
    recipe = Recipe("shared-prefix", 10, fixed(24), fixed(4), prefixes=2, prefix_tokens=64, concurrency=1)
    assert run(generate(recipe), snapshots=9).report.cached_tokens == 6 * 64
    assert run(generate(recipe), snapshots=0).report.cached_tokens == 0
    chat = Recipe("chat", 3, fixed(30), fixed(10), prefix_tokens=0, turns=3, concurrency=1)
    assert run(generate(chat), snapshots=9).report.cached_tokens == 32 + 64


def test_long_prompts_keep_their_snapshots_beside_many_short_ones():
    """Each question leaves a snapshot, too, and as many are kept as there are documents."""
    recipe = Recipe("qa", 60, fixed(50), fixed(2), prefixes=4, prefix_tokens=960, concurrency=1)
    report = run(generate(recipe), snapshots=4, kv_tokens=16384).report
    assert report.hit_rate > 0.75


def test_random_prompts_share_nothing_and_no_cache_hits_nothing():
    assert run(generate(Recipe("random", 12, fixed(64), fixed(16), concurrency=4))).report.cached_tokens == 0
    shared = generate(Recipe("shared-prefix", 10, fixed(5), fixed(2), concurrency=1))
    assert run(shared, prefix_cache=False).report.cached_tokens == 0


def test_a_closed_loop_keeps_its_concurrency():
    """Steps of equal length for all: with 4 at a time, 12 requests of 10 tokens take three rounds."""
    cost = LinearCost(base_s=1e-3)
    report = run(generate(Recipe("random", 12, fixed(8), fixed(10), concurrency=4)), cost, steps_in_flight=1)
    assert report.report.duration_s == pytest.approx(30e-3)
    assert report.mean_batch == pytest.approx(4.0)


def test_a_poisson_process_has_its_rate():
    sessions = generate(Recipe("random", 4000, rate=25.0)).sessions
    last = sessions[-1].turns[0].not_before_s
    assert 4000 / last == pytest.approx(25.0, rel=0.1)  # 3 standard deviations are 5 %


def test_thinking_takes_time():
    recipe = Recipe("chat", 3, fixed(8), fixed(1), turns=3, prefix_tokens=0, concurrency=1, think_s=2.0)
    assert run(generate(recipe), LinearCost()).report.duration_s == pytest.approx(4.0)


def test_a_request_that_cannot_fit_is_counted_and_ends_its_session():
    recipe = Recipe("chat", 4, fixed(100), fixed(10), turns=2, prefix_tokens=0, concurrency=1)
    workload = generate(recipe)
    setup = configure(SMALL, 150, COST)
    report = simulate(setup, workload, VOCABULARY).report
    assert (report.finished, report.refused) == (2, 2)
    assert "context window" in report.first_refusal


def test_the_scheduler_learns_the_simulated_step_time():
    """So that options that depend on it, such as itl_target_ms, can be explored."""
    workload = generate(Recipe("random", 60, Lengths("uniform", 100, 200), fixed(8), concurrency=8))
    free = run(workload, chunk_tokens=256).report.itl_s
    held = run(workload, chunk_tokens=256, itl_target_ms=2.0).report.itl_s
    assert held.p90 < 2.3e-3 < 3e-3 < free.p90


def test_invariants_are_checked(monkeypatch):
    import scheduler_proc.simulation as module

    checks = []
    monkeypatch.setattr(module, "check", checks.append)
    setup = configure(SMALL, 100, COST)
    report = simulate(setup, one_request(20, 10), VOCABULARY, check_every=3)
    assert len(checks) == report.steps // 3
