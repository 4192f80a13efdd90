"""How much of the processors went to programs that do not belong to a measurement."""

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

STAT = Path("/proc/stat")
USER, NICE, SYSTEM, _IDLE, _WAIT, IRQ, SOFTIRQ, STEAL = range(8)


@dataclass(slots=True)
class OtherLoad:
    """Use it in a `with` statement around everything that is started and ended in it: afterwards `cores` says how many
    processors were busy with something else, time stolen by the host included. None where /proc/stat is missing."""

    cores: float | None = None
    _began: tuple[float, float] = (0.0, 0.0)

    def __enter__(self) -> Self:
        self._began = time.monotonic(), _busy() - _own()
        return self

    def __exit__(self, *_: object) -> None:
        if STAT.exists():
            self.cores = max(0.0, (_busy() - _own() - self._began[1]) / (time.monotonic() - self._began[0]))


def wait_until_idle(most: float, patience_s: float) -> bool:
    """Wait until other programs take at most `most` processors for half a second; False when that never came."""
    deadline = time.monotonic() + patience_s
    while True:
        load = OtherLoad()
        with load:
            time.sleep(0.5)
        if load.cores is None or load.cores <= most:
            return True
        if time.monotonic() > deadline:
            return False


def _busy() -> float:
    """Seconds in which processors did something, of all of them together."""
    if not STAT.exists():
        return 0.0
    ticks = [int(word) for word in STAT.read_text().splitlines()[0].split()[1:]]
    return sum(ticks[i] for i in (USER, NICE, SYSTEM, IRQ, SOFTIRQ, STEAL)) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    """Seconds that this process and its ended children computed."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)
