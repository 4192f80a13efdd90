"""Timelines: their totals are the scheduler's counters, and what they are shown as is well formed."""

import json
from array import array
from collections import Counter
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from common.config import ADMISSIONS, POLICIES
from common.messages import ints
from scheduler_proc import replay
from scheduler_proc.chrome_trace import write_trace
from scheduler_proc.recording import Recording
from scheduler_proc.show_tree import show_tree
from scheduler_proc.timeline import Arrived, Committed, Ended, Entered, Entry, Gone, Planned, Reset, Timeline, window
from tests.unit.recorded import RecordedRun, random_workload, recorded


def entries_of(path: Path) -> list[Entry]:
    return list(Timeline(Recording.open(path)))


def under_pressure(run: RecordedRun) -> None:
    """Requests that grow far beyond what was kept for them."""
    for rid in range(6):
        run.add(rid, [rid, 1, 2], 40)
    run.finish()


@pytest.fixture
def pressed(tmp_path: Path) -> tuple[Path, RecordedRun]:
    path = tmp_path / "pressed.rec"
    with recorded(path, pages=16, steps_in_flight=2) as run:
        under_pressure(run)
    assert run.scheduler.stats()["preempted"] > 0
    return path, run


def totals(entries: list[Entry]) -> dict[str, int]:
    """The scheduler's counters, from a timeline alone."""
    count: Counter[str] = Counter()
    prompts: dict[int, int] = {}
    for entry in entries:
        match entry.what:
            case Arrived(rid=rid, prompt=prompt, refusal=refusal):
                count["refused" if refusal else "requests"] += 1
                prompts[rid] = prompt
            case Gone(rids=rids, why=why):
                count["aborted" if why == "abort" else "expired"] += len(rids)
            case Planned() as plan:
                count["steps"] += plan.step is not None
                count["preempted"] += len(plan.preempted)
                count["copied_pages"] += len(plan.copies)
                count["evicted_pages"] += plan.evicted
                for entered in plan.entered:
                    count["prompt_tokens"] += prompts[entered.rid] * entered.first
                    count["cached_tokens"] += entered.cached * entered.first
            case Committed() as step:
                count["output_tokens"] += step.tokens
                count["discarded_tokens"] += step.discarded
                count["finished"] += len(step.finished)
    return dict(count)


@pytest.mark.soak
@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_totals_are_the_counters(tmp_path: Path, policy: str, admission: str) -> None:
    for seed in range(3):
        path = tmp_path / f"{seed}.rec"
        with recorded(path, pages=15, policy=policy, admission=admission, steps_in_flight=1 + seed % 2) as run:
            random_workload(run, seed, requests=20)
            under_pressure(run)
        entries = entries_of(path)
        stats = run.scheduler.stats()
        for name, value in totals(entries).items():
            assert value == stats[name], name
        assert all(sum((e.gauges.free, e.gauges.evictable, e.gauges.locked, e.gauges.held)) == 15 for e in entries)
        last = entries[-1].gauges
        assert (last.waiting, last.running, last.locked, last.held) == (0, 0, 0, 0)
        assert isinstance(entries[-1].what, Ended)


def test_chunks_and_decodes_compute_every_token_once(pressed: tuple[Path, RecordedRun]) -> None:
    """From where a request entered, the spans of its chunks and decodes join without gap or overlap."""
    path, run = pressed
    reached: dict[int, int] = {}
    tokens = 0
    for entry in entries_of(path):
        if not isinstance(entry.what, Planned):
            continue
        plan = entry.what
        for entered in plan.entered:
            assert isinstance(entered, Entered)
            reached[entered.rid] = entered.cached
        for chunk in plan.chunks:
            assert reached[chunk.rid] == chunk.start < chunk.end
            reached[chunk.rid] = chunk.end
        for rid, _ in plan.decodes:
            reached[rid] += 1
        tokens += plan.tokens
    assert all(reached[rid] >= 3 + 40 - 1 for rid in range(6))
    assert tokens == sum(len(p.chunk_tokens) + sum(b.bit_count() for b in p.decode) for p in run.plans)


def test_preempted_requests_are_named_and_enter_again(pressed: tuple[Path, RecordedRun]) -> None:
    path, run = pressed
    plans = [e.what for e in entries_of(path) if isinstance(e.what, Planned)]
    preempted = Counter(rid for plan in plans for rid in plan.preempted)
    again = Counter(e.rid for plan in plans for e in plan.entered if not e.first)
    assert preempted.total() == run.scheduler.stats()["preempted"]
    assert 0 not in preempted, "the oldest request is never preempted"
    assert again == preempted


def test_a_window_is_what_belongs_to_its_steps(pressed: tuple[Path, RecordedRun]) -> None:
    path, _ = pressed
    entries = entries_of(path)
    part = list(window(entries, 10, 20))
    steps = [e.what.step for e in part if isinstance(e.what, Planned) and e.what.step is not None]
    assert steps == list(range(10, 22))  # 21 was planned before 20 came back
    assert isinstance(part[-1].what, Committed) and part[-1].what.step == 20
    assert list(window(entries, None, None)) == entries
    assert [e for e in entries if e.index >= part[0].index][: len(part)] == part


