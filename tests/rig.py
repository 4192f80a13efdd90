"""A scheduler with the paper worker behind it, stepped by a test."""

from collections import deque

from common.config import SchedulerConfig
from common.messages import Abort, AddRequest, Finish, RequestError, StepPlan, ints
from common.sampling_params import DrawParams
from scheduler_proc.invariants import check
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler
from tests.paper_worker import PaperWorker


class Rig:
    """A scheduler with a paper worker, stepped by the test."""

    def __init__(self, pages=100, page_size=4, context=200, vocab=2**31, host_pages=0, snapshots=None, **config):
        """With `snapshots`, of which there may be none, the model is recurrent."""
        settings = {"max_running": 8, "max_batch_tokens": 64, "chunk_tokens": 8, "steps_in_flight": 1} | config
        self.now = 1  # ns
        self._waiting: deque[StepPlan] = deque()
        recurrent = snapshots is not None
        kv = KVManager(pages, page_size, host_pages=host_pages, recurrent=recurrent, snapshots=snapshots or 0)
        self.scheduler = Scheduler(SchedulerConfig(**settings), kv, context, vocab_size=vocab)
        self.worker = PaperWorker(page_size, pages, snapshots)
        self.out: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.finish: dict[int, Finish] = {}
        self.errors: dict[int, RequestError] = {}

    def add(self, rid, prompt, max_tokens=5, stop=(), **more):
        msg = AddRequest(rid, ints(*prompt), max_tokens, ints(*stop), DrawParams(), **more)
        return self.scheduler.handle(msg, self.now)

    def restart_worker(self):
        """Plans on their way are lost with the worker."""
        self._waiting.clear()
        self.worker = self.worker.replacement()

    def abort(self, rid):
        self.take(self.scheduler.handle(Abort(rid), self.now))

    def take(self, messages):
        for batch in messages:
            if isinstance(batch, RequestError):
                self.errors[batch.rid] = batch
                continue
            at = 0
            for i, rid in enumerate(batch.rids):
                self.out.setdefault(rid, []).extend(batch.token_ids[at : at + batch.counts[i]])
                at += batch.counts[i]
                self.cached[rid] = batch.cached[i]
                if batch.finish[i]:
                    self.finish[rid] = Finish(batch.finish[i])

    def step(self):
        """Plan as far ahead as allowed, then execute and commit the oldest step. None when there is nothing to do."""
        while (plan := self.scheduler.plan(self.now)) is not None:
            self._waiting.append(plan)
        if not self._waiting:
            return None
        plan = self._waiting.popleft()
        self.take(self.scheduler.commit(self.worker.execute(plan), self.now))
        check(self.scheduler)
        return plan

    def run(self):
        plans = []
        while (plan := self.step()) is not None:
            plans.append(plan)
        return plans
