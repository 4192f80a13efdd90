"""The Grafana dashboard asks only for metrics that there are."""

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from common.story import Story
from gateway_proc.metrics import Metrics, Scrape
from scheduler_proc.measures import Measures as SchedulerMeasures
from tests.rig import Rig
from tokenizer_proc.measures import Measures as TokenizerMeasures

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "rhizome.json"
# What issue trackers and operators of such systems ask for first.
WANTED = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "rhizome_kv_cache_usage", "vllm:prefix_cache_hits_total",
    "rhizome_scheduler_evicted_pages_total", "vllm:num_preemptions_total", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket", "rhizome_step_time_seconds_bucket", "vllm:generation_tokens_total",
    "rhizome_answers_total", "rhizome_errors_total", "rhizome_process_up", "rhizome_process_restarts_total",
)  # fmt: skip


def shown() -> dict[str, set[str]]:
    """The samples of /metrics, with the labels of each, from the real counters of every process."""
    stats = {f"scheduler.{name}": value for name, value in Rig().scheduler.stats().items()}
    stats |= SchedulerMeasures().flat() | TokenizerMeasures().flat() | {"launcher.restarts.worker-0": 1}
    metrics = Metrics()
    metrics.began()
    metrics.told(Story("a", "POST", "/v1/completions", status=200, generates=True), 0.1)
    text = metrics.show(Scrape(stats, "tiny", {"gateway": 1})).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions(dashboard: Any) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def test_every_metric_of_the_dashboard_is_there() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    there = shown()
    asked: set[str] = set()
    for expression in expressions(dashboard):
        names = re.findall(r"(?:rhizome_|vllm:)[a-z0-9_:]+", expression)
        assert names, expression
        for name in names:
            assert name in there, f"{name} in {expression}"
            used = set(re.findall(rf"{name}\{{(\w+)", expression))
            by = re.search(r"by \(([^)]*)\)", expression)
            used |= {label.strip() for label in by[1].split(",")} if by else set()
            assert used <= there[name], f"labels of {name} in {expression}"
        asked |= set(names)
    assert set(WANTED) <= asked
    (variable,) = [v for v in dashboard["templating"]["list"] if v["name"] == "model"]
    assert "rhizome_up" in there and "rhizome_up" in variable["query"]["query"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken and all(x < 24 for x, _ in cells), panel["title"]
        taken |= cells
