"""top, status and trace: snapshots, and the commands against played servers."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import gateway_proc.metrics
from client_cli.snapshot import GAUGES, Snapshot, from_metrics, from_stats, read_metrics
from common.messages import GetStats, Stats
from common.run_dir import RunDir
from tests.client.client_runs import run, run_unread
from tests.client.fake_openai import FakeOpenAI
from tests.client.test_chat_command import Terminal
from tests.unit.fake_frontend import FakeFrontend
from tests.unit.recorded import random_workload, recorded

STATS = {
    "scheduler.running": 3, "scheduler.waiting": 1, "scheduler.total_pages": 100, "scheduler.free_pages": 50,
    "scheduler.evictable_pages": 20, "scheduler.locked_pages": 10, "scheduler.held_pages": 20,
    "scheduler.prompt_tokens": 400, "scheduler.cached_tokens": 100, "scheduler.output_tokens": 50,
    "scheduler.preempted": 2, "scheduler.finished": 7,
}  # fmt: skip
VLLM = """\
# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:prompt_tokens_total{model_name="a b, {c}"} 400.0
vllm:generation_tokens_total{engine="0"} 20.0 1700000000
vllm:generation_tokens_total{engine="1"} 3e1
vllm:prefix_cache_queries_total{engine="0"} 400.0
vllm:prefix_cache_hits_total{engine="0"} 100.0
vllm:request_success_total{finished_reason="stop"} 7.0
process_cpu_seconds_total 12.5
nonsense
"""


def test_a_local_cluster_and_a_metrics_page_say_the_same() -> None:
    ours, theirs = from_stats(STATS, 1.0), from_metrics(VLLM, 1.0)
    for name in ("running", "waiting", "prompt_tokens", "output_tokens", "cached_tokens", "hit_rate", "finished"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.kv_usage, theirs.kv_usage, ours.hit_rate) == (0.3, 0.25, 0.25)
    assert ours.pages == {"held": 20, "locked": 10, "evictable": 20, "free": 50, "total": 100}
    assert theirs.preempted is None and theirs.pages is None


def test_pages_of_anybody_are_read() -> None:
    assert read_metrics('a 1\na 2\nb{x="1"} NaN\ne +Inf\nc\nd x\n{} 1\n') == {"a": 3, "": 1}
    assert from_metrics("rhizome_scheduler_total_pages NaN\nvllm:num_requests_running Inf\n", 0.0) == Snapshot(0.0)
    assert from_metrics("sglang:num_running_reqs 4\nsglang:num_queue_reqs 2\n", 0.0).running == 4
    assert from_metrics("", 0.0) == Snapshot(0.0)
    twice = "rhizome_x_total 1\nrhizome_x_total 2\nvllm:x_total 3\n"
    assert read_metrics(twice)["x_total"] == 3, "a second spelling is not added"


def test_our_own_metrics_say_as_much_as_the_cluster() -> None:
    counters = ("prompt_tokens", "cached_tokens", "output_tokens", "preempted", "finished")
    lines = []
    for name, value in STATS.items():
        short = name.replace(".", "_")
        lines.append(f'rhizome_{short}{"_total" if short.endswith(counters) else ""}{{model_name="m"}} {value}.0')
    assert from_metrics("\n".join([*lines, VLLM]), 1.0) == from_stats(STATS, 1.0)


def test_gauges_are_those_of_the_metrics_page() -> None:
    assert gateway_proc.metrics._GAUGES == GAUGES


def test_rates() -> None:
    before, now = Snapshot(1.0, output_tokens=10), Snapshot(3.0, output_tokens=50)
    assert now.rate(before, "output_tokens") == 20
    assert now.rate(None, "output_tokens") is now.rate(before, "finished") is before.rate(now, "output_tokens") is None
    assert Snapshot(3.0, output_tokens=5).rate(before, "output_tokens") is None, "it has started anew"


class Cluster(FakeFrontend):
    """A played cluster with a cluster.json like a real one's."""

    def __init__(self, path: Path, **pids: int):
        self.pids = pids
        super().__init__(path, _stats)

    def announce(self) -> None:
        model = {"path": "/models/m", "tp": 1, "dtype": "bfloat16", "device": "cpu", "context_len": 64, "kv_tokens": 99}
        info = {"addresses": {"frontend": self.address}, "pids": self.pids, "model": model}
        self._run_dir.write_cluster(info)


def _stats(msg: Any) -> Iterable[Any]:
    if isinstance(msg, GetStats):
        yield Stats(msg.query, STATS)


def test_top_once(short_dir: Path) -> None:
    with Cluster(short_dir, launcher=os.getpid(), worker=2**22 + 1):
        shown = run("top", "--once", "--interval", "0.1", "--run-dir", str(short_dir))
        narrow = run("top", "--once", "--interval", "0.1", "--run-dir", str(short_dir), COLUMNS="40")
        values = json.loads(run("top", "--once", "--json", "--run-dir", str(short_dir)).stdout)
    for output, width in ((shown.stdout, 64), (narrow.stdout, 40)):
        assert [len(line) for line in output.splitlines() if line.startswith("█")] == [width], output
        assert not any(line.startswith("·") for line in output.splitlines())
    assert shown.returncode == 0, shown.stderr
    for words in ("/models/m", "3 running", "1 waiting", "hit rate 25.0%", "2 preemptions", "50 free of 100", "gone"):
        assert words in shown.stdout
    assert values["output_tokens"] == 50 and values["output_tokens_per_s"] == 0 and values["hit_rate"] == 0.25
    assert values["processes"][0]["rss"] > 2**20 and values["processes"][1]["rss"] is None


