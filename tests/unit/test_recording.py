"""Recordings: replayed to identical plans, changes detected, damaged files refused, trouble with the file survived."""

import logging
import os
import resource
import stat
from array import array
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import pytest
from click.testing import CliRunner

import launch
from common.codec import PROTOCOL_VERSION, decode, encode
from common.config import ADMISSIONS, POLICIES, SchedulerConfig
from common.messages import AddRequest, StepPlan, StepResult, ints
from scheduler_proc import replay
from scheduler_proc.event_loop import new_recorder
from scheduler_proc.invariants import check
from scheduler_proc.recorder import Recorder
from scheduler_proc.recording import FORMAT, Kind, Recording, RecordingError
from scheduler_proc.scheduler import ProtocolError
from scheduler_proc.timeline import Diverged, Timeline
from tests.unit.recorded import MS, random_workload, recorded


def replayed(path: Path) -> Timeline:
    timeline = Timeline(Recording.open(path), check)
    for _ in timeline:
        pass
    return timeline


def rewritten(path: Path, change: Callable[[list[Any]], None]) -> Path:
    """A copy of a recording with its records, header first, changed."""
    items = list(msgpack.Unpacker(path.open("rb")))
    change(items)
    copy = path.with_suffix(".changed")
    copy.write_bytes(b"".join(map(msgpack.packb, items)))
    return copy


def find(items: list[Any], kind: Kind, number: int = 0) -> int:
    return [i for i, item in enumerate(items) if item[0] == kind and item[-1] is not None][number]


@pytest.mark.soak
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_plans_are_identical(tmp_path: Path, policy: str, admission: str, in_flight: int) -> None:
    for seed in range(4):
        path = tmp_path / f"{seed}.rec"
        settings = {"prefix_cache": seed != 3, "itl_target_ms": 1.2 * (seed % 2), "page_size": (4, 1, 8, 3)[seed]}
        settings |= {"host_pages": (20, 0, 5, 0)[seed], "snapshots": (None, 3, None, 0)[seed]}
        settings["in_batch_gain"] = (32, 4)[seed % 2]
        with recorded(path, policy=policy, admission=admission, steps_in_flight=in_flight, **settings) as run:
            random_workload(run, seed, requests=20)
        timeline = replayed(path)
        assert timeline.plans == len(run.plans) > 20
        assert timeline.scheduler.stats() == run.scheduler.stats()
        frames = [r.frame for r in Recording.open(path).records() if r.kind is Kind.PLAN and r.frame is not None]
        assert frames == [encode(plan) for plan in run.plans]
        assert timeline.why == "closed"


