"""What a recording says happened, step by step: the recorded inputs are fed to a fresh scheduler, its plans are
compared with the recorded ones, and every call that did something becomes an Entry.

Pure: it reads records and yields entries; replay.py prints them, chrome_trace.py and bench/timeline.py draw them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import chain, pairwise

from common.codec import Message, encode
from common.messages import Abort, AddRequest, Finish, GetStats, RequestError, StepPlan, StepResult, TokenBatch
from scheduler_proc.recording import Kind, Record, Recording
from scheduler_proc.scheduler import Scheduler


class Diverged(RuntimeError):
    """The replayed scheduler did something else than the recorded one; the text is the first difference."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """Requests and pages after an entry. free + evictable + locked + held are all pages."""

    waiting: int
    running: int
    free: int
    evictable: int  # cached and used by nobody
    locked: int  # cached and used by running requests
    held: int  # of running requests alone


@dataclass(frozen=True, slots=True)
class Arrived:
    """`cached` of the `prompt` tokens are in the cache now; `refusal` says why it was not taken."""

    rid: int
    prompt: int
    cached: int
    max_tokens: int
    refusal: str


@dataclass(frozen=True, slots=True)
class Gone:
    """Requests ended from outside: by an abort or their deadline."""

    rids: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Entered:
    """A request took a slot with `cached` tokens from the cache; `first` unless it had held one before.

    `copied` when that ended inside a page, which it got a copy of (copy-on-write).
    """

    rid: int
    slot: int
    cached: int
    first: bool
    copied: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of a request are computed; it gets a token when it `samples`, and one more for each of the
    last `guesses` ones that is right."""

    rid: int
    slot: int
    start: int
    end: int
    samples: bool
    guesses: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, or None when nothing could be planned but something happened on the way to that (a preemption).

    `decodes` are (rid, slot), `copies` page pairs; `pages` were appended, `evicted` were taken from the cache for that.
    `offloaded` pages went to the host tier, `loaded` ones came back. `saves` are of recurrent states: (rid, tokens).
    """

    step: int | None
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[tuple[int, int], ...] = ()
    entered: tuple[Entered, ...] = ()
    left: tuple[int, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    pages: int = 0
    evicted: int = 0
    preempted: tuple[int, ...] = ()
    offloaded: int = 0
    loaded: int = 0
    saves: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        """How many tokens the step computes."""
        return sum(c.end - c.start for c in self.chunks) + len(self.decodes)


@dataclass(frozen=True, slots=True)
class Committed:
    """A step's tokens came back. `times` (ns): plan received, forward started, tokens ready; None when not given.

    `failed` requests ended with an error, because their grammar could not be followed.
    """

    step: int
    times: tuple[int, int, int] | None
    tokens: int
    discarded: int
    finished: tuple[tuple[int, Finish], ...]
    failed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reset:
    """The workers lost everything: steps in flight are void, all running requests wait again, steps count from 0.

    `condemned` requests ended with an error, because the workers died of them.
    """

    epoch: int
    condemned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The recording is over."""

    why: str


What = Arrived | Gone | Planned | Committed | Reset | Ended


@dataclass(frozen=True, slots=True)
class Entry:
    """A call that did something: record `index`, made at `now`; the event loop was done with it at `until` (ns)."""

    index: int
    now: int
    until: int
    what: What
    gauges: Gauges


