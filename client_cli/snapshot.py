"""What a server is doing at one moment, from the counters of a local cluster or from a /metrics page."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

# Our names first, then those of vLLM and SGLang without their prefixes.
_GAUGES = {
    "running": ("num_requests_running", "num_running_reqs"),
    "waiting": ("num_requests_waiting", "num_queue_reqs"),
    "kv_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage"),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens_total",),
    "output_tokens": ("generation_tokens_total",),
    "cached_tokens": ("prefix_cache_hits_total", "gpu_prefix_cache_hits_total", "cached_tokens_total"),
    "looked_up": ("prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
    "preempted": ("num_preemptions_total",),
    "finished": ("request_success_total", "num_requests_total"),
}
PAGES = ("held", "locked", "evictable", "free")
# What a local cluster has now; everything else in its statistics only grows.
GAUGES = frozenset(
    {
        "scheduler.waiting", "scheduler.running", "scheduler.in_flight", "scheduler.suspects", "scheduler.total_pages",
        "scheduler.host_total_pages", "scheduler.host_used_pages", *(f"scheduler.{name}_pages" for name in PAGES),
        "scheduler.total_snapshots", "scheduler.used_snapshots",
        "tokenizer.live_requests", "tokenizer.live_choices", "tokenizer.clients", "tokenizer.slow_clients",
        "detokenizer.streams",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`at_s` is when it was taken; None is what the server does not tell. Counters count from its start."""

    at_s: float
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None  # of the KV cache, 0 to 1, by running requests
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    cached_tokens: float | None = None
    looked_up: float | None = None  # prompt tokens that were looked for in the prefix cache
    preempted: float | None = None
    finished: float | None = None
    pages: Mapping[str, int] | None = None  # of PAGES, and `total`

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens that came from the prefix cache, since the start."""
        if self.cached_tokens is None or not self.looked_up:
            return None
        return self.cached_tokens / self.looked_up

    def rate(self, before: "Snapshot | None", name: str) -> float | None:
        """How fast a counter grows, per second, since an earlier snapshot."""
        if before is None or self.at_s <= before.at_s:
            return None
        now, then = getattr(self, name), getattr(before, name)
        if now is None or then is None or now < then:  # it may have started anew
            return None
        return float(now - then) / (self.at_s - before.at_s)


def from_stats(values: Mapping[str, int], at_s: float) -> Snapshot:
    """From the counters and gauges of a local cluster."""
    own = {name.removeprefix("scheduler."): value for name, value in values.items() if name.startswith("scheduler.")}
    total = own.get("total_pages", 0)
    pages = {name: own.get(f"{name}_pages", 0) for name in PAGES} | {"total": total}
    return Snapshot(
        at_s, own.get("running"), own.get("waiting"), (pages["held"] + pages["locked"]) / total if total else None,
        own.get("prompt_tokens"), own.get("output_tokens"), own.get("cached_tokens"), own.get("prompt_tokens"),
        own.get("preempted"), own.get("finished"), pages,
    )  # fmt: skip


def read_metrics(text: str) -> dict[str, float]:
    """Prometheus' text format as sums over all labels, by name without its prefix (`vllm:`). Lines that are none are
    skipped: a page of somebody else may say anything."""
    found: dict[str, tuple[str, float]] = {}  # the first full name of a short one counts, not a second spelling of it
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        number = rest.rpartition("}")[2] if "{" in line else rest
        try:
            value = float(number.split()[0])
        except (ValueError, IndexError):
            continue
        if not isfinite(value):
            continue
        full = name.strip()
        short = full.rpartition(":")[2].removeprefix("rhizome_")
        first, total = found.get(short, (full, 0.0))
        if first == full:
            found[short] = (full, total + value)
    return {short: value for short, (_, value) in found.items()}


def from_metrics(text: str, at_s: float) -> Snapshot:
    """From a /metrics page of Rhizome, vLLM or SGLang."""
    values = read_metrics(text)
    if "scheduler_total_pages" in values:  # our own: all that the scheduler says
        own = {name.removeprefix("scheduler_") for name in values if name.startswith("scheduler_")}
        stats = {f"scheduler.{name.removesuffix('_total')}": int(values[f"scheduler_{name}"]) for name in own}
        return from_stats(stats, at_s)

    def first(names: tuple[str, ...]) -> float | None:
        return next((values[name] for name in names if name in values), None)

    found: dict[str, Any] = {field: first(names) for field, names in (_GAUGES | _COUNTERS).items()}
    if found["looked_up"] is None:
        found["looked_up"] = found["prompt_tokens"]
    return Snapshot(at_s, **found)
