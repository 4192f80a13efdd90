"""The processes of a cluster under test: hurting them, seeing that they are all there again, and measuring them."""

import contextlib
import os
import re
import signal
from pathlib import Path

from tests.faults.checks import Measure
from tests.faults.plan import Fault, Kind, Shape
from tests.integration.cluster import Cluster

_BROKEN = re.compile(r"will be replaced|workers are restarted")
_WHOLE = "everybody is there"


class Processes:
    """What the run directory and the log of a cluster say of its processes."""

    def __init__(self, cluster: Cluster, shape: Shape):
        self._cluster = cluster
        self._shape = shape
        self._killed: list[tuple[str, int]] = []  # another one must take the place
        self._frozen: list[tuple[str, int]] = []  # the same, if nobody wakes it

    @property
    def pids(self) -> dict[str, int]:
        return dict(self._cluster.info["pids"])

    @property
    def restarts(self) -> dict[str, int]:
        return dict(self._cluster.info["restarts"])

    def can_be(self, fault: Fault) -> bool:
        """Whether the process is there: one that has died takes its time to come back."""
        return fault.kind in (Kind.RENEW, Kind.SUSPEND) or fault.target in self.pids

    def hurt(self, fault: Fault) -> list[int]:
        """Do it; the processes that stand still until `go_on`."""
        pids = self.pids
        match fault.kind:
            case Kind.RENEW:
                self._cluster.process.send_signal(signal.SIGHUP)
                return []
            case Kind.SUSPEND:
                stopped = sorted(pids.values())  # the launcher first: its children were started after it
            case Kind.PAUSE:
                stopped = [pids[fault.target]]
            case Kind.KILL:
                self._killed.append((fault.target, pids[fault.target]))
                _signal([pids[fault.target]], signal.SIGKILL)
                return []
            case Kind.FREEZE:
                self._frozen.append((fault.target, pids[fault.target]))
                _signal([pids[fault.target]], signal.SIGSTOP)
                return []
        _signal(stopped, signal.SIGSTOP)
        return stopped

    def go_on(self, pids: list[int]) -> None:
        """End a pause; also for one that was frozen before it."""
        self._frozen = [(name, pid) for name, pid in self._frozen if pid not in pids]
        _signal(pids, signal.SIGCONT)

    def whole(self) -> bool:
        """Whether every process lives, those that were hurt are replaced, and the cluster said so."""
        pids = self.pids
        there = all(name in pids and _lives(pids[name]) for name in self._shape.processes)
        replaced = all(pids.get(name) != pid for name, pid in (*self._killed, *self._frozen))
        return there and replaced and self._announced()

    def _announced(self) -> bool:
        """The launcher's last word on its units, the gateway's aside."""
        lines = [line for line in self._cluster.log.splitlines() if "the gateway will be replaced" not in line]
        broken = max((i for i, line in enumerate(lines) if _BROKEN.search(line)), default=-1)
        return broken < 0 or any(_WHOLE in line for line in lines[broken:])

    def measure(self) -> dict[str, tuple[int, Measure]]:
        """Of every process that lives: its id and size."""
        found = {}
        for name, pid in self.pids.items():
            with contextlib.suppress(OSError):
                found[name] = (pid, Measure(len(os.listdir(f"/proc/{pid}/fd")), _rss_anon(pid)))  # noqa: PTH208
        return found


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _rss_anon(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 0


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
