"""What happens in a round: a pure function of the seed and the round's number.

A round asks for some requests, in different ways and with clients that behave differently, and hurts the cluster
meanwhile. Rounds come in stretches, each on a cluster of its own. `plan_round(seed, number)` is all that is needed to
play one again.
"""

from dataclasses import dataclass, replace
from enum import Enum
from random import Random

from tests.faults.catalog import CATALOG, ENDING, ENDLESS

STRETCH = 12  # rounds on one cluster
FREEZE_S = 3.0  # --freeze-timeout of the clusters
MAX_SUSPENSION_MS = 4500  # of the launcher too, so that it must blame nobody
MAX_PAUSE_MS = 1200  # well below it, for a machine that is busy with other things
QUEUE = 40  # --max-waiting
SLOTS = 12  # --max-running
BURST = QUEUE + SLOTS + 30


class Conduct(Enum):
    """What a client does with a request."""

    READ = "read"
    CANCEL = "cancel"  # abort it after `after_ms`
    DISCONNECT = "disconnect"  # close the connection after `after_ms`
    HALF = "half"  # HTTP: close the connection in the middle of the request's body
    SLOW = "slow"  # leave everything unread for `after_ms` once something has come
    DEADLINE = "deadline"  # give the request `after_ms`
    BURST = "burst"  # read; it is one of many that come at once


class Kind(Enum):
    """What is done to a process."""

    KILL = "kill"  # SIGKILL
    FREEZE = "freeze"  # SIGSTOP, until the launcher replaces it
    PAUSE = "pause"  # SIGSTOP, and SIGCONT after `hold_ms`
    SUSPEND = "suspend"  # the same with all processes of the cluster, as a laptop's lid does
    RENEW = "renew"  # SIGHUP to the launcher: all workers are replaced


class End(Enum):
    """How the cluster of a stretch ends."""

    DRAIN = "drain"  # SIGTERM when idle
    DRAIN_BUSY = "drain-busy"  # SIGTERM while requests run, which finish
    DRAIN_HURT = "drain-hurt"  # the same, and a process is killed
    STOP = "stop"  # SIGTERM twice while requests run
    KILL = "kill"  # SIGKILL to the launcher while requests run


@dataclass(frozen=True, slots=True)
class Ask:
    """A request by its name in the catalog. `client` numbers connections of the same kind; `begin_ms` counts from the
    round's begin."""

    request: str
    http: bool
    stream: bool
    begin_ms: int
    conduct: Conduct
    after_ms: int = 0
    client: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """`at` is a part of the tokens that the round's readers will get: the fault comes when so many have come."""

    kind: Kind
    target: str
    at: float
    hold_ms: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    seed: int
    number: int
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]

    @property
    def hit(self) -> frozenset[str]:
        """The processes that may end by its faults."""
        return frozenset(fault.target for fault in self.faults)

    @property
    def has_burst(self) -> bool:
        return any(ask.conduct is Conduct.BURST for ask in self.asks)

    @property
    def expected_tokens(self) -> int:
        """About how many tokens its readers get."""
        readers = [CATALOG[a.request] for a in self.asks if a.conduct in (Conduct.READ, Conduct.SLOW)]
        return sum((r.params.max_tokens or 0) * r.n for r in readers if not r.endless)


@dataclass(frozen=True, slots=True)
class Shape:
    """A cluster: ranks, with or without HTTP, and how many tokens its KV cache holds."""

    name: str
    tp: int
    http: bool
    kv_tokens: int

    @property
    def flags(self) -> tuple[str, ...]:
        """For launch.py. Native kernels in bfloat16 compute the same bits in any batch, so outputs can be compared."""
        queue = ("--max-waiting", str(QUEUE), "--max-running", str(SLOTS), "--chunk-tokens", "32")
        limits = ("--kv-tokens", str(self.kv_tokens), "--freeze-timeout", f"{FREEZE_S:g}", "--restarts", "1000")
        http = ("--port", "0", "--generation-config", "none") if self.http else ()
        return ("--tp", str(self.tp), "--device", "cpu", "--dtype", "bfloat16", *queue, *limits, *http)

    @property
    def processes(self) -> tuple[str, ...]:
        """All but the launcher."""
        workers = tuple(f"worker-{rank}" for rank in range(self.tp))
        return (*workers, "scheduler", "detokenizer", "tokenizer", *(["gateway"] if self.http else []))


