"""/metrics in Prometheus' format: the cluster's counters under `rhizome_*` and, where they fit, under vLLM's names, and
the gateway's own."""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from common.metrics import BOUNDS, cumulative
from common.story import Story

PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_HTTP_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

# What vLLM calls the same thing. (Ours: theirs, kind, help.)
_VLLM_HISTOGRAMS = {
    "tokenizer.ttft": ("vllm:time_to_first_token_seconds", "Time to first token."),
    "tokenizer.itl": ("vllm:inter_token_latency_seconds", "Time between tokens of one answer."),
    "tokenizer.e2e": ("vllm:e2e_request_latency_seconds", "Time from a request's arrival to its end."),
    "tokenizer.prefill": ("vllm:request_prefill_time_seconds", "Time from the first step to the first token."),
    "tokenizer.decode": ("vllm:request_decode_time_seconds", "Time from the first token to the last."),
    "tokenizer.inference": ("vllm:request_inference_time_seconds", "Time from the first step to the last token."),
    "tokenizer.token_time": (
        "vllm:request_time_per_output_token_seconds", "Mean time of an answer's tokens but the first.",
    ),
    "tokenizer.prompt_tokens": ("vllm:request_prompt_tokens", "Prompt tokens per request."),
    "tokenizer.output_tokens": ("vllm:request_generation_tokens", "Generated tokens per answer."),
    "tokenizer.longest_answer": (
        "vllm:request_max_num_generation_tokens", "Generated tokens of the longest answer to a request.",
    ),
    "tokenizer.max_tokens": ("vllm:request_params_max_tokens", "Tokens that an answer might have had."),
    "tokenizer.computed_tokens": (
        "vllm:request_prefill_kv_computed_tokens", "Prompt tokens that did not come from the prefix cache.",
    ),
    "tokenizer.choices": ("vllm:request_params_n", "Answers per request."),
    "scheduler.preemptions": ("vllm:request_num_preemptions", "How often a request was preempted."),
    "scheduler.queue": ("vllm:request_queue_time_seconds", "Time from arrival at the scheduler to the first step."),
    "scheduler.step_tokens": ("vllm:iteration_tokens_total", "Tokens per step."),
}  # fmt: skip
_VLLM_COUNTERS = {
    "scheduler.prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens of admitted requests."),
    "scheduler.output_tokens": ("vllm:generation_tokens", "Generated tokens."),
    "scheduler.preempted": ("vllm:num_preemptions", "Requests preempted."),
    "scheduler.drafts": ("vllm:spec_decode_num_drafts", "Rows of steps with guessed tokens."),
    "scheduler.draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Guessed tokens."),
    "scheduler.accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that were right."),
}
_OWN_HISTOGRAMS = {
    "tokenizer.ttft": ("rhizome_time_to_first_token_seconds", "Time to first token."),
    "tokenizer.itl": ("rhizome_inter_token_latency_seconds", "Time between tokens of one answer."),
    "tokenizer.e2e": ("rhizome_e2e_request_latency_seconds", "Time from a request's arrival to its end."),
    "tokenizer.prefill": ("rhizome_request_prefill_time_seconds", "Time from the first step to the first token."),
    "tokenizer.decode": ("rhizome_request_decode_time_seconds", "Time from the first token to the last."),
    "tokenizer.prompt_tokens": ("rhizome_request_prompt_tokens", "Prompt tokens per request."),
    "tokenizer.output_tokens": ("rhizome_request_generation_tokens", "Generated tokens per answer."),
    "scheduler.queue": ("rhizome_request_queue_time_seconds", "Time from arrival at the scheduler to the first step."),
    "scheduler.step": ("rhizome_step_time_seconds", "Time of the forward pass and sampling of a step."),
    "scheduler.step_tokens": ("rhizome_step_tokens", "Tokens per step."),
}
_GAUGES = frozenset(
    {
        "scheduler.waiting", "scheduler.running", "scheduler.in_flight", "scheduler.suspects", "scheduler.total_pages",
        "scheduler.host_total_pages", "scheduler.host_used_pages",
        "scheduler.total_snapshots", "scheduler.used_snapshots",
        "scheduler.free_pages", "scheduler.evictable_pages", "scheduler.locked_pages", "scheduler.held_pages",
        "tokenizer.live_requests", "tokenizer.live_choices", "tokenizer.clients", "tokenizer.slow_clients",
        "detokenizer.streams",
    }
)  # fmt: skip
_RESTARTS = "launcher.restarts."
_LABELLED = ("tokenizer.finished_", "tokenizer.errors_", _RESTARTS)  # what follows is a label
_FINISHED = {"stop": "finished_stop", "length": "finished_length", "abort": "finished_abort"}


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one scrape shows of the cluster: its counters (None while it does not answer), the model's name, the
    processes by name with their ids, and the KV cache's settings under vLLM's names."""

    stats: Mapping[str, int] | None
    model: str
    pids: Mapping[str, int]
    cache: Mapping[str, str] = field(default_factory=dict)


class ClusterCollector(Collector):
    """Turns Stats into metrics. `scrape` is set before each collection."""

    scrape = Scrape(None, "", {})

    def collect(self) -> Iterable[Metric]:
        yield from _processes(self.scrape)
        up = GaugeMetricFamily("rhizome_up", "Whether the cluster answers.", labels=["model_name"])
        up.add_metric([self.scrape.model], 0 if self.scrape.stats is None else 1)
        yield up
        if self.scrape.stats is not None:
            yield from _cluster(self.scrape.stats, self.scrape.model)
        if self.scrape.cache:
            labels = {"engine": "0", **self.scrape.cache}
            family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's settings.", labels=list(labels))
            family.add_metric(list(labels.values()), 1)
            yield family


def _cluster(stats: Mapping[str, int], model: str) -> Iterable[Metric]:
    for name, value in stats.items():
        if "/" in name or name.startswith(_LABELLED):
            continue
        own = "rhizome_" + name.replace(".", "_")
        text = f"{name} of the cluster's statistics."
        if name in _GAUGES:
            yield _gauge(own, text, value, model)
        else:
            yield _counter(own, text, value, model)
    for names, labels in ((_OWN_HISTOGRAMS, ["model_name"]), (_VLLM_HISTOGRAMS, ["model_name", "engine"])):
        for name, (shown, text) in names.items():
            found = cumulative(stats, name)
            if found is not None:
                family = HistogramMetricFamily(shown, text, labels=labels)
                pairs = [("+Inf" if bound == float("inf") else str(bound), float(count)) for bound, count in found[0]]
                family.add_metric([model, "0"][: len(labels)], pairs, found[1])
                yield family
    yield from _outcomes(stats, model)
    yield from _as_vllm(stats, model)


def _outcomes(stats: Mapping[str, int], model: str) -> Iterable[Metric]:
    finished = CounterMetricFamily("rhizome_answers", "Answers by how they ended.", labels=["model_name", "finish"])
    errors = CounterMetricFamily(
        "rhizome_errors", "Requests ended with an error, by cause.", labels=["model_name", "code"]
    )
    success = CounterMetricFamily(
        "vllm:request_success", "Answers by how they ended.", labels=["model_name", "engine", "finished_reason"]
    )
    for reason, name in _FINISHED.items():
        finished.add_metric([model, reason], stats.get(f"tokenizer.{name}", 0))
        success.add_metric([model, "0", reason], stats.get(f"tokenizer.{name}", 0))
    for name, value in stats.items():
        if name.startswith("tokenizer.errors_"):
            errors.add_metric([model, name.removeprefix("tokenizer.errors_")], value)
    restarts = CounterMetricFamily("rhizome_process_restarts", "Restarts of a process.", labels=["process"])
    for name, value in stats.items():
        if name.startswith(_RESTARTS):
            restarts.add_metric([name.removeprefix(_RESTARTS)], value)
    yield from (finished, errors, success, restarts)


def _as_vllm(stats: Mapping[str, int], model: str) -> Iterable[Metric]:
    """Under the names that dashboards made for vLLM look for."""
    total = max(1, stats.get("scheduler.total_pages", 1))
    unused = stats.get("scheduler.free_pages", 0) + stats.get("scheduler.evictable_pages", 0)
    usage = (total - unused) / total
    yield _gauge("rhizome_kv_cache_usage", "Part of the KV cache that requests hold (0 to 1).", usage, model)
    pairs = (
        ("vllm:num_requests_running", "Requests that run.", stats.get("scheduler.running", 0)),
        ("vllm:num_requests_waiting", "Requests that wait.", stats.get("scheduler.waiting", 0)),
        ("vllm:kv_cache_usage_perc", "Part of the KV cache that requests hold (0 to 1).", usage),
    )
    for name, text, value in pairs:
        yield _gauge(name, text, value, model, engine=True)
    for name, (shown, text) in _VLLM_COUNTERS.items():
        yield _counter(shown, text, stats.get(name, 0), model, engine=True)
    found, asked = stats.get("scheduler.cached_tokens", 0), stats.get("scheduler.prompt_tokens", 0)
    rate = found / asked if asked else 0.0
    yield _gauge("rhizome_prefix_cache_hit_rate", "Part of all prompt tokens that were cached (0 to 1).", rate, model)
    yield from _accepted_at(stats, model)
    host = stats.get("scheduler.host_cached_tokens", 0)
    yield _counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", found, model, engine=True)
    yield from _by(
        "vllm:prompt_tokens_by_source", "Prompt tokens by where their KV came from.", "source", model,
        {"local_compute": asked - found, "local_cache_hit": found, "external_kv_transfer": 0},
    )  # fmt: skip
    yield from _by(
        "vllm:prompt_tokens_cached_by_source", "Prompt tokens found in the prefix cache by where.", "source", model,
        {"device": found - host, "host": host},
    )  # fmt: skip
    waiting = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason",
        "Requests that wait by what for.",
        labels=["model_name", "engine", "reason"],
    )
    waiting.add_metric([model, "0", "capacity"], stats.get("scheduler.waiting", 0))
    waiting.add_metric([model, "0", "deferred"], 0)
    yield waiting
    # In tokens: how many of the prompts' tokens were looked up, and how many found.
    yield _counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
                   stats.get("scheduler.prompt_tokens", 0), model, engine=True)  # fmt: skip
    yield _counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.",
                   stats.get("scheduler.cached_tokens", 0), model, engine=True)  # fmt: skip


def _by(name: str, text: str, label: str, model: str, values: Mapping[str, int]) -> Iterable[Metric]:
    """A counter for each value of a label."""
    family = CounterMetricFamily(name, text, labels=["model_name", "engine", label])
    for value, count in values.items():
        family.add_metric([model, "0", value], count)
    yield family


def _accepted_at(stats: Mapping[str, int], model: str) -> Iterable[Metric]:
    """Right guesses by how many came before them."""
    prefix = "scheduler.accepted_at/"
    yield from _by(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Guessed tokens that were right, by their place among the guesses of a row.", "position", model,
        {name.removeprefix(prefix): value for name, value in stats.items() if name.startswith(prefix)},
    )  # fmt: skip


def _gauge(name: str, text: str, value: float, model: str, *, engine: bool = False) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["model_name", "engine"] if engine else ["model_name"])
    family.add_metric([model, "0"] if engine else [model], value)
    return family


def _counter(name: str, text: str, value: float, model: str, *, engine: bool = False) -> Metric:
    family = CounterMetricFamily(name, text, labels=["model_name", "engine"] if engine else ["model_name"])
    family.add_metric([model, "0"] if engine else [model], value)
    return family


def _processes(scrape: Scrape) -> Iterable[Metric]:
    """Each process as the kernel sees it."""
    up = GaugeMetricFamily("rhizome_process_up", "Whether a process of the cluster runs.", labels=["process"])
    memory = GaugeMetricFamily(
        "rhizome_process_resident_memory_bytes", "Memory that a process has.", labels=["process"]
    )
    cpu = CounterMetricFamily("rhizome_process_cpu_seconds", "Processor time of a process.", labels=["process"])
    for name, pid in scrape.pids.items():
        seen = process_of(pid)
        up.add_metric([name], 0 if seen is None else 1)
        if seen is not None:
            memory.add_metric([name], seen[0])
            cpu.add_metric([name], seen[1])
    yield from (up, memory, cpu)


def process_of(pid: int) -> tuple[float, float] | None:
    """Resident bytes and processor seconds of a process; None when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="latin-1") as file:  # noqa: PTH123 (not a file of ours)
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return float(fields[21]) * PAGE, (int(fields[11]) + int(fields[12])) / ticks


