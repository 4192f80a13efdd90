"""How many CPUs a process may use, in control groups of both versions."""

import os
from pathlib import Path

import pytest

from worker_proc.cpu.machine import cpu_quota, num_cpus


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("of_process", "files", "quota"),
    [
        ("0::/", {}, None),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2.0),
        ("0::/a/b", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "200000 100000"}, 0.5),
        ("0::/docker/of/the/host", {"cpu.max": "300000 100000"}, 3.0),
        ("0::/../outside", {"cpu.max": "300000 100000", "../outside/cpu.max": "100 100"}, 3.0),
        ("4:memory:/\n1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2.5),
        (
            "3:cpuset:/\n2:cpu,cpuacct:/docker/x",
            {"cpu,cpuacct/cpu.cfs_quota_us": "400000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            4.0,
        ),
        (
            "2:cpu,cpuacct:/a",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "20000", "cpu,cpuacct/a/cpu.cfs_period_us": "10000"},
            2.0,
        ),
        ("3:cpuset:/", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("0::/", {"cpu.max": "nonsense"}, None),
    ],
)
def test_the_least_quota_of_a_process_and_what_is_above_it_counts(
    of_process: str, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    write(tmp_path, {"proc/self/cgroup": of_process, **{f"cgroup/{name}": text for name, text in files.items()}})
    assert cpu_quota(tmp_path / "proc", tmp_path / "cgroup") == quota


def test_cpus_are_those_of_the_process_or_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    assert num_cpus(proc, cgroup) == 8, "no control groups"
    for quota, cpus in (("max", 8), ("150000", 2), ("10000", 1), ("6400000", 8)):
        write(tmp_path, {"proc/self/cgroup": "0::/", "cgroup/cpu.max": f"{quota} 100000"})
        assert num_cpus(proc, cgroup) == cpus
