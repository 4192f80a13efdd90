"""Run directories: private, held by one living cluster, healed after a dead one, and found by clients."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common import run_dir
from common.run_dir import CLUSTER_FILE, RunDir, RunDirError, base_dir, find_cluster, is_alive

ROOT = Path(__file__).parents[2]
LEFTOVERS = ("config.json", "cluster.json", "cluster.json.tmp", "store-0", "plan0-0.sock", "frontend.sock")


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty place where run directories are made and looked for."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return base_dir()


def die_holding(path: Path) -> None:
    """Let another process take the directory, fill it like a cluster and be killed with SIGKILL."""
    code = (
        "import os, signal, sys; from pathlib import Path; from common.run_dir import RunDir\n"
        "held = RunDir(Path(sys.argv[1])); held.write_cluster({'addresses': {}})\n"
        "[(held.path / name).write_text('x') for name in sys.argv[2:]]\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path), *LEFTOVERS], cwd=ROOT, timeout=60)
    assert ended.returncode == -9


def test_made_private_and_removed(base: Path) -> None:
    held = RunDir()
    assert held.path.parent == base
    for path in (base, held.path):
        assert path.stat().st_mode & 0o777 == 0o700
    for name in LEFTOVERS:
        (held.path / name).touch()
    held.close()
    assert list(base.iterdir()) == []


def test_a_named_directory_that_existed_stays_with_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    held = RunDir(tmp_path)
    held.write_cluster({})
    held.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_a_named_directory_is_made_with_its_parents(tmp_path: Path) -> None:
    held = RunDir(tmp_path / "a" / "b")
    assert held.path.stat().st_mode & 0o777 == 0o700
    held.close()
    assert not (tmp_path / "a" / "b").exists()


def test_where_no_directory_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match=f"^{tmp_path}/file/run: Not a directory"):
        RunDir(tmp_path / "file" / "run")


def test_a_living_cluster_is_respected(tmp_path: Path) -> None:
    held = RunDir(tmp_path)
    held.write_cluster({"addresses": {"frontend": "x"}})
    with pytest.raises(RunDirError, match="living cluster"):
        RunDir(tmp_path)
    assert find_cluster(tmp_path) == {"addresses": {"frontend": "x"}}
    held.close()
    RunDir(tmp_path).close()


def test_cleaners_of_temporary_directories_pass_over_a_living_cluster(tmp_path: Path) -> None:
    """systemd-tmpfiles leaves a directory alone on which it gets no lock."""

    def cleaned() -> bool:
        handle = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(handle)

    held = RunDir(tmp_path)
    assert not cleaned()
    held.close()
    assert cleaned()


def test_a_look_at_the_directory_does_not_hold_it(tmp_path: Path) -> None:
    RunDir(tmp_path).close()
    (tmp_path / run_dir.LOCK_FILE).touch()
    assert not is_alive(tmp_path)
    held = RunDir(tmp_path)
    assert is_alive(tmp_path) and is_alive(tmp_path)
    held.close()


def test_a_dead_cluster_is_not_found_and_healed(tmp_path: Path) -> None:
    die_holding(tmp_path)
    assert {*LEFTOVERS, run_dir.LOCK_FILE} == {entry.name for entry in tmp_path.iterdir()}
    assert not is_alive(tmp_path)
    with pytest.raises(RunDirError, match="no cluster is running"):
        find_cluster(tmp_path)
    held = RunDir(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [run_dir.LOCK_FILE]
    held.close()


def test_directories_of_dead_clusters_are_removed_and_living_ones_stay(base: Path) -> None:
    first = RunDir()
    living = RunDir(base / "living")
    die_holding(base / "dead")
    die_holding(base / "dead-with-notes")
    (base / "dead-with-notes" / "notes.txt").write_text("mine")
    (base / "stray-file").touch()
    first.close()
    second = RunDir()
    names = {entry.name for entry in base.iterdir()}
    assert names == {second.path.name, "living", "dead-with-notes", "stray-file"}
    second.close()
    living.close()


def test_the_pid_of_a_dead_cluster_may_come_again(base: Path) -> None:
    base.mkdir(mode=0o700)
    die_holding(base / str(os.getpid()))
    held = RunDir()
    assert held.path == base / str(os.getpid())
    held.close()
    assert list(base.iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o701, 0o770])
def test_a_directory_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(RunDirError, match=f"{mode:04o}.*0700"):
        RunDir(tmp_path)
    tmp_path.chmod(0o700)


def test_an_open_base_is_refused_and_not_searched(base: Path) -> None:
    held = RunDir()
    held.write_cluster({})
    assert find_cluster() == {}
    base.chmod(0o755)
    with pytest.raises(RunDirError, match="0700"):
        RunDir()
    with pytest.raises(RunDirError, match="no cluster"):
        find_cluster()
    base.chmod(0o700)
    held.close()


def test_a_link_or_a_file_is_not_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(RunDirError, match="not a directory of this user"):
            RunDir(tmp_path / name)


def test_no_cluster(base: Path, tmp_path: Path) -> None:
    for path in (None, tmp_path, tmp_path / "missing"):
        with pytest.raises(RunDirError, match=r"no cluster is running.*python launch\.py"):
            find_cluster(path)


def test_a_starting_cluster_says_so(base: Path) -> None:
    held = RunDir()
    with pytest.raises(RunDirError, match="still starting"):
        find_cluster()
    with pytest.raises(RunDirError, match="still starting"):
        find_cluster(held.path)
    held.write_cluster({"version": 1})
    assert find_cluster() == find_cluster(held.path) == {"version": 1}
    held.close()


def test_of_several_clusters_one_must_be_chosen(base: Path) -> None:
    one, two = RunDir(), RunDir(base / "other")
    one.write_cluster({"number": 1})
    assert find_cluster() == {"number": 1}
    two.write_cluster({"number": 2})
    with pytest.raises(RunDirError) as caught:
        find_cluster()
    message = str(caught.value)
    assert "--run-dir" in message and str(one.path) in message and str(two.path) in message
    assert find_cluster(two.path) == {"number": 2}
    two.close()
    one.close()


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_damaged_cluster_file_is_named(tmp_path: Path, text: str) -> None:
    held = RunDir(tmp_path)
    (tmp_path / CLUSTER_FILE).write_text(text)
    with pytest.raises(RunDirError, match=CLUSTER_FILE):
        find_cluster(tmp_path)
    held.close()


def test_the_cluster_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    """A reader that opened the old file still reads all of it."""
    held = RunDir(tmp_path)
    held.write_cluster({"generation": 1})
    with (tmp_path / CLUSTER_FILE).open() as old:
        held.write_cluster({"generation": 2, "padding": "x" * 10_000})
        assert json.load(old) == {"generation": 1}
    assert find_cluster(tmp_path)["generation"] == 2
    held.close()


def test_a_lock_file_removed_under_our_hands_is_not_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the lock and locking it, the cluster before may remove it: then another could lock a new one."""
    real_flock = run_dir.fcntl.flock
    removed = []

    def flock_after_removal(handle: int, how: int) -> None:
        if not removed:
            removed.append((tmp_path / run_dir.LOCK_FILE).unlink())
        real_flock(handle, how)

    monkeypatch.setattr(run_dir.fcntl, "flock", flock_after_removal)
    held = RunDir(tmp_path)
    assert removed and is_alive(tmp_path)
    with pytest.raises(RunDirError, match="living cluster"):
        RunDir(tmp_path)
    held.close()


@pytest.mark.parametrize("name", ["config.json", "control.sock", "store-0"])
def test_a_directory_with_such_files_of_somebody_else_is_not_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(RunDirError, match=name):
        RunDir(tmp_path)
    assert (tmp_path / name).read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_files_that_only_look_alike_stay(tmp_path: Path) -> None:
    foreign = {"docker.sock", "store-photos.zip", "store-x", "config.json.bak"}
    for name in foreign - {"store-x"}:
        (tmp_path / name).write_text("mine")
    (tmp_path / "store-x").mkdir()
    die_holding(tmp_path)
    RunDir(tmp_path).close()
    assert {entry.name for entry in tmp_path.iterdir()} == foreign
