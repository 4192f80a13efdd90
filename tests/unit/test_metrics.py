"""Histograms that travel as counters, what tokenizer and scheduler measure, and what Prometheus is shown."""

import os
from array import array
from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from common.codec import decode, encode
from common.messages import Abort, ErrorCode, Finish, Stats
from common.metrics import BOUNDS, Histogram, cumulative, histogram
from common.sampling_params import SamplingParams
from gateway_proc.metrics import Metrics, Scrape, process_of
from tests.unit.frontend_world import World, request, run, text_batch
from tokenizer_proc.clients import Sent


@given(st.lists(st.tuples(st.floats(0, 1e4), st.integers(1, 5)), max_size=30))
def test_a_histogram_counts_every_value_once(values: list[tuple[float, int]]) -> None:
    measured = histogram("tokenizer.e2e")
    for value, times in values:
        measured.observe(value, times)
    found = cumulative(measured.flat("tokenizer.e2e"), "tokenizer.e2e")
    assert found is not None
    pairs, total = found
    for bound, count in pairs:
        assert count == sum(times for value, times in values if value <= bound)
    assert pairs[-1] == (float("inf"), sum(times for _, times in values))
    assert total == pytest.approx(sum(value * times for value, times in values), abs=1e-4)


def test_buckets_hold_what_is_at_most_their_bound() -> None:
    measured = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        measured.observe(value)
    assert measured.flat("x") == {"x/0": 2, "x/1": 2, "x/2": 1, "x/sum": 7_500_000}
    assert bisect_left((1.0, 2.0), 1.0) == 0


def test_all_histograms_fit_into_one_message() -> None:
    values = {f"counter.{i}": 2**62 for i in range(100)}
    for name in BOUNDS:
        values |= histogram(name).flat(name)
    assert decode(encode(Stats(1, values)), {Stats}).values == values
    assert cumulative({}, "tokenizer.e2e") is None
    assert all(tuple(sorted(set(bounds))) == bounds for bounds in BOUNDS.values())


def test_the_tokenizer_measures_latencies_and_ends() -> None:
    async def test() -> None:
        world = World()
        (rid,) = await world.choices(1)
        for at_ms, finish, tokens in ((5, Finish.NONE, (9,)), (5, Finish.NONE, ()), (45, Finish.LENGTH, (9, 9))):
            world.now = 99 + at_ms * 10**6
            world.frontend.on_detokenizer(text_batch(rid, "x", finish, tokens))
        world.receive(request(6, params=request().params, text="y" * 5000))
        values = world.frontend.measures.flat()
        assert values["tokenizer.ttft/sum"] == 5_000 and values["tokenizer.ttft/1"] == 1
        assert values["tokenizer.itl/sum"] == 40_000 and values["tokenizer.itl/1"] == 2  # two tokens, 20 ms each
        assert values["tokenizer.e2e/sum"] == 45_000 and values["tokenizer.decode/sum"] == 40_000
        assert values["tokenizer.output_tokens/sum"] == 3_000_000 and values["tokenizer.prompt_tokens/sum"] == 3_000_000
        assert values["tokenizer.token_time/sum"] == 20_000 and values["tokenizer.max_tokens/sum"] == 29_000_000
        assert values["tokenizer.computed_tokens/sum"] == 1_000_000  # text_batch says that two were cached
        assert values["tokenizer.choices/sum"] == 1_000_000 and values["tokenizer.longest_answer/sum"] == 3_000_000
        assert values["tokenizer.finished_length"] == 1 and values["tokenizer.finished_stop"] == 0
        assert values["tokenizer.errors_too_long"] == 1 and values["tokenizer.errors_internal"] == 0

    run(test)