# ---- what is shown ------------------------------------------------------------------------------------------------


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.rec"
    with recorded(path, pages=10, steps_in_flight=1, in_batch_gain=1) as run:
        run.add(3, [1, 2, 3, 4, 5, 6], 2)
        run.step()
        run.add(4, [1, 2, 3, 4, 5, 7], 1)
        run.add(5, [1] * 60)
        run.finish()
        run.add(6, [8] * 8, 9)
        run.step()
        run.abort(6)
        run.finish()
    result = CliRunner().invoke(replay.main, [str(path), "--step", "--check", "--tree"])
    assert result.exit_code == 0
    lines = [line[17:].split("  |")[0] for line in result.output.split("radix tree")[0].splitlines()]
    forward = "  forward 1."
    assert [line.split(forward)[0] for line in lines] == [
        "arrive  r3 prompt 6 (cached 0), max 2",
        "plan    0  enter r3>s0  prefill r3[0:6]*  pages +2",
        "commit  0  tokens 1",
        "arrive  r4 prompt 6 (cached 4), max 1",
        "arrive  r5 prompt 60 (cached 0), max 5, refused: the prompt has 60 tokens and the context window holds 60, "
        "one of them for the answer",
        "plan    1  enter r4>s1(hit 4)  prefill r4[4:6]*  decode 1 (r3)  pages +2",
        "commit  1  tokens 2  finish r4:length r3:length",
        "arrive  r6 prompt 8 (cached 0), max 9",
        "plan    2  leave s1 s0  enter r6>s0  prefill r6[0:8]*  pages +2",
        "commit  2  tokens 1",
        "abort   r6",
        "end     closed",
    ]
    assert "waiting 1 running 1, pages free 8 evictable 0 locked 1 held 1" in result.output
    assert result.output.splitlines()[-1].endswith("plans, all identical; closed")
    result = CliRunner().invoke(replay.main, [str(path), "--step", "--from", "1", "--to", "1"])
    shown = [line.split()[2] for line in result.output.splitlines()[:-1]]
    assert shown == ["commit", "arrive", "arrive", "plan", "commit"]


def test_the_tree_as_text(tmp_path: Path) -> None:
    path = tmp_path / "tree.rec"
    with recorded(path, pages=40, page_size=2) as run:
        for rid, last in enumerate((1, 2, 3)):
            run.add(rid, [1, 2, 3, 4, last, last, 9], 1)
            run.finish()
        run.add(9, [5, 6, 7], 1, salt="tenant")
        run.finish()
    timeline = Timeline(Recording.open(path))
    entries = list(timeline)
    tree = timeline.scheduler.kv.tree
    assert entries[-1].gauges.evictable == tree.num_pages == 10
    lines = list(show_tree(tree))
    assert lines[0].startswith("radix tree: 16 tokens in 10 pages (0 locked, 10 evictable), 5 nodes")
    assert [line.split(", used")[0] for line in lines[1:]] == [
        "namespace ''",
        "└─ 4 tokens, pages 0-1",
        "   ├─ 3 tokens, pages 6-7",  # published in two parts: one edge all the same
        "   ├─ 3 tokens, pages 4-5",
        "   └─ 3 tokens, pages 2-3",
        "namespace 'tenant'",
        "└─ 3 tokens, pages 8-9",
    ]
    assert lines[3].endswith(": 3 3 9")
    assert list(show_tree(tree, depth=1))[3] == "   └─ ... 3 more nodes with 6 pages"
    cut = list(show_tree(tree, most=2))
    assert len([line for line in cut if "used at" in line]) == 2
    assert sum(int(line.split("... ")[1].split()[0]) for line in cut if "more nodes" in line) == 3


