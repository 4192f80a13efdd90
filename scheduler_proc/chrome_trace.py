"""A timeline as a trace for https://ui.perfetto.dev or chrome://tracing, in the JSON form of the Trace Event Format.

    scheduler   loop       what the event loop did: taking requests, committing, planning with encoding and sending
                flight n   steps from planned to committed; one lane per step in flight
                counters   pages, requests, tokens per step
    worker      forward    from forward start to tokens ready
    queue       waiting    a span per waiting request
    slots       slot n     who held it, what was prefilled and decoded there; hits, copies, preemptions, finishes

Times are microseconds since the first event.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from scheduler_proc.timeline import Arrived, Committed, Entry, Gone, Planned, Reset

SCHEDULER, WORKER, QUEUE, SLOTS = 1, 2, 3, 4  # process ids of the trace
LOOP, FORWARD = 0, 0  # thread ids; lanes of steps in flight come after the loop
Event = dict[str, Any]


@dataclass(slots=True)
class _Stay:
    """A request in a slot, so far."""

    rid: int
    cached: int
    started: int = 0
    ready: int = 0
    over: bool = False  # the request has ended, and the slot is given back with the next plan


@dataclass(slots=True)
class Trace:
    """Turns entries into trace events. `lanes` is SchedulerConfig.steps_in_flight."""

    lanes: int
    _origin: int | None = None
    _threads: dict[tuple[int, int], str] = field(default_factory=dict)
    _planned: dict[int, Entry] = field(default_factory=dict)
    _stays: dict[int, _Stay] = field(default_factory=dict)  # by slot
    _waiting: dict[int, int] = field(default_factory=dict)  # rid -> since when

    def events(self, entries: Iterable[Entry]) -> Iterator[Event]:
        """All events of a timeline, metadata at the end."""
        now = 0
        for entry in entries:
            if self._origin is None:
                self._origin = entry.now
            now = entry.now
            match entry.what:
                case Arrived(rid=rid, prompt=prompt, cached=cached, refusal=refusal):
                    about = {"prompt": prompt, "cached": cached, "refusal": refusal}
                    yield self._loop(entry, f"refuse r{rid}" if refusal else f"take r{rid}", about)
                    if not refusal:
                        self._waiting[rid] = entry.now
                case Gone(rids=rids, why=why):
                    for rid in rids:
                        yield from self._over(rid, entry.now, why)
                case Planned():
                    yield from self._plan(entry, entry.what)
                case Committed():
                    yield from self._commit(entry, entry.what)
                case Reset(epoch=epoch, condemned=condemned):
                    yield self._event("i", SCHEDULER, LOOP, f"reset: epoch {epoch}", entry.now, s="g")
                    for rid in condemned:
                        yield from self._over(rid, entry.now, "condemn")
                    yield from self._reset(entry.now)
            yield from self._counters(entry)
        for slot in list(self._stays):
            yield from self._leave(slot)
        for rid in list(self._waiting):
            yield from self._admitted(rid, now)
        yield from self._names()

    def _reset(self, now: int) -> Iterator[Event]:
        """Nobody holds a slot any more, and those who did and have not ended wait again."""
        self._planned.clear()
        for slot in list(self._stays):
            if not self._stays[slot].over:
                self._waiting.setdefault(self._stays[slot].rid, now)
            yield from self._leave(slot)

    def _plan(self, entry: Entry, plan: Planned) -> Iterator[Event]:
        name = "plan: nothing" if plan.step is None else f"plan {plan.step}"
        about = {"tokens": plan.tokens, "pages": plan.pages, "copies": len(plan.copies), "evicted": plan.evicted}
        about |= {"offloaded": plan.offloaded, "loaded": plan.loaded} if plan.offloaded or plan.loaded else {}
        yield self._loop(entry, name, about)
        for rid in plan.preempted:
            yield from self._mark(rid, entry.now, "preempt")
            self._waiting[rid] = entry.now
        for slot in plan.left:
            yield from self._leave(slot)
        for entered in plan.entered:
            yield from self._admitted(entered.rid, entry.now)
            self._stays[entered.slot] = _Stay(entered.rid, entered.cached)
            if entered.cached:
                yield self._instant(entered.slot, entry.now, f"hit r{entered.rid}: {entered.cached} tokens")
            if entered.copied:
                yield self._instant(entered.slot, entry.now, f"copy on write r{entered.rid}")
        if plan.step is not None:
            self._planned[plan.step] = entry

    def _commit(self, entry: Entry, step: Committed) -> Iterator[Event]:
        yield self._loop(entry, f"commit {step.step}", {"tokens": step.tokens, "discarded": step.discarded})
        planned = self._planned.pop(step.step, None)
        if planned is not None and step.times is not None:
            yield from self._step(planned, step, step.times, entry.now)
        for rid, reason in step.finished:
            yield from self._over(rid, entry.now, f"finish ({reason.name.lower()})")
        for rid in step.failed:
            yield from self._over(rid, entry.now, "fail")

    def _step(self, planned: Entry, step: Committed, times: tuple[int, int, int], now: int) -> Iterator[Event]:
        plan, (received, started, ready), lane = planned.what, times, 1 + step.step % self.lanes
        assert isinstance(plan, Planned)
        about = {"tokens": plan.tokens, "chunks": len(plan.chunks), "decodes": len(plan.decodes)}
        phases = ((planned.now, received, "to the worker"), (received, started, "build the batch"),
                  (started, ready, "forward"), (ready, now, "to the scheduler"))  # fmt: skip
        yield self._slice(SCHEDULER, lane, f"step {step.step}", planned.now, now, about)
        for begin, end, phase in phases:
            yield self._slice(SCHEDULER, lane, phase, begin, end, {})
        yield self._slice(WORKER, FORWARD, f"step {step.step}", started, ready, about)
        link = {"cat": "plan", "id": step.step}
        yield self._event("s", SCHEDULER, LOOP, "plan", planned.now, **link)
        yield self._event("f", WORKER, FORWARD, "plan", started, bp="e", **link)
        for chunk in plan.chunks:
            self._stay(chunk.slot, chunk.rid, started, ready)
            name = f"prefill r{chunk.rid}[{chunk.start}:{chunk.end}]"
            yield self._slice(SLOTS, chunk.slot, name, started, ready, {"step": step.step, "samples": chunk.samples})
        for rid, slot in plan.decodes:
            self._stay(slot, rid, started, ready)
            yield self._slice(SLOTS, slot, "decode", started, ready, {"step": step.step, "rid": rid})

    def _stay(self, slot: int, rid: int, started: int, ready: int) -> None:
        stay = self._stays.setdefault(slot, _Stay(rid, 0))  # it entered before the window when it is not there
        stay.started = stay.started or started
        stay.ready = ready

    def _leave(self, slot: int) -> Iterator[Event]:
        stay = self._stays.pop(slot, None)
        if stay is not None and stay.started:
            yield self._slice(SLOTS, slot, f"r{stay.rid}", stay.started, stay.ready, {"cached": stay.cached})

    def _admitted(self, rid: int, now: int) -> Iterator[Event]:
        since = self._waiting.pop(rid, None)
        if since is not None:
            link = {"cat": "waiting", "id": rid}
            yield self._event("b", QUEUE, 0, f"r{rid} waits", since, **link)
            yield self._event("e", QUEUE, 0, f"r{rid} waits", now, **link)

    def _over(self, rid: int, now: int, what: str) -> Iterator[Event]:
        """A request ends."""
        yield from self._admitted(rid, now)
        yield from self._mark(rid, now, what)
        for stay in self._stays.values():
            stay.over |= stay.rid == rid

    def _mark(self, rid: int, now: int, what: str) -> Iterator[Event]:
        """An instant in the slot of a request, or in the queue when it has none."""
        slot = next((slot for slot, stay in self._stays.items() if stay.rid == rid), None)
        if slot is None:
            yield self._event("i", QUEUE, 0, f"{what} r{rid}", now, s="t")
        else:
            yield self._instant(slot, now, f"{what} r{rid}")

    def _counters(self, entry: Entry) -> Iterator[Event]:
        values = asdict(entry.gauges)
        pages = {name: values[name] for name in ("held", "locked", "evictable", "free")}
        requests = {name: values[name] for name in ("running", "waiting")}
        yield self._event("C", SCHEDULER, LOOP, "pages", entry.now, args=pages)
        yield self._event("C", SCHEDULER, LOOP, "requests", entry.now, args=requests)
        if isinstance(entry.what, Planned):
            prefill = entry.what.tokens - len(entry.what.decodes)
            args = {"decode": len(entry.what.decodes), "prefill": prefill}
            yield self._event("C", SCHEDULER, LOOP, "tokens per step", entry.now, args=args)

    def _instant(self, slot: int, now: int, name: str) -> Event:
        return self._event("i", SLOTS, slot, name, now, s="t")

    def _loop(self, entry: Entry, name: str, about: Event) -> Event:
        return self._slice(SCHEDULER, LOOP, name, entry.now, entry.until, about)

    def _slice(self, pid: int, tid: int, name: str, begin: int, end: int, args: Event) -> Event:
        return self._event("X", pid, tid, name, begin, dur=max(0, end - begin) / 1e3, args=args)

    def _event(self, ph: str, pid: int, tid: int, name: str, at: int, **more: Any) -> Event:
        assert self._origin is not None
        self._threads.setdefault((pid, tid), "")
        return {"ph": ph, "pid": pid, "tid": tid, "name": name, "ts": (at - self._origin) / 1e3, **more}

    def _names(self) -> Iterator[Event]:
        """Names and order of the tracks that were used."""
        for pid, name in ((SCHEDULER, "scheduler"), (WORKER, "worker"), (QUEUE, "queue"), (SLOTS, "slots")):
            if any(p == pid for p, _ in self._threads):
                yield _metadata("process_name", pid, 0, {"name": name})
                yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
        for pid, tid in sorted(self._threads):
            first = {SCHEDULER: "loop", WORKER: "forward", QUEUE: "waiting"}.get(pid)
            lane = f"flight {tid - 1}" if pid == SCHEDULER else f"slot {tid}"
            yield _metadata("thread_name", pid, tid, {"name": lane if first is None or tid else first})
            yield _metadata("thread_sort_index", pid, tid, {"sort_index": tid})


def _metadata(name: str, pid: int, tid: int, args: Event) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def write_trace(file: IO[str], entries: Iterable[Entry], lanes: int) -> int:
    """Write the JSON, an event per line; returns how many."""
    count = 0
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    for event in Trace(lanes).events(entries):
        file.write(("," if count else "") + "\n" + json.dumps(event, separators=(",", ":")))
        count += 1
    file.write("\n]}\n")
    return count
