"""The simulator's report and its command line."""

import json

import pytest
from click.testing import CliRunner

from common.config import ConfigError
from scheduler_proc.cost_model import Costs, Overheads
from scheduler_proc.sim_report import Latency, Report
from scheduler_proc.simulation import Record
from scheduler_proc.simulator import cli, parse_option
from tests.unit.simulator_runs import COST, TRACE


def times(when):
    """Planned 1.5 s before the client has the token, then every quarter of a second: taken, begun, ready, committed."""
    return [when * 10**9 - (6 - i) * 10**9 // 4 for i in range(5)]


def test_percentiles_and_latencies_of_records():
    latency = Latency.of(n * 10**9 for n in range(101))
    assert (latency.mean, latency.p50, latency.p90, latency.p99) == pytest.approx((50, 50, 90, 99))
    record = Record(0, 10, submitted=5 * 10**9, cached=4)
    for when in (7, 8, 10):
        record.token(1, when * 10**9, times(when))
    record.finished = True
    report = Report.of([record])
    assert report.ttft_s.p50 == pytest.approx(2) and report.e2e_s.p50 == pytest.approx(5)
    assert report.itl_s.mean == pytest.approx(1.5) and report.tpot_s.mean == pytest.approx(1.5)
    assert report.ttft_parts_s == pytest.approx(
        {"plan": 0.5, "take": 0.25, "compute": 0.5, "commit": 0.25, "deliver": 0.5}
    )
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
    host = invoke(*common, "--set", "host_kv_tokens=8192", "--host-bandwidth", 10, "--kv-bytes", 2048)
    assert host.exit_code == 0, host.output
    single = invoke(*common)
    assert single.exit_code == 0 and "20 finished of 20" in single.output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--set", "polcy=fcfs"), "polcy=fcfs"),
        (("--set", "policy=best"), "policy must be one of"),
        (("--set", "policy=fcfs,lpm"), "--set policy: takes one value; several are for --compare"),
        (("--set", "max_running=many"), "max_running takes values of type int"),
        (("--compare", "prefix_cache=maybe"), "prefix_cache takes values of type bool"),
        (("--requests", "0"), "requests must be at least 1"),
        (("--prompt-tokens", "few"), "lengths must be"),
        (("--bandwidth", "1"), "--costs excludes"),
        (("--set", "host_kv_tokens=3"), "host_kv_tokens must be"),
        (("--set", "snapshots=-1"), "snapshots must be at least 0"),
        (("--set", "snapshots=1", "--set", "speculation=ngram"), "without a host tier and speculation"),
        (("--host-bandwidth", "10"), "needs --kv-bytes"),
        (("--kv-bytes", "10"), "is for --host-bandwidth"),
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