def test_every_end_that_the_tokenizer_makes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborts of what the scheduler does not have or is not asked about, clients that go or do not read."""
    monkeypatch.setattr("tokenizer_proc.clients.MAX_BACKLOG_MESSAGES", 0)

    async def test() -> None:
        world = World(max_live=99)
        world.receive(request(1, text="fox", n=2))
        world.receive(Abort(1))  # while it is tokenized
        await world.choices(3, params=SamplingParams(use_beam_search=True))
        world.receive(Abort(5))
        values = world.frontend.measures.flat()
        assert values["tokenizer.finished_abort"] == 5 and values["tokenizer.errors_overloaded"] == 0
        await world.choices(2, b"b")
        world.state[b"b"] = Sent.GONE
        world.frontend.beat()
        (rid,) = await world.choices(1, b"c")
        world.state[b"c"] = Sent.FULL
        world.frontend.on_detokenizer(text_batch(rid, "t"))
        values = world.frontend.measures.flat()
        assert values["tokenizer.choices/sum"] == 7_000_000 and values["tokenizer.choices/0"] == 0
        assert values["tokenizer.finished_abort"] == 7 and values["tokenizer.errors_overloaded"] == 1

    run(test)


def shown(stats: dict[str, int] | None) -> dict[str, Any]:
    text = Metrics().show(Scrape(stats, "m", {})).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_the_names_that_dashboards_expect() -> None:
    stats = {
        "scheduler.total_pages": 10, "scheduler.free_pages": 4, "scheduler.evictable_pages": 3, "scheduler.running": 2,
        "scheduler.waiting": 1, "scheduler.prompt_tokens": 50, "scheduler.cached_tokens": 20,
        "scheduler.output_tokens": 30, "scheduler.preempted": 1, "tokenizer.finished_stop": 4,
        "scheduler.host_cached_tokens": 6,
        "scheduler.drafts": 8, "scheduler.draft_tokens": 20, "scheduler.accepted_tokens": 12,
        "scheduler.accepted_at/0": 7, "scheduler.accepted_at/1": 5,
        "tokenizer.finished_length": 5, "tokenizer.finished_abort": 6, "tokenizer.errors_deadline": 7,
    }  # fmt: skip
    for name in BOUNDS:
        measured = histogram(name)
        measured.observe(0.5)
        stats |= measured.flat(name)
    found = shown(stats)
    for name, value in (
        ("vllm:num_requests_running", 2), ("vllm:num_requests_waiting", 1), ("vllm:prompt_tokens", 50),
        ("vllm:generation_tokens", 30), ("vllm:num_preemptions", 1), ("vllm:prefix_cache_queries", 50),
        ("vllm:prefix_cache_hits", 20), ("vllm:spec_decode_num_drafts", 8),
        ("vllm:spec_decode_num_draft_tokens", 20), ("vllm:spec_decode_num_accepted_tokens", 12),
    ):  # fmt: skip
        assert found[name].samples[0].value == value
        assert found[name].samples[0].labels == {"model_name": "m", "engine": "0"}
    assert found["vllm:kv_cache_usage_perc"].samples[0].value == pytest.approx(0.3)
    depths = found["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert {s.labels["position"]: s.value for s in depths if s.name.endswith("_total")} == {"0": 7, "1": 5}
    success = {
        s.labels["finished_reason"]: s.value for s in found["vllm:request_success"].samples if s.name.endswith("_total")
    }
    assert success == {"stop": 4, "length": 5, "abort": 6}
    errors = {s.labels["code"]: s.value for s in found["rhizome_errors"].samples if s.name.endswith("_total")}
    assert errors == {"deadline": 7}
    for name in (
        "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds", "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
        "vllm:iteration_tokens_total", "rhizome_step_time_seconds", "vllm:request_inference_time_seconds",
        "vllm:request_time_per_output_token_seconds", "vllm:request_max_num_generation_tokens",
        "vllm:request_params_max_tokens", "vllm:request_params_n", "vllm:request_num_preemptions",
        "vllm:request_prefill_kv_computed_tokens",
    ):  # fmt: skip
        samples = {s.name.removeprefix(name): s for s in found[name].samples}
        assert (
            samples["_count"].value == 1 and samples["_sum"].value == 0.5 and samples["_bucket"].labels["le"] == "+Inf"
        )
    for name, label, values in (
        (
            "vllm:prompt_tokens_by_source",
            "source",
            {"local_compute": 30, "local_cache_hit": 20, "external_kv_transfer": 0},
        ),
        ("vllm:prompt_tokens_cached_by_source", "source", {"device": 14, "host": 6}),
        ("vllm:num_requests_waiting_by_reason", "reason", {"capacity": 1, "deferred": 0}),
    ):
        assert {s.labels[label]: s.value for s in found[name].samples} == values
    assert found["vllm:prompt_tokens_cached"].samples[0].value == 20
    assert found["rhizome_up"].samples[0].value == 1
    assert not any("/" in s.name for f in found.values() for s in f.samples)


def test_the_settings_of_the_cache_are_labels() -> None:
    text = Metrics().show(Scrape(None, "m", {}, {"block_size": "16", "num_gpu_blocks": "9"})).decode()
    assert 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="9"} 1.0' in text


def test_a_silent_cluster_is_shown_as_down() -> None:
    found = shown(None)
    assert found["rhizome_up"].samples[0].value == 0 and "vllm:num_requests_running" not in found


def test_processes() -> None:
    seen = process_of(os.getpid())
    assert seen is not None and seen[0] > 10**6 and seen[1] > 0
    assert process_of(2**22 + 1) is None


def test_errors_are_counted_by_code() -> None:
    names = {f"tokenizer.errors_{code.name.lower()}" for code in ErrorCode}
    assert names <= set(World().frontend.measures.flat())
    assert array("i").typecode == "i"