PLENTY, PRESSURE = 32_768, 512
SHAPES = (
    Shape("tp1-http", 1, True, PLENTY),
    Shape("tp2-pressure", 2, False, PRESSURE),
    Shape("tp2-http", 2, True, PLENTY),
    Shape("tp1-pressure-http", 1, True, PRESSURE),
    Shape("tp1", 1, False, PLENTY),
    Shape("tp2-pressure-http", 2, True, PRESSURE),
)


def shape_of(seed: int, number: int) -> Shape:
    """The cluster that a round runs on."""
    return SHAPES[(seed + number // STRETCH) % len(SHAPES)]


def end_of(seed: int, stretch: int) -> End:
    return Random(f"end {seed} {stretch}").choice(list(End))


def plan_round(seed: int, number: int, shape: Shape | None = None) -> Round:
    """The round of this number; `shape` is that of `shape_of` unless another one is given."""
    shape = shape or shape_of(seed, number)
    random = Random(f"round {seed} {number}")
    asks = [_ask(random, shape) for _ in range(random.randint(16, 32))]
    if random.random() < 0.25:
        http = shape.http and random.random() < 0.5
        begin = random.randint(0, 400)
        asks += [Ask("tiny", http, True, begin, Conduct.BURST, client=99) for _ in range(BURST)]
    faults = [_fault(random, shape) for _ in range(random.choice((1, 1, 2, 2, 3, 4)))]
    if random.random() < 0.3:  # all at once
        faults = [replace(fault, at=faults[0].at) for fault in faults]
    return Round(seed, number, tuple(asks), tuple(sorted(faults, key=lambda fault: fault.at)))


def _ask(random: Random, shape: Shape) -> Ask:
    http = shape.http and random.random() < 0.5
    kinds: list[Conduct] = [c for c in Conduct if c is not Conduct.BURST and (http or c is not Conduct.HALF)]
    if http:  # where to abort is to disconnect
        kinds.remove(Conduct.CANCEL)
    conduct = random.choice([*[Conduct.READ] * 8, *kinds])
    after_ms = {
        Conduct.CANCEL: random.randint(1, 50),
        Conduct.DISCONNECT: random.choice((random.randint(0, 50), random.randint(50, 800))),
        Conduct.SLOW: random.randint(200, 2000),
        Conduct.DEADLINE: random.randint(1, 1500),
    }.get(conduct, 0)
    if conduct in (Conduct.CANCEL, Conduct.DISCONNECT, Conduct.DEADLINE) and random.random() < 0.7:
        names: tuple[str, ...] = ENDLESS
    else:
        names = ENDING
    if http:
        names = tuple(name for name in names if CATALOG[name].http is not None)
    stream = conduct is Conduct.SLOW or random.random() < 0.75
    begin_ms = random.choice((random.randint(0, 100), random.randint(0, 1500)))
    return Ask(random.choice(names), http, stream, begin_ms, conduct, after_ms, random.randint(0, 2))


def _fault(random: Random, shape: Shape) -> Fault:
    kinds = (Kind.KILL, Kind.KILL, Kind.KILL, Kind.FREEZE, Kind.PAUSE, Kind.PAUSE, Kind.SUSPEND, Kind.RENEW)
    kind = random.choice(kinds)
    if kind is Kind.RENEW:
        return Fault(kind, "workers", random.random())
    if kind is Kind.SUSPEND:
        return Fault(kind, "cluster", random.random(), random.randint(50, MAX_SUSPENSION_MS))
    hold_ms = random.randint(50, MAX_PAUSE_MS) if kind is Kind.PAUSE else 0
    victims = (*shape.processes, "launcher") if kind is Kind.PAUSE else shape.processes
    return Fault(kind, random.choice(victims), random.random(), hold_ms)
