"""The simulator: closed forms, conservation, determinism, and clear errors."""

import dataclasses
import json
import random
from array import array
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import ConfigError
from scheduler_proc.cost_model import CostError, Costs, LinearCost, ModelShape, Overheads, Roofline, StepWork
from scheduler_proc.sim_report import Latency, Report
from scheduler_proc.simulation import Record
from scheduler_proc.simulator import cli, configure, parse_option, simulate
from scheduler_proc.trace import read_trace
from scheduler_proc.workload import (
    KINDS,
    Lengths,
    Recipe,
    Session,
    Text,
    Traffic,
    Turn,
    Vocabulary,
    Workload,
    WorkloadError,
    generate,
)

VOCABULARY = Vocabulary(seed=3)
# whole nanoseconds, so that nothing is rounded
COST = LinearCost(1e-3, 10e-6, 20e-6, 300e-6, 50e-9, 2e-9, 3e-9, 1e-6, 2e-6, 4e-6)
SMALL = {"max_running": 8, "max_batch_tokens": 512, "chunk_tokens": 64, "kv_tokens": 4096, "page_size": 16}


def fixed(n):
    return Lengths("fixed", n)


def one_request(prompt, output, limit=None):
    return Workload((Session((Turn((Text(0, prompt),), output, limit or output),)),))


def run(workload, cost=COST, overheads=Overheads(), **values):  # noqa: B008
    setup = configure(SMALL | values, workload.longest, cost, overheads)
    return simulate(setup, workload, VOCABULARY, check_every=1)


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

    assert report(1) == report(1)
    assert report(1) != report(2)


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


# ---- workloads ----------------------------------------------------------------------------------------------------


def test_a_shorter_text_is_a_prefix_of_the_longer_one():
    assert VOCABULARY.tokens(Text(5, 100))[:40] == VOCABULARY.tokens(Text(5, 40))
    assert VOCABULARY.tokens(Text(5, 1)) != VOCABULARY.tokens(Text(6, 1))
    tokens = Vocabulary(16, 100).tokens(Text(7, 1000))
    assert min(tokens) >= 16 and max(tokens) < 116


def test_a_prompt_is_the_history_and_the_new_text():
    workload = generate(Recipe("chat", 2, fixed(5), fixed(3), turns=2, prefix_tokens=4, concurrency=1, think_s=1.0))
    traffic = Traffic(workload, VOCABULARY)
    (first,) = traffic.due(0)
    assert len(first.prompt) == 9
    assert traffic.next_due is None and not traffic.done
    traffic.ended(first.number, array("i", [7, 8, 9]), 50)
    assert traffic.next_due == 50 + 10**9
    assert traffic.due(51) == []
    (second,) = traffic.due(50 + 10**9)
    own = workload.sessions[0].turns[1].own[0]
    assert second.prompt == first.prompt + array("i", [7, 8, 9]) + VOCABULARY.tokens(own)
    traffic.ended(second.number, [], 0)
    assert traffic.done


@pytest.mark.parametrize("text", ["", "0", "x", "uniform:5", "uniform:9:3", "lognormal:10:9", "normal:1:2", "1:2"])
def test_lengths_that_are_none(text):
    with pytest.raises(WorkloadError, match="lengths"):
        Lengths.parse(text)


def test_lengths():
    rng = random.Random(0)
    draws = [Lengths.parse("lognormal:100:0.5").draw(rng) for _ in range(2001)]
    assert sorted(draws)[1000] == pytest.approx(100, rel=0.05)
    assert {Lengths.parse("uniform:3:5").draw(rng) for _ in range(100)} == {3, 4, 5}
    assert Lengths.parse("7").draw(rng) == 7


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"requests": 0}, "requests"),
        ({"rate": 0.0}, "rate"),
        ({"rate": 1.0, "concurrency": 1}, "rate"),
        ({"turns": 0}, "turns"),
    ],
)
def test_recipes_that_are_wrong(change, field):
    with pytest.raises(WorkloadError, match=f"^{field} must be"):
        Recipe(**change)


