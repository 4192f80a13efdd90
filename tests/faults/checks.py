"""What must hold of the processes after each round. Pure: the driver measures."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tests.faults.judge import Finding, Kind
from tests.faults.plan import Kind as FaultKind
from tests.faults.plan import Round

WARM_UP = 2  # measurements of a process from which its baseline is taken
MORE_FDS = 4  # than at the baseline: connections that are being made or closed
MORE_RSS = 12 * 2**20  # bytes: allocators keep pieces; at most 3 MiB were seen on one cluster
MORE_RSS_WORKER = 32 * 2**20  # which touches more and more of its KV cache
_NOBODY = (
    "scheduler.running", "scheduler.waiting", "scheduler.in_flight", "scheduler.suspects", "tokenizer.live_requests"
)  # fmt: skip
_NOBODY_EITHER = ("tokenizer.live_choices", "tokenizer.slow_clients", "detokenizer.streams", "detokenizer.early")


def unfinished(stats: Mapping[str, int]) -> dict[str, int]:
    """The gauges that are not 0 although nobody asks for anything."""
    return {name: stats[name] for name in (*_NOBODY, *_NOBODY_EITHER) if stats[name]}


def check_pages(stats: Mapping[str, int]) -> list[Finding]:
    """Page conservation at idle: free + cached = total, and no locks."""
    gauges = {name: stats[f"scheduler.{name}_pages"] for name in ("free", "evictable", "locked", "held", "total")}
    if gauges["free"] + gauges["evictable"] == gauges["total"] and not gauges["locked"] and not gauges["held"]:
        return []
    return [Finding(Kind.PAGES, ", ".join(f"{name} {count}" for name, count in gauges.items()))]


def check_frames(stats: Mapping[str, int]) -> list[Finding]:
    """No process refused a frame of another one."""
    refused = {name: count for name, count in stats.items() if name.endswith("refused_frames") and count}
    return [Finding(Kind.WRONG, f"refused frames: {refused}")] if refused else []


def check_restarts(plan: Round, before: Mapping[str, int], after: Mapping[str, int]) -> list[Finding]:
    """No process was replaced more often than it was hurt; `before` and `after` count restarts by unit."""
    hurt = dict.fromkeys(after, 0)
    for fault in plan.faults:
        unit = "workers" if fault.target.startswith("worker") else fault.target
        if fault.kind is not FaultKind.RENEW and unit in hurt:  # the launcher is no unit, nor is the whole cluster
            hurt[unit] += 1
    return [
        Finding(Kind.DEATH, f"{unit} was replaced {after[unit] - before[unit]} times and hurt {hurt[unit]} times")
        for unit in after
        if after[unit] - before[unit] > hurt[unit]
    ]


def check_log(lines: Iterable[str]) -> list[Finding]:
    """No error in the log but of ranks, which complain about peers that were killed. A line is `time level process
    message`."""
    parted = [line.split(maxsplit=3) for line in lines]
    bad = [words for words in parted if len(words) == 4 and words[1] == "E" and not words[2].startswith("worker")]
    tracebacks = [line for line in lines if line.startswith("Traceback")]
    return [Finding(Kind.DEATH, " ".join(words)) for words in bad] + [Finding(Kind.DEATH, t) for t in tracebacks]


@dataclass(frozen=True, slots=True)
class Measure:
    """Open file descriptors and private memory (RssAnon, bytes) of a process."""

    fds: int
    rss: int


@dataclass(slots=True)
class Growth:
    """Whether processes stay as large as they were. A process is known by its name and id."""

    _first: dict[tuple[str, int], list[Measure]] = field(default_factory=dict)
    worst: dict[str, Measure] = field(default_factory=dict)  # the most that a process of this name has grown

    def take(self, name: str, pid: int, measure: Measure) -> list[Finding]:
        """Note a measurement at idle; what is too much of it."""
        first = self._first.setdefault((name, pid), [])
        if len(first) < WARM_UP:
            first.append(measure)
            return []
        worst = self.worst.get(name, Measure(0, 0))
        fds, rss = measure.fds - max(m.fds for m in first), measure.rss - max(m.rss for m in first)
        self.worst[name] = Measure(max(worst.fds, fds), max(worst.rss, rss))
        return self.too_much(name, pid, measure)

    def too_much(self, name: str, pid: int, measure: Measure) -> list[Finding]:
        """The same without noting it."""
        first = self._first.get((name, pid), [])
        if len(first) < WARM_UP:
            return []
        fds, rss = max(m.fds for m in first), max(m.rss for m in first)
        found = []
        if measure.fds > fds + MORE_FDS:
            found.append(Finding(Kind.GROWTH, f"{name} has {measure.fds} file descriptors, it had {fds}"))
        if measure.rss > rss + (MORE_RSS_WORKER if name.startswith("worker") else MORE_RSS):
            found.append(
                Finding(Kind.GROWTH, f"{name} has {measure.rss / 2**20:.0f} MiB of memory, it had {rss / 2**20:.0f}")
            )
        return found