class Metrics:
    """The gateway's own counters, and the collection of everything."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._cluster = ClusterCollector()
        self._registry.register(self._cluster)
        self._requests = Counter(
            "rhizome_http_requests", "HTTP requests answered.", ["method", "route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "rhizome_http_request_seconds", "Time from an HTTP request's head to the end of its answer.", ["route"],
            buckets=_HTTP_BOUNDS, registry=self._registry,
        )  # fmt: skip
        self._live = Gauge("rhizome_http_requests_live", "HTTP requests in work.", registry=self._registry)
        self._private = CollectorRegistry()  # what only those with a key are shown
        self._tokens = Counter(
            "rhizome_http_tokens", "Tokens of HTTP requests by API key.", ["key", "kind"], registry=self._private
        )
        started = Gauge("rhizome_gateway_start_time_seconds", "When the gateway started.", registry=self._registry)
        started.set(time.time())

    def began(self) -> None:
        self._live.inc()

    def told(self, story: Story, seconds: float) -> None:
        """A request has ended."""
        self._live.dec()
        self._requests.labels(story.method, story.route, str(story.status)).inc()
        self._seconds.labels(story.route).observe(seconds)
        if story.generates:
            self._tokens.labels(story.key, "prompt").inc(story.prompt_tokens)
            self._tokens.labels(story.key, "cached").inc(story.cached_tokens)
            self._tokens.labels(story.key, "output").inc(story.output_tokens)

    def show(self, scrape: Scrape, *, private: bool = True) -> bytes:
        """All metrics in Prometheus' text format; what names API keys only where `private` is asked for."""
        self._cluster.scrape = scrape
        return generate_latest(self._registry) + (generate_latest(self._private) if private else b"")


assert {*_OWN_HISTOGRAMS, *_VLLM_HISTOGRAMS} == set(BOUNDS)