TRACE = """
{"arrival_s": 0.5, "prompt_tokens": 50, "output_tokens": 5, "prefix_group": "a", "prefix_tokens": 40}
{"arrival_s": 0, "prompt_tokens": 60, "output_tokens": 5, "prefix_group": "a", "prefix_tokens": 40, "session": 1}
{"arrival_s": 0.1, "prompt_tokens": 90, "output_tokens": 5, "session": 1, "max_tokens": 9}
{"arrival_s": 9, "prompt_tokens": 50, "output_tokens": 5, "prefix_group": "a", "prefix_tokens": 40, "salt": "t"}
"""


def test_a_trace_runs_as_it_says():
    workload = read_trace(TRACE.splitlines())
    report = run(workload).report
    assert report.finished == 4
    assert report.prompt_tokens == 50 + 60 + 90 + 50
    # the first line finds the second's prefix, the third its session, the last is alone in its namespace
    assert report.cached_tokens == 40 + 64
    assert report.duration_s > 9


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: must be an object"),
        ('{"arrival_s": 1, "prompt_tokens": 5}', "line 2: output_tokens: is missing"),
        ('{"arrival_s": -1, "prompt_tokens": 5, "output_tokens": 5}', "line 2: arrival_s: must be a number"),
        ('{"arrival_s": 1, "prompt_tokens": 5.5, "output_tokens": 5}', "line 2: prompt_tokens: must be an integer"),
        ('{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": true}', "line 2: output_tokens: must be an integer"),
        ('{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 5, "x": 1}', "line 2: x: no such field"),
        ('{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 5, "salt": 1}', "line 2: salt: must be a string"),
        ('{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 5, "prefix_tokens": 1}', "line 2: prefix_group: goes"),
        (
            '{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 5, "prefix_tokens": 9, "prefix_group": 1}',
            "line 2: prefix_tokens: must be at most prompt_tokens",
        ),
        ('{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 5, "max_tokens": 4}', "line 2: max_tokens: must be"),
        ('{"arrival_s": 1, "prompt_tokens": 15, "output_tokens": 5, "session": 1}', "line 2: prompt_tokens: must be"),
        (
            '{"arrival_s": 1, "prompt_tokens": 99, "output_tokens": 5, "session": 1, "priority": 2}',
            "line 2: priority: must be as in the first line",
        ),
    ],
)
def test_trace_errors_name_line_and_field(line, problem):
    good = '{"arrival_s": 0, "prompt_tokens": 10, "output_tokens": 5, "session": 1}'
    with pytest.raises(WorkloadError) as error:
        read_trace([good, line])
    assert str(error.value).startswith(problem)


# ---- costs --------------------------------------------------------------------------------------------------------

LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def write(path: Path, values) -> Path:
    path.write_text(json.dumps(values))
    return path


def test_the_shape_of_a_known_model(tmp_path):
    shape = ModelShape.of_config(write(tmp_path / "config.json", LLAMA_8B))
    assert shape.kv_bytes_per_token == 131072
    assert shape.weight_bytes / 2 == pytest.approx(8.03e9 - 0.525e9, rel=0.001)  # all but the table of embeddings
    assert ModelShape.of_config(tmp_path) == shape