@pytest.mark.parametrize("crashes", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_loss_of_the_workers_is_replayed(tmp_path: Path, policy: str, crashes: int) -> None:
    path = tmp_path / "reset.rec"
    with recorded(path, policy=policy) as run:
        for epoch in range(1, 4):
            for rid in range(3 * epoch, 3 * epoch + 3):
                run.add(rid, [1, 2, 3, 4, 5, 6, 7, rid], 9)
            for _ in range(2 + epoch):
                run.step()
            run.lose_workers(epoch, crashed=epoch <= crashes)
        run.finish()
    assert (run.output == 9 * 9 and not run.errors) if crashes == 1 else run.errors
    timeline = replayed(path)
    assert timeline.plans == len(run.plans)
    assert timeline.scheduler.stats() == run.scheduler.stats()


def test_a_recurrent_model_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "states.rec"
    with recorded(path, snapshots=8, in_batch_gain=4) as run:
        random_workload(run, 1, requests=20)
    timeline = replayed(path)
    assert timeline.plans == len(run.plans)
    stats = timeline.scheduler.stats()
    assert stats == run.scheduler.stats() and stats["total_snapshots"] == 8 and stats["loaded_snapshots"] > 0
    result = CliRunner().invoke(replay.main, [str(path), "--step", "--tree"])
    assert result.exit_code == 0 and "  snapshot r" in result.output and "snapshots after pages" in result.output


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two requests, the second one waits for the first, with a stop token that is never drawn."""
    path = tmp_path / "small.rec"
    with recorded(path, max_running=1) as run:
        run.add(7, [1, 2, 3, 4, 5, 6], 4, stop=(49,), deadline_ms=500)
        run.add(8, [1, 2, 3, 4, 9], 3)
        run.finish()
    assert not run.errors and run.output == 7
    return path


def test_a_changed_prompt_token_is_detected(small: Path) -> None:
    def change(items: list[Any]) -> None:
        msg = decode(items[1][2], {AddRequest})
        items[1][2] = encode(replace(msg, prompt=ints(1, 2, 3, 4, 5, 7)))

    with pytest.raises(Diverged, match=r"step 0 differs in chunk_tokens: recorded \[1, 2, 3, 4, 5, 6\], replayed"):
        replayed(rewritten(small, change))


def test_a_changed_sampled_token_is_detected(small: Path) -> None:
    def change(items: list[Any]) -> None:
        at = find(items, Kind.COMMIT, 1)
        items[at][2] = encode(replace(decode(items[at][2], {StepResult}), tokens=ints(49)))  # a stop token

    with pytest.raises(Diverged, match="step 3 was planned, the replay plans nothing"):
        replayed(rewritten(small, change))


def test_a_changed_time_is_detected(small: Path) -> None:
    def late(items: list[Any]) -> None:
        items[find(items, Kind.EXPIRE, 1)][1] += 500 * MS  # past the deadline of request 7

    with pytest.raises(Diverged):
        replayed(rewritten(small, late))


def test_a_changed_arrival_is_detected(tmp_path: Path) -> None:
    """One step of priority is worth 50 ms of waiting: 30 ms later overtakes, 60 ms later does not."""
    path = tmp_path / "priority.rec"
    with recorded(path, max_running=1, policy="priority") as run:
        run.add(1, [1, 2, 3])
        run.tick(30 * MS)
        run.add(2, [4, 5, 6], priority=1)
        run.finish()
    assert list(run.plans[0].chunk_tokens) == [4, 5, 6]

    def later(items: list[Any]) -> None:
        items[2][1] += 30 * MS

    with pytest.raises(Diverged, match=r"chunk_tokens: recorded \[4, 5, 6\], replayed \[1, 2, 3\]"):
        replayed(rewritten(path, later))


def test_a_changed_step_time_is_detected(tmp_path: Path) -> None:
    """Chunks are sized by the step times that were measured."""
    path = tmp_path / "itl.rec"
    with recorded(path, itl_target_ms=1.6, max_batch_tokens=40, chunk_tokens=40, prefix_cache=False) as run:
        run.add(0, [1], 40)
        for rid in range(1, 8):
            run.add(rid, [rid] * 30, 2)
        run.finish()

    def slower(items: list[Any]) -> None:
        for i in range(20):
            at = find(items, Kind.COMMIT, i)
            result = decode(items[at][2], {StepResult})
            items[at][2] = encode(replace(result, times=array("q", (*result.times[:2], result.times[2] + 5 * MS))))

    with pytest.raises(Diverged, match="chunk_lens"):
        replayed(rewritten(path, slower))


def test_a_changed_plan_is_detected_and_named(small: Path) -> None:
    def change(items: list[Any]) -> None:
        at = find(items, Kind.PLAN, 3)
        items[at][2] = encode(replace(decode(items[at][2], {StepPlan}), epoch=3))

    changed = rewritten(small, change)
    with pytest.raises(Diverged, match="step 3 differs in epoch: recorded 3, replayed 0"):
        replayed(changed)
    result = CliRunner().invoke(replay.main, [str(changed)])
    assert result.exit_code == 1 and "step 3 differs in epoch" in result.output


@pytest.mark.parametrize(
    ("kind", "problem"),
    [(Kind.COMMIT, "replay plans nothing"), (Kind.PLAN, "step_id"), (Kind.HANDLE, "chunk_lens")],
)
def test_a_missing_record_is_detected(small: Path, kind: Kind, problem: str) -> None:
    with pytest.raises(Diverged, match=problem):
        replayed(rewritten(small, lambda items: items.pop(find(items, kind))))


def test_a_plan_out_of_nothing_is_detected(small: Path) -> None:
    def change(items: list[Any]) -> None:
        items[find(items, Kind.PLAN)][2] = None

    with pytest.raises(Diverged, match="nothing was planned, the replay plans step 0"):
        replayed(rewritten(small, change))


def test_a_failure_is_recorded_and_replayed(tmp_path: Path) -> None:
    path = tmp_path / "failed.rec"
    with pytest.raises(ProtocolError), recorded(path) as run:
        run.add(1, [1, 2, 3])
        run.step()
        run.scheduler.commit(StepResult(99, 0, "0", ints(1), array("q")), run.now)
    with pytest.raises(Diverged, match=r"raises ProtocolError.*the recorded scheduler ended like this as well"):
        replayed(path)
    assert [r.why for r in Recording.open(path).records()][-1].startswith("ProtocolError: result of step 99")


# ---- files --------------------------------------------------------------------------------------------------------


def test_a_file_cut_off_anywhere_gives_what_is_whole(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    unpacker = msgpack.Unpacker(small.open("rb"))
    ends = []
    for _ in unpacker:
        ends.append(unpacker.tell())
    cut_file = tmp_path / "cut.rec"
    cut_file.write_bytes(data)
    for cut in reversed(range(len(data))):
        os.truncate(cut_file, cut)
        if cut < ends[0]:
            with pytest.raises(RecordingError):
                Recording.open(cut_file)
            continue
        records = list(Recording.open(cut_file).records())
        whole = sum(end <= cut for end in ends) - 1
        assert [r.index for r in records] == list(range(whole + 1))
        assert records[-1].kind is Kind.END
        assert records[-1].why.startswith("not closed")
        assert ("bytes of an unfinished record" in records[-1].why) == (cut not in ends)
        if cut % 64 == 0:
            replayed(cut_file)


def test_damage_is_refused_clearly(small: Path, tmp_path: Path) -> None:
    """Whatever a flipped byte does, it is a readable recording, a RecordingError or a difference, never a crash."""
    data = bytearray(small.read_bytes())
    header = msgpack.Unpacker(small.open("rb"))
    header.skip()
    damaged, random = tmp_path / "damaged.rec", Random(1)
    outcomes = set()
    for _ in range(400):
        at, flip = random.randrange(len(data)), 1 << random.randrange(8)
        data[at] ^= flip
        damaged.write_bytes(data)
        data[at] ^= flip
        try:
            recording = Recording.open(damaged)
            if at >= header.tell():
                replayed(damaged)
            outcomes.add(type(recording))
        except (RecordingError, Diverged) as error:
            assert str(error)
            outcomes.add(type(error))
    assert outcomes == {Recording, RecordingError, Diverged}


def header(*cache: Any, **config: Any) -> bytes:
    """`cache` are prefix_cache, host_pages, recurrent and snapshots."""
    values = asdict(SchedulerConfig(**config))
    return msgpack.packb(["rhizome-recording", FORMAT, PROTOCOL_VERSION, values, 9, 4, *cache, 20, 0, 50])


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "the file ends inside its header"),
        (b"\x00", "not a recording"),
        (b"hello, this is no recording at all", "not a recording"),
        (b"\xc1", "not a recording"),
        (b"\xdd\xff\xff\xff\xff", "not a recording"),
        (msgpack.packb(["rhizome-recording", 99, PROTOCOL_VERSION]), "recorded in format 99"),
        (msgpack.packb(["rhizome-recording", FORMAT, PROTOCOL_VERSION]), "3 fields"),
        (
            msgpack.packb(["rhizome-recording", FORMAT, PROTOCOL_VERSION, {"a": 1}, 1, 1, True, 0, False, 0, 2, 0, 9]),
            "not that of this version",
        ),
        (header(True, 9, True, 0), "recurrent in the header goes with no host tier"),
        (header(True, 0, True, 0, speculation="ngram"), "recurrent in the header goes with no host tier"),
        (header(True, 0, 1, 0), "recurrent in the header is 1"),
        (header(True, 0, True, -1), "snapshots in the header is -1"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=problem):
        Recording.open(path)
    result = CliRunner().invoke(replay.main, [str(path)])
    assert result.exit_code == 1 and problem in result.output


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ([9, 1], "known kind"),
        ("text", "known kind"),
        ([Kind.PLAN, -1, None], "no time"),
        ([Kind.PLAN, 1], "has 2 fields"),
        ([Kind.EXPIRE, 1, 2], "has 3 fields"),
        ([Kind.HANDLE, 1, None], "wrong field"),
        ([Kind.HANDLE, 1, b"x"], "bad frame"),
        ([Kind.END, 1, b"x"], "wrong field"),
        ([Kind.RESET, 1, -1, True], "wrong field"),
        ([Kind.RESET, 1, 1, 1], "wrong field"),
        ([Kind.RESET, 1, 1], "fields"),
    ],
)
def test_a_bad_record_is_named(small: Path, record: object, problem: str) -> None:
    with pytest.raises(RecordingError, match=f"record 2.*{problem}"):
        replayed(rewritten(small, lambda items: items.insert(3, record)))


def test_nothing_may_follow_the_end(small: Path) -> None:
    with pytest.raises(RecordingError, match="follows the end"):
        replayed(rewritten(small, lambda items: items.append([Kind.EXPIRE, 1])))


@pytest.mark.parametrize("value", [0, -1, True, "2", None, 2**31 + 1])
def test_a_bad_header_field_is_named(small: Path, value: object) -> None:
    def change(items: list[Any]) -> None:
        items[0][4] = value

    with pytest.raises(RecordingError, match="num_pages in the header"):
        Recording.open(rewritten(small, change))


@pytest.mark.parametrize(("name", "value"), [("policy", 3), ("policy", "magic"), ("max_running", True)])
def test_a_bad_configuration_is_named(small: Path, name: str, value: object) -> None:
    def change(items: list[Any]) -> None:
        items[0][3][name] = value

    with pytest.raises(RecordingError, match=name.replace("_", "[-_]")):
        Recording.open(rewritten(small, change))


def test_the_file_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "private.rec"
    before = os.umask(0)
    try:
        Recorder(path).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        Recorder(path)
    link = tmp_path / "link.rec"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        Recorder(link)


def test_launch_refuses_a_file_that_exists(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    for record, problem in ((tmp_path / "config.json", "exists already"), (tmp_path / "no" / "file", "directory")):
        result = CliRunner().invoke(launch.main, ["--model", str(tmp_path), "--record", str(record)])
        assert result.exit_code == 1 and "--record" in result.output and problem in result.output


def test_the_size_limit_ends_the_recording_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "full.rec"
    with recorded(path, max_bytes=2000) as run:
        random_workload(run, 1)
    assert path.stat().st_size < 2100
    timeline = replayed(path)
    assert 0 < timeline.plans < len(run.plans)
    assert timeline.why == "the size limit was reached"
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def test_a_full_disk_ends_the_recording_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "disk.rec"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # stands for a disk with 1000 bytes left
    try:
        with recorded(path) as run:
            random_workload(run, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not run.scheduler.has_work
    assert path.stat().st_size == 1000
    assert 0 < replayed(path).plans < len(run.plans)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def test_an_idle_scheduler_has_written_everything(tmp_path: Path) -> None:
    path = tmp_path / "idle.rec"
    with recorded(path) as run:
        run.add(1, [1, 2, 3])
        run.finish()
        assert replayed(path).plans == len(run.plans)
        assert replayed(path).why == "not closed: its process was killed or still runs"


def test_a_scheduler_that_replaces_a_dead_one_serves_without_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.rec"
    for term in (0, 2):
        recorder = new_recorder(path, term)
        assert recorder is not None
        recorder.close()
    with pytest.raises(FileExistsError):
        new_recorder(path, 0)
    assert new_recorder(path, 2) is None and "File exists" in caplog.text
    assert new_recorder(tmp_path / "removed" / "run.rec", 1) is None and "No such file" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.rec", "run.rec.2"]
