"""Random workloads through the rig with a recorded scheduler and a clock, for the tests of recordings and timelines."""

from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from common.config import SchedulerConfig
from common.messages import Abort, AddRequest, RequestError, StepPlan, TokenBatch, ints
from common.sampling_params import DrawParams
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.recorder import MAX_BYTES, RecordedScheduler, Recorder
from scheduler_proc.scheduler import Scheduler
from tests.paper_worker import PaperWorker

MS = 10**6
SMALL = {"max_running": 5, "max_batch_tokens": 24, "chunk_tokens": 5, "ageing_s": 0.05, "in_batch_gain": 4}


@dataclass
class RecordedRun:
    """A scheduler with a paper worker and a clock that both sides stamp; `plans` are what it planned."""

    scheduler: Scheduler
    worker: PaperWorker
    now: int = 10**9
    plans: list[StepPlan] = field(default_factory=list)
    unfinished: deque[StepPlan] = field(default_factory=deque)
    errors: list[RequestError] = field(default_factory=list)
    output: int = 0

    def tick(self, ns: int = 50_000) -> int:
        self.now += ns
        return self.now

    def take(self, messages: list[object]) -> None:
        for msg in messages:
            if isinstance(msg, RequestError):
                self.errors.append(msg)
            else:
                assert isinstance(msg, TokenBatch)
                self.output += len(msg.token_ids)

    def add(self, rid: int, prompt: list[int], max_tokens: int = 5, stop: tuple[int, ...] = (), **more: int | str):
        self.take(self.scheduler.handle(
            AddRequest(rid, ints(*prompt), max_tokens, ints(*stop), DrawParams(), **more), self.tick()
        ))  # fmt: skip

    def abort(self, rid: int) -> None:
        self.take(self.scheduler.handle(Abort(rid), self.tick()))

    def step(self) -> bool:
        """As the event loop does it: expire, plan as far ahead as allowed; then the worker does the oldest step."""
        self.take(self.scheduler.expire(self.tick()))
        while (plan := self.scheduler.plan(self.tick())) is not None:
            self.plans.append(plan)
            self.unfinished.append(plan)
        if not self.unfinished:
            return False
        plan = self.unfinished.popleft()
        received, started = self.tick(), self.tick()
        ready = self.tick(MS + 20_000 * len(plan.chunk_tokens))
        result = replace(self.worker.execute(plan), times=array("q", (received, started, ready)))
        self.take(self.scheduler.commit(result, self.tick()))
        return True

    def lose_workers(self, epoch: int, *, crashed: bool = True) -> None:
        """The workers are gone with all they had, and new ones are there."""
        self.unfinished.clear()
        self.worker = self.worker.replacement()
        self.take(self.scheduler.reset(epoch, self.tick(), crashed=crashed))

    def finish(self) -> None:
        while self.step():
            pass
        assert not self.scheduler.has_work


@contextmanager
def recorded(
    path: Path, pages: int = 30, page_size: int = 4, *, prefix_cache: bool = True, host_pages: int = 0,
    snapshots: int | None = None, max_bytes: int = MAX_BYTES, **config,
) -> Iterator[RecordedRun]:  # fmt: skip
    recurrent = snapshots is not None
    kv = KVManager(
        pages, page_size, prefix_cache=prefix_cache, host_pages=host_pages, recurrent=recurrent,
        snapshots=snapshots or 0,
    )  # fmt: skip
    with Recorder(path, max_bytes=max_bytes) as recorder:
        scheduler = RecordedScheduler(recorder, SchedulerConfig(**SMALL | config), kv, 60)
        yield RecordedRun(scheduler, PaperWorker(page_size, snapshots=snapshots))


def random_workload(run: RecordedRun, seed: int, requests: int = 40) -> None:
    """Arrivals in bursts with shared prefixes, stops, priorities, namespaces, deadlines and aborts, to the end."""
    random = Random(seed)
    prefixes = [[random.randrange(3) for _ in range(random.randrange(20))] for _ in range(4)]
    rid = 0
    while rid < requests:
        for _ in range(random.randrange(4)):
            prompt = random.choice(prefixes) + [random.randrange(3) for _ in range(random.randrange(12))]
            run.add(
                rid, prompt, random.randrange(1, 24), tuple(random.sample(range(50), 3)),
                salt=random.choice(["", "", "a"]), priority=random.randrange(-1, 2),
                deadline_ms=random.choice([0, 0, 0, 40]),
            )  # fmt: skip
            rid += 1
        if rid and random.random() < 0.1:
            run.abort(random.randrange(rid))
        for _ in range(random.randrange(5)):
            run.step()
    run.finish()