def test_a_roofline_is_bandwidth_bound_in_decode_and_compute_bound_in_prefill(tmp_path):
    shape = ModelShape.of_config(write(tmp_path / "config.json", LLAMA_8B))
    cost = Roofline(shape, 3e12, 900e12, 1e-3)
    decode = cost.seconds(StepWork(1, 1, 0, 1, 1000, 1000, 1000))
    assert decode == pytest.approx(1e-3 + (shape.weight_bytes + 131072 * 1001) / 3e12)
    prefill = cost.seconds(StepWork(8192, 1, 1, 1, 8192, 8192 * 8193 // 2, 0))
    flops = 2 * 8192 * (8.03e9 - 2 * 0.525e9) + shape.flops_per_sample + 4 * 32 * 4096 * 8192 * 8193 / 2
    assert prefill == pytest.approx(1e-3 + flops / 900e12, rel=0.001)


def test_gpt2_and_what_is_refused(tmp_path):
    gpt2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    shape = ModelShape.of_config(write(tmp_path / "gpt2.json", gpt2))
    assert shape.weight_bytes / 2 == pytest.approx(124.4e6 - 1024 * 768, rel=0.001)
    with pytest.raises(CostError, match="num_local_experts"):
        ModelShape.of_config(write(tmp_path / "moe.json", LLAMA_8B | {"num_local_experts": 8}))
    with pytest.raises(CostError, match="vocab_size"):
        ModelShape.of_config(write(tmp_path / "bad.json", LLAMA_8B | {"vocab_size": "many"}))
    with pytest.raises(CostError, match="cannot be read"):
        ModelShape.of_config(tmp_path / "missing.json")


def test_costs_come_back_from_their_file_and_errors_name_the_field(tmp_path):
    costs = Costs(COST, Overheads(submit_s=0.5e-3), "a test")
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs
    for values, field in (
        ({"step": {"base_s": -1}}, "step.base_s"),
        ({"step": {"speed": 1}}, "step.speed"),
        ({"overheads": {"plan_s": "1"}}, "overheads.plan_s"),
        ({"steps": {}}, "steps"),
    ):
        with pytest.raises(CostError, match=field):
            Costs.load(write(tmp_path / "bad.json", values))


# ---- report and command line --------------------------------------------------------------------------------------


def test_percentiles_and_latencies_of_records():
    latency = Latency.of(n * 10**9 for n in range(101))
    assert (latency.mean, latency.p50, latency.p90, latency.p99) == pytest.approx((50, 50, 90, 99))
    record = Record(0, 10, submitted=5 * 10**9, cached=4)
    for when in (7, 8, 10):
        record.token(1, when * 10**9)
    record.finished = True
    report = Report.of([record])
    assert report.ttft_s.p50 == pytest.approx(2) and report.e2e_s.p50 == pytest.approx(5)
    assert report.itl_s.mean == pytest.approx(1.5) and report.tpot_s.mean == pytest.approx(1.5)
    assert report.hit_rate == pytest.approx(0.4) and report.output_tokens_per_s == pytest.approx(3 / 5)


@pytest.fixture
def costs_file(tmp_path):
    Costs(COST, Overheads()).save(tmp_path / "costs.json")
    return str(tmp_path / "costs.json")


def invoke(*arguments):
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def test_comparing_gives_a_row_per_combination(costs_file):
    common = ("--costs", costs_file, "--requests", 20, "--concurrency", 4, "--set", "kv_tokens=8192", "--check", 20)
    grid = ("--compare", "policy=fcfs,lpm", "--compare", "steps_in_flight=1,2")
    answer = invoke(*common, *grid, "--json")
    assert answer.exit_code == 0, answer.output
    rows = json.loads(answer.output)
    combinations = [(row["policy"], row["steps_in_flight"]) for row in rows]
    assert combinations == [("fcfs", 1), ("fcfs", 2), ("lpm", 1), ("lpm", 2)]
    assert all(row["finished"] == 20 and row["speedup"] > 0 for row in rows)
    table = invoke(*common, *grid)
    assert table.exit_code == 0 and len(table.output.splitlines()) == 1 + 4 + 2
    single = invoke(*common)
    assert single.exit_code == 0 and "20 finished of 20" in single.output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--set", "polcy=fcfs"), "polcy=fcfs"),
        (("--set", "policy=best"), "policy must be one of"),
        (("--set", "max_running=many"), "max_running takes values of type int"),
        (("--compare", "prefix_cache=maybe"), "prefix_cache takes values of type bool"),
        (("--requests", "0"), "requests must be at least 1"),
        (("--prompt-tokens", "few"), "lengths must be"),
        (("--bandwidth", "1"), "--costs excludes"),
    ],
)
def test_wrong_options_are_named(costs_file, arguments, problem):
    answer = invoke("--costs", costs_file, *arguments)
    assert answer.exit_code != 0 and problem in answer.output


def test_a_trace_excludes_options_that_it_would_ignore(costs_file, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)
    assert invoke("--costs", costs_file, "--trace", trace).exit_code == 0
    answer = invoke("--costs", costs_file, "--trace", trace, "--rate", 3)
    assert answer.exit_code != 0 and "--rate" in answer.output


def test_options_have_the_scheduler_s_types():
    assert parse_option("itl-target-ms=5,7.5") == ("itl_target_ms", [5.0, 7.5])
    assert parse_option("prefix_cache=on,off") == ("prefix_cache", [True, False])
    with pytest.raises(ConfigError):
        parse_option("policy")


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
