"""How many CPUs and how much memory a process may use, in control groups of both versions."""

import os
from pathlib import Path

import pytest

from worker_proc.cpu.machine import available_memory, cpu_quota, num_cpus


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


FILES = "anon 500\ninactive_file 700\nactive_file 100\nshmem 60"
TOTALS = "cache 1\ninactive_file 1\nactive_file 1\ntotal_inactive_file 700\ntotal_active_file 100"
LEAST = 2000 * 1024  # MemAvailable


@pytest.mark.parametrize(
    ("of_process", "files", "available"),
    [
        ("0::/", {}, LEAST),
        ("0::/", {"memory.max": "max", "memory.current": "5", "memory.stat": FILES}, LEAST),
        ("0::/", {"memory.max": "99999999", "memory.current": "5", "memory.stat": FILES}, LEAST),
        # files that were read are dropped by the kernel where memory is wanted
        ("0::/", {"memory.max": "4096", "memory.current": "4000", "memory.stat": FILES}, 896),
        ("0::/", {"memory.max": "4096", "memory.current": "5000", "memory.stat": FILES}, 0),
        ("0::/docker/x", {"memory.max": "4096", "memory.current": "4000", "memory.stat": FILES}, 896),
        ("0::/a/b", {"a/memory.max": "4096", "a/memory.current": "4000", "a/memory.stat": FILES}, 896),
        (
            "0::/a",
            {
                **{"memory.max": "9000", "memory.current": "8000", "memory.stat": FILES},
                **{"a/memory.max": "4096", "a/memory.current": "4000", "a/memory.stat": FILES},
            },
            896,
        ),
        (
            "4:memory:/\n1:cpu:/",
            {
                "memory/memory.limit_in_bytes": "4096",
                "memory/memory.usage_in_bytes": "4000",
                "memory/memory.stat": TOTALS,
            },
            896,
        ),
        (
            "4:memory:/a",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "4000",
                "memory/memory.stat": TOTALS,
                "memory/a/memory.limit_in_bytes": "4096",
                "memory/a/memory.usage_in_bytes": "4000",
                "memory/a/memory.stat": TOTALS,
            },
            896,
        ),
    ],
)
def test_available_memory_is_what_the_machine_and_each_control_group_can_give(
    of_process: str, files: dict[str, str], available: int, tmp_path: Path
) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 999999 kB\nMemAvailable:    2000 kB", "proc/self/cgroup": of_process})
    write(tmp_path, {f"cgroup/{name}": text for name, text in files.items()})
    assert available_memory(tmp_path / "proc", tmp_path / "cgroup") == available


def test_memory_is_known_where_the_kernel_tells_nothing(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "none", tmp_path / "none") > 2**20