def check_trace(events: list[dict[str, Any]]) -> None:
    """The fields that the Trace Event Format asks for, per phase; slices of a thread nest."""
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    opened: Counter[tuple[str, int]] = Counter()
    flows: dict[str, set[int]] = {"s": set(), "f": set()}
    names: set[tuple[str, int, int]] = set()
    for event in events:
        assert {"ph", "pid", "tid", "name"} <= set(event)
        assert type(event["pid"]) is type(event["tid"]) is int and type(event["name"]) is str
        if event["ph"] != "M":
            assert type(event["ts"]) is float and event["ts"] >= 0
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0
                slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
            case "i":
                assert event["s"] in ("g", "p", "t")
            case "C":
                assert event["args"] and all(type(v) is int for v in event["args"].values())
            case "b" | "e":
                opened[event["cat"], event["id"]] += 1 if event["ph"] == "b" else -1
                assert opened[event["cat"], event["id"]] in (0, 1)
            case "s" | "f":
                flows[event["ph"]].add(event["id"])
                assert event["ph"] == "s" or event["bp"] == "e"
            case "M":
                assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
                (key,) = event["args"]
                assert key == ("name" if event["name"].endswith("_name") else "sort_index")
                names.add((event["name"], event["pid"], event["tid"]))
            case other:
                raise AssertionError(other)
    assert not +opened and flows["s"] == flows["f"]
    for event in events:
        assert ("process_name", event["pid"], 0) in names
        assert ("thread_name", event["pid"], event["tid"]) in names
    for spans in slices.values():
        stack: list[float] = []
        for begin, length in sorted(spans, key=lambda s: (s[0], -s[1])):
            while stack and stack[-1] <= begin + 1e-3:
                stack.pop()
            assert not stack or begin + length <= stack[-1] + 1e-3, "slices of a thread overlap"
            stack.append(begin + length)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_chrome_trace(tmp_path: Path, in_flight: int) -> None:
    path = tmp_path / "trace.rec"
    with recorded(path, pages=16, steps_in_flight=in_flight) as run:
        random_workload(run, 5)
        under_pressure(run)
    entries = entries_of(path)
    file = StringIO()
    count = write_trace(file, entries, in_flight)
    trace = json.loads(file.getvalue())
    events = trace["traceEvents"]
    assert len(events) == count and trace["displayTimeUnit"] == "ms"
    check_trace(events)
    stats = run.scheduler.stats()
    forward = [e for e in events if e["ph"] == "X" and e["pid"] == 2]
    assert len(forward) == stats["steps"]
    steps = [e.what for e in entries if isinstance(e.what, Committed) and e.what.times]
    assert [e["dur"] for e in forward] == [(s.times[2] - s.times[1]) / 1e3 for s in steps if s.times]
    decodes = [e for e in events if e["ph"] == "X" and e["pid"] == 4 and e["name"] == "decode"]
    prefills = [e for e in events if e["ph"] == "X" and e["name"].startswith("prefill")]
    assert len(decodes) == sum(b.bit_count() for p in run.plans for b in p.decode)
    assert len(prefills) == sum(len(p.chunk_slots) for p in run.plans)
    instants = Counter(e["name"].split()[0] for e in events if e["ph"] == "i")
    assert instants["preempt"] == stats["preempted"] > 0
    assert instants["copy"] == stats["copied_pages"] > 0
    assert instants["finish"] == stats["finished"]
    assert instants["hit"] == sum(e.cached > 0 for x in entries if isinstance(x.what, Planned) for e in x.what.entered)


def test_a_trace_across_a_loss_of_the_workers(tmp_path: Path) -> None:
    path = tmp_path / "reset.rec"
    with recorded(path, steps_in_flight=2) as run:
        for rid in range(7):
            run.add(rid, [rid, 1, 2, 3], 8)
        for _ in range(5):
            run.step()
        run.lose_workers(1)
        run.finish()
    file = StringIO()
    entries = entries_of(path)
    write_trace(file, entries, 2)
    events = json.loads(file.getvalue())["traceEvents"]
    check_trace(events)
    assert totals(entries)["prompt_tokens"] == run.scheduler.stats()["prompt_tokens"] == 7 * 4
    waits = [e for e in events if e["ph"] == "b"]
    assert len(waits) == sum(len(e.what.entered) for e in entries if isinstance(e.what, Planned)) == 12


def test_requests_that_end_with_an_error_are_shown_to_end(tmp_path: Path) -> None:
    """One that the workers die of, one that ended just before they did, and one whose grammar cannot be followed."""
    path = tmp_path / "errors.rec"
    with recorded(path, steps_in_flight=1) as run:
        run.add(1, [1, 2, 3], 1)
        run.add(2, [2, 2, 3], 9)
        run.step()
        for epoch in range(1, 4):
            run.scheduler.plan(run.tick())
            run.lose_workers(epoch)
        run.add(3, [3, 2, 3], 9)
        plan = run.scheduler.plan(run.tick())
        times = array("q", (run.tick(), run.tick(), run.tick()))
        result = replace(run.worker.execute(plan), times=times, failed=ints(0), problems=("no token is possible",))
        run.take(run.scheduler.commit(result, run.tick()))
        run.finish()
    assert [error.rid for error in run.errors] == [2, 3]
    entries = entries_of(path)
    assert [e.what.condemned for e in entries if isinstance(e.what, Reset)] == [(), (2,), ()]
    assert [e.what.failed for e in entries if isinstance(e.what, Committed)] == [(), (3,)]
    shown = CliRunner().invoke(replay.main, [str(path), "--step"]).output
    assert "condemn r2" in shown and "fail r3" in shown
    file = StringIO()
    write_trace(file, entries, 1)
    events = json.loads(file.getvalue())["traceEvents"]
    check_trace(events)
    waits = Counter(e["name"] for e in events if e["ph"] == "b")
    assert waits == {"r1 waits": 1, "r2 waits": 2, "r3 waits": 1}, "nobody waits who has ended"


def test_a_part_of_a_trace(tmp_path: Path, pressed: tuple[Path, RecordedRun]) -> None:
    path, _ = pressed
    out = tmp_path / "trace.json"
    result = CliRunner().invoke(replay.main, [str(path), "--chrome", str(out), "--from", "10", "--to", "30"])
    assert result.exit_code == 0, result.output
    events = json.loads(out.read_text())["traceEvents"]
    check_trace(events)
    assert 20 <= sum(e["ph"] == "X" and e["pid"] == 2 for e in events) <= 22
