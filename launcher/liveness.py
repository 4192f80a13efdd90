"""Who is alive, judged by what processes say of themselves (Pulse in common/messages). Times are seconds.

Two rules, because a step can take minutes and a rank that waits for another one in a collective looks busy:

frozen   a process that has pulsed before has not pulsed for `frozen_s`: it is stopped, or its loop hangs
stuck    some process of a group is busy, and none of the group has made any progress for `stuck_s`: a broken collective
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

STUCK_FACTOR = 2  # stuck_s, in terms of frozen_s
_OWN_GAP_S = 1.0  # a launcher that has not looked for longer was stopped itself, and blames nobody for it


@dataclass(slots=True)
class _Life:
    heard: float
    changed: float
    progress: int
    busy: bool


def left_alone(joined: Iterable[int], computing: Iterable[int]) -> bool:
    """Whether ranks that have `joined` a new epoch, after so many steps each, have left another one in a step that they
    will never come to. `computing` are the steps behind those that still compute: theirs is the next one."""
    least = min(joined, default=None)
    return least is not None and any(steps >= least for steps in computing)


class Liveness:
    def __init__(self, frozen_s: float):
        self.frozen_s = frozen_s
        self.stuck_s = STUCK_FACTOR * frozen_s
        self._lives: dict[str, _Life] = {}
        self._looked: float | None = None

    def pulse(self, name: str, progress: int, busy: bool, now: float) -> None:
        life = self._lives.get(name)
        if life is None:
            self._lives[name] = _Life(now, now, progress, busy)
            return
        if progress != life.progress or (busy and not life.busy):
            life.changed = now
        life.heard, life.progress, life.busy = now, progress, busy

    def forget(self, name: str) -> None:
        """The process has ended; another one may have its name later."""
        self._lives.pop(name, None)

    def look(self, now: float) -> None:
        """To be called each time around, before any judgement."""
        if self._looked is not None and (gap := now - self._looked) > _OWN_GAP_S:
            for life in self._lives.values():
                life.heard += gap
                life.changed += gap
        self._looked = now

    def frozen(self, names: Collection[str], now: float) -> str | None:
        """One of `names` that gives no sign of life."""
        silent = [n for n in names if n in self._lives and now - self._lives[n].heard > self.frozen_s]
        return min(silent, key=lambda n: self._lives[n].heard, default=None)

    def stuck(self, names: Collection[str], now: float) -> bool:
        """Whether the group of `names` gets nowhere."""
        lives = [self._lives[n] for n in names if n in self._lives]
        return any(life.busy for life in lives) and all(now - life.changed > self.stuck_s for life in lives)