class Timeline:
    """Iterate over it once; `scheduler` is then where the recorded one was. `after` is called after every record."""

    def __init__(self, recording: Recording, after: Callable[[Scheduler], None] | None = None):
        self.recording = recording
        self.scheduler = recording.new_scheduler()
        self.records = 0
        self.origin = 0  # when the first record was made (ns)
        self.plans = 0
        self.why = ""  # how the recording ended, once it did
        self._after = after
        self._preemptions: dict[int, int] = {}  # rid -> how often, of those that live
        self._entered: set[int] = set()  # live requests that have held a slot

    def __iter__(self) -> Iterator[Entry]:
        """Raises RecordingError for a damaged file, Diverged at the first difference."""
        end = Record(-1, Kind.END, 0)
        for record, following in pairwise(chain(self.recording.records(), [end])):
            what = self._apply(record, is_last=following.kind is Kind.END)
            self.origin = self.origin or record.now
            self.records += record.kind is not Kind.END
            if self._after is not None:
                self._after(self.scheduler)
            if what is not None:
                self._forget(what)
                # the loop makes its next call when it is done with this one, unless it found nothing to plan
                idle = isinstance(what, Planned) and what.step is None
                until = record.now if idle else max(record.now, following.now)
                yield Entry(record.index, record.now, until, what, self._gauges())

    def _apply(self, record: Record, *, is_last: bool) -> What | None:
        try:
            match record.kind:
                case Kind.HANDLE:
                    return self._handle(record)
                case Kind.EXPIRE:
                    late = _errors(self.scheduler.expire(record.now))
                    return Gone(late, "deadline") if late else None
                case Kind.PLAN:
                    return self._plan(record)
                case Kind.COMMIT:
                    return self._commit(record.message, record.now)
                case Kind.RESET:
                    answers = self.scheduler.reset(record.epoch, record.now, crashed=record.crashed)
                    return Reset(record.epoch, _errors(answers))
                case Kind.END:
                    self.why = record.why
                    return Ended(record.why)
        except Diverged:
            raise
        except Exception as error:
            last = ", which is the last one: the recorded scheduler ended like this as well" if is_last else ""
            where = f"record {record.index} ({record.kind.name.lower()})"
            raise Diverged(f"{where} raises {type(error).__name__}: {error}{last}") from error

    def _handle(self, record: Record) -> What | None:
        answers = self.scheduler.handle(record.message, record.now)
        match record.message:
            case Abort(rid=rid):
                return Gone((rid,), "abort") if answers else None
            case AddRequest(rid=rid, prompt=prompt, max_tokens=most):
                refusal = next((m.problem for m in answers if isinstance(m, RequestError)), "")
                cached = 0 if refusal else self.scheduler.kv.cached(self.scheduler.requests[rid])
                return Arrived(rid, len(prompt), cached, most, refusal)
            case GetStats():
                return None
        raise TypeError(type(record.message).__name__)

    def _plan(self, record: Record) -> Planned | None:
        before = self.scheduler.stats()
        plan = self.scheduler.plan(record.now)
        _compare(record, plan)
        after = self.scheduler.stats()
        evicted = after["evicted_pages"] - before["evicted_pages"]
        preempted = self._newly_preempted() if after["preempted"] > before["preempted"] else ()
        if plan is None:
            return Planned(None, preempted=preempted, evicted=evicted) if preempted or evicted else None
        self.plans += 1
        return self._describe(plan, evicted, preempted)

    def _newly_preempted(self) -> tuple[int, ...]:
        counts = {rid: r.preemptions for rid, r in self.scheduler.requests.items() if r.preemptions}
        new = tuple(rid for rid, count in counts.items() if count > self._preemptions.get(rid, 0))
        self._preemptions = counts
        return new

    def _describe(self, plan: StepPlan, evicted: int, preempted: tuple[int, ...]) -> Planned:
        """Plans name slots; who is in them, and how far, the scheduler knows right after it has planned."""
        holder = {r.slot: r for r in self.scheduler.holders()}
        chunks = []
        drafts = plan.chunk_drafts or [0] * len(plan.chunk_slots)
        columns = (plan.chunk_slots, plan.chunk_lens, plan.chunk_samples, drafts)
        for slot, length, samples, guesses in zip(*columns, strict=True):
            end = holder[slot].cached_len
            chunks.append(Chunk(holder[slot].rid, slot, end - length, end, bool(samples), guesses))
        end = self.scheduler.kv.pool.num_pages  # of the device
        pairs = tuple(zip(plan.copies[::2], plan.copies[1::2], strict=True))
        within = tuple(pair for pair in pairs if max(pair) < end)
        targets = {target for _, target in within}
        entered = []
        for slot, cached in zip(plan.enter_slots, plan.enter_lens, strict=True):
            r = holder[slot]
            first, copied = r.rid not in self._entered, not targets.isdisjoint(r.pages)
            entered.append(Entered(r.rid, slot, cached, first, copied))
            self._entered.add(r.rid)
        return Planned(
            step=plan.step_id,
            chunks=tuple(chunks),
            decodes=tuple((holder[slot].rid, slot) for slot in _bits(plan.decode)),
            entered=tuple(entered),
            left=tuple(plan.leave),
            copies=within,
            offloaded=sum(target >= end for _, target in pairs),
            loaded=sum(source >= end for source, _ in pairs),
            saves=tuple((holder[s].rid, n) for s, n in zip(plan.state_saves[::3], plan.state_saves[1::3], strict=True)),
            pages=len(plan.pages),
            evicted=evicted,
            preempted=preempted,
        )

    def _commit(self, result: StepResult, now: int) -> Committed:
        answers = self.scheduler.commit(result, now)
        batches = [m for m in answers if isinstance(m, TokenBatch)]
        tokens = sum(len(m.token_ids) for m in batches)
        finished = [(rid, Finish(f)) for m in batches for rid, f in zip(m.rids, m.finish, strict=True) if f]
        times = (result.times[0], result.times[1], result.times[2]) if len(result.times) == 3 else None
        discarded = len(result.tokens) - tokens
        return Committed(result.step_id, times, tokens, discarded, tuple(finished), _errors(answers))

    def _forget(self, what: What) -> None:
        """Ids may be used again once their requests are over."""
        match what:
            case Gone(rids=rids) | Reset(condemned=rids):
                self._entered.difference_update(rids)
            case Committed(finished=finished, failed=rids):
                self._entered.difference_update(rids, (rid for rid, _ in finished))

    def _gauges(self) -> Gauges:
        stats = self.scheduler.stats()
        pages = (stats[f"{name}_pages"] for name in ("free", "evictable", "locked", "held"))
        return Gauges(stats["waiting"], stats["running"], *pages)