def test_top_on_a_terminal_until_ctrl_c(short_dir: Path) -> None:
    with Cluster(short_dir, launcher=os.getpid()):
        terminal = Terminal("top", "--interval", "0.1", "--run-dir", str(short_dir), term="xterm")
        for _ in range(2):
            terminal.wait_for("3 running")
        terminal.type("\x03")
        assert terminal.close() == 0


def test_top_without_a_terminal_prints_one_view(short_dir: Path) -> None:
    with Cluster(short_dir, launcher=os.getpid()):
        shown = run("top", "--interval", "0.1", "--run-dir", str(short_dir), PYTHONIOENCODING="ascii")
        assert shown.returncode == 0 and "3 running" in shown.stdout and "###===" in shown.stdout, shown.stderr
        terminal = Terminal("top", "--interval", "0.1", "--run-dir", str(short_dir), term="dumb")
        terminal.wait_for("3 running")
        assert terminal.close() == 0


def test_top_over_http() -> None:
    with FakeOpenAI(metrics=VLLM) as server:
        shown = run("top", "--once", "--url", server.url)
        assert shown.returncode == 0 and "3 running" in shown.stdout and "25.0% in use" in shown.stdout
    with FakeOpenAI() as server:
        ended = run("top", "--once", "--url", server.url)
        assert ended.returncode == 1 and "/metrics answered with HTTP 404" in ended.stderr


def test_status_of_a_healthy_cluster(short_dir: Path) -> None:
    with Cluster(short_dir, launcher=os.getpid()):
        ended = run("status", "--run-dir", str(short_dir))
        state = json.loads(run("status", "--json", "--run-dir", str(short_dir)).stdout)
    assert ended.returncode == 0 and ended.stdout.startswith("healthy\n") and "3 running, 1 waiting" in ended.stdout
    assert f"  processes    launcher {os.getpid()}\n" in ended.stdout
    assert (state["status"], state["problem"], state["model"]) == ("healthy", None, "/models/m")
    assert state["requests"] == {"running": 3, "waiting": 1}


def test_status_of_others(short_dir: Path) -> None:
    with Cluster(short_dir, launcher=os.getpid(), tokenizer=2**22 + 1):
        ended = run("status", "--run-dir", str(short_dir))
        assert ended.returncode == 1 and "unhealthy: not running: tokenizer" in ended.stdout
    ended = run("status", "--run-dir", str(short_dir))
    assert ended.returncode == 2 and "none: no cluster is running" in ended.stdout
    held = RunDir(short_dir)
    held.write_cluster({"addresses": {"frontend": f"ipc://{short_dir}/silent.sock"}, "pids": {}})
    ended = run("status", "--timeout", "0.5", "--run-dir", str(short_dir))
    assert ended.returncode == 2 and "no cluster answers" in ended.stdout
    held.close()


def test_status_over_http() -> None:
    with FakeOpenAI(metrics=VLLM) as server:
        state = json.loads(run("status", "--json", "--url", server.url).stdout)
        assert (state["status"], state["model"], state["context_len"]) == ("healthy", "echo", 4096)
        server.healthy = False
        ended = run("status", "--url", server.url)
        assert ended.returncode == 1 and "overheated" in ended.stdout
    assert run("status", "--url", server.url).returncode == 2


def test_trace_makes_a_timeline_and_a_picture(tmp_path: Path) -> None:
    path, out = tmp_path / "run.rec", tmp_path / "run.rec.json"
    with recorded(path) as scheduler:
        random_workload(scheduler, seed=1)
    ended = run("trace", str(path))
    assert ended.returncode == 0, ended.stderr
    assert "all identical" in ended.stdout and "ui.perfetto.dev" in ended.stdout
    assert json.loads(out.read_text())
    image = tmp_path / "run.svg"
    ended = run("trace", str(path), str(image), "--from", "2", "--to", "9")
    assert ended.returncode == 0 and image.read_text().startswith("<?xml"), ended.stderr


def test_trace_leaves_no_half_of_a_timeline(tmp_path: Path) -> None:
    path, out = tmp_path / "run.rec", tmp_path / "run.rec.json"
    with recorded(path) as scheduler:
        random_workload(scheduler, seed=1)
    out.write_text("from before")
    ended = run_unread("trace", str(path), "--steps")
    assert (ended.returncode, ended.stderr) == (141, "")
    assert out.read_text() == "from before" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        ("x.txt", 2, "must end in .json"),
        ("no/x.json", 2, "OUTPUT: "),
        ("no/x.png", 2, "cannot be written"),
        ("x.json", 1, "scheduler_proc.replay failed"),
        ("x.png", 1, "failed"),
    ],
)
def test_trace_refuses(tmp_path: Path, output: str, code: int, said: str) -> None:
    (tmp_path / "no.rec").write_text("this is no recording")
    ended = run("trace", str(tmp_path / "no.rec"), str(tmp_path / output))
    assert ended.returncode == code and said in ended.stderr and "Traceback" not in ended.stderr
