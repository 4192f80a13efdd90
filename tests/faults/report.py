"""Counting what was done and found, and saying it."""

from collections import Counter
from dataclasses import dataclass, field

from tests.faults.checks import Measure
from tests.faults.judge import Finding, Kind, Served
from tests.faults.plan import Conduct, Round


@dataclass(slots=True)
class Report:
    """The figures of a run."""

    seed: int
    rounds: int = 0
    clusters: int = 0
    seconds: float = 0.0
    tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    served: Counter[Served] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    pressure: Counter[str] = field(default_factory=Counter)  # evictions, preemptions, requests handed in again
    growth: dict[str, Measure] = field(default_factory=dict)  # the most of any process, by name
    findings: list[tuple[int, Finding]] = field(default_factory=list)

    def add_round(self, plan: Round) -> None:
        """A round that has been played."""
        self.rounds += 1
        for fault in plan.faults:
            self.faults[f"{fault.kind.value} {fault.target}"] += 1
        ways = [(ask.conduct, "http" if ask.http else "ipc") for ask in plan.asks if ask.conduct is not Conduct.READ]
        one_by_one = [way for way in ways if way[0] is not Conduct.BURST]
        bursts = {way for way in ways if way[0] is Conduct.BURST}  # one fault, of many requests
        self.faults.update(f"{conduct.value} ({name})" for conduct, name in (*one_by_one, *bursts))

    def add_growth(self, worst: dict[str, Measure]) -> None:
        """By how much the processes of one cluster have grown at most."""
        for name, measure in worst.items():
            most = self.growth.get(name, Measure(0, 0))
            self.growth[name] = Measure(max(most.fds, measure.fds), max(most.rss, measure.rss))

    def of_kind(self, kind: Kind) -> list[Finding]:
        return [finding for _, finding in self.findings if finding.kind is kind]

    @property
    def ok(self) -> bool:
        return not self.findings

    def text(self) -> str:
        """The figures as a table, and each finding with the command that plays its round again."""
        rows = [
            ("seed", f"{self.seed}"),
            ("rounds", f"{self.rounds} on {self.clusters} clusters, {self.seconds:.0f} s"),
            ("faults injected", f"{self.faults.total()}"),
            *((f"  {name}", f"{count}") for name, count in sorted(self.faults.items())),
            ("requests", f"{self.served.total() + sum(k in _OF_REQUESTS for k in self._kinds())}"),
            *((f"  {kind.value}", f"{self.served[kind]}") for kind in Served),
            *((f"    {name}", f"{count}") for name, count in sorted(self.refusals.items())),
            *((f"  {kind.value}", f"{len(self.of_kind(kind))}") for kind in _COUNTED),
            ("tokens received", f"{self.tokens}"),
            *((name, f"{count}") for name, count in sorted(self.pressure.items())),
            *((f"growth of {name}", _size(m)) for name, m in sorted(self.growth.items())),
            *((f"other findings: {kind.value}", f"{len(self.of_kind(kind))}") for kind in self._other_kinds()),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value:>8}" for name, value in rows]
        for number, finding in self.findings:
            lines.append(f"round {number}: {finding.kind.value}: {finding.what}")
        for number in sorted({number for number, _ in self.findings}):
            lines.append(f"again: python -m tests.faults --seed {self.seed} --begin {number} --rounds 1")
        return "\n".join(lines)

    def _kinds(self) -> list[Kind]:
        return [finding.kind for _, finding in self.findings]

    def _other_kinds(self) -> list[Kind]:
        return [kind for kind in Kind if kind not in _COUNTED and self.of_kind(kind)]


def _size(more: Measure) -> str:
    return f"{more.fds} fds, {more.rss / 2**20:.1f} MiB"


_COUNTED = (Kind.LOST, Kind.DUPLICATED, Kind.WRONG)
_OF_REQUESTS = (*_COUNTED, Kind.ABORT)
