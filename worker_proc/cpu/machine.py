"""What this machine, or the container that it is, lets a process use."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def num_cpus(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """CPUs that this process may run on, or as many as its quota of their time pays for, rounded up."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(proc, cgroup)
    return cpus if quota is None else max(1, min(cpus, math.ceil(quota)))


def cpu_quota(proc: Path, cgroup: Path) -> float | None:
    """CPUs' worth of time that the control groups of this process grant it, the least of its own and those above; None
    without a limit. Both versions of control groups are known."""
    quotas = [quota for group in _cpu_groups(proc, cgroup) if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def available_memory(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Bytes that this machine, or the container that it is, can give without swapping."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: all of the memory, as what is in use is not known
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            room = int((cgroup / limit).read_text()) - int((cgroup / used).read_text())
        except (OSError, ValueError):  # no such control group, or "max"
            continue
        available = min(available, max(room, 0))
    return available


def _cpu_groups(proc: Path, cgroup: Path) -> Iterator[Path]:
    """Directories of the control groups that this process is in, with those above them. In a container, the path that
    the kernel names may be that of the host: what is mounted as the root is the container's own group then."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        roots = (cgroup / "cpu", cgroup / controllers) if controllers else (cgroup,)
        inside = Path(path.lstrip("/"))
        for root in roots:
            yield root
            if ".." not in inside.parts:  # else it is outside of what is mounted
                yield from (root / inside, *(root / above for above in inside.parents))


def _quota(group: Path) -> float | None:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = (int(word) for name in names for word in (group / name).read_text().split())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if quota > 0 and period > 0:  # -1: none
            return quota / period
    return None
