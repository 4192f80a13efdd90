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
    quotas = [quota for group in _groups("cpu", proc, cgroup) if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def available_memory(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Bytes that this machine, or a control group that this process is in, can give without swapping."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: all of the memory, as what is in use is not known
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rooms = [room for group in _groups("memory", proc, cgroup) if (room := _room(group)) is not None]
    return min([available, *rooms])


def _groups(controller: str, proc: Path, cgroup: Path) -> Iterator[Path]:
    """Directories of the control groups that this process is in, with those above them. In a container, the path that
    the kernel names may be that of the host: what is mounted as the root is the container's own group then."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        roots = (cgroup / controller, cgroup / controllers) if controllers else (cgroup,)
        inside = Path(path.lstrip("/"))
        for root in roots:
            yield root
            if ".." not in inside.parts:  # else it is outside of what is mounted
                yield from (root / inside, *(root / above for above in inside.parents))


def _room(group: Path) -> int | None:
    """Bytes up to the limit of a control group. What it uses includes files that were read, as those of the weights:
    the kernel drops them where memory is wanted."""
    for limit, used, dropped in (
        ("memory.max", "memory.current", ("inactive_file", "active_file")),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    ):
        try:
            room = int((group / limit).read_text()) - int((group / used).read_text())
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return max(0, room + sum(int(counts[name]) for name in dropped))
        except (OSError, ValueError, KeyError):  # no such control group, or "max"
            continue
    return None


def _quota(group: Path) -> float | None:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = (int(word) for name in names for word in (group / name).read_text().split())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if quota > 0 and period > 0:  # -1: none
            return quota / period
    return None