def window(entries: Iterable[Entry], first: int | None, last: int | None) -> Iterator[Entry]:
    """From what happened before step `first` was planned until step `last` was committed."""
    started = first is None or first == 0
    for entry in entries:
        if started:
            yield entry
        if isinstance(entry.what, Planned) and entry.what.step is not None and not started:
            started = entry.what.step + 1 == first
        if last is not None and isinstance(entry.what, Committed) and entry.what.step >= last:
            return


def _errors(answers: Iterable[Message]) -> tuple[int, ...]:
    """The requests that end with an error."""
    return tuple(m.rid for m in answers if isinstance(m, RequestError))


def _bits(bitmap: bytes) -> Iterator[int]:
    return (8 * i + bit for i, byte in enumerate(bitmap) if byte for bit in range(8) if byte >> bit & 1)


def _compare(record: Record, plan: StepPlan | None) -> None:
    if (None if plan is None else encode(plan)) == record.frame:
        return
    where = f"record {record.index}"
    if plan is None:
        raise Diverged(f"{where}: step {record.message.step_id} was planned, the replay plans nothing")
    if record.message is None:
        raise Diverged(f"{where}: nothing was planned, the replay plans step {plan.step_id}")
    for f in fields(plan):
        was, now = getattr(record.message, f.name), getattr(plan, f.name)
        if was != now:
            text = f"step {record.message.step_id} differs in {f.name}: recorded {_short(was)}, replayed {_short(now)}"
            raise Diverged(f"{where}: {text}")
    raise Diverged(f"{where}: step {plan.step_id} is packed differently")


def _short(value: object) -> str:
    text = str(value.tolist()) if hasattr(value, "tolist") else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
