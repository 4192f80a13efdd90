"""Random schedules over tiny pools: every invariant after every event, every output as if the request were alone."""

from collections import deque

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.config import SchedulerConfig
from common.messages import Abort, AddRequest, Finish, RequestError, StepPlan, TokenBatch, ints
from common.sampling_params import DrawParams
from scheduler_proc.invariants import check
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler
from tests.paper_worker import PaperWorker, solo_output

CONTEXT = 40


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 8]),
        pages=st.integers(4, 30),
        running=st.integers(1, 5),
        budget=st.integers(5, 24),
        chunk=st.integers(1, 5),
        in_flight=st.integers(1, 2),
        prefix_cache=st.booleans(),
    )
    def start(self, page_size, pages, running, budget, chunk, in_flight, prefix_cache):
        config = SchedulerConfig(
            max_running=running,
            max_batch_tokens=budget,
            chunk_tokens=chunk,
            max_waiting=6,
            steps_in_flight=in_flight,
        )
        self.scheduler = Scheduler(config, KVManager(pages, page_size, prefix_cache=prefix_cache), CONTEXT)
        self.worker = PaperWorker(page_size)
        self.plans: deque[StepPlan] = deque()
        self.results = deque()
        self.asked: dict[int, AddRequest] = {}
        self.limit = min(CONTEXT, pages * page_size)
        self.got: dict[int, list[int]] = {}
        self.ended: dict[int, Finish | RequestError] = {}
        self.aborted: set[int] = set()
        self.rid = 0

    def take(self, messages):
        for msg in messages:
            if isinstance(msg, RequestError):
                assert msg.rid not in self.ended
                self.ended[msg.rid] = msg
                continue
            assert isinstance(msg, TokenBatch)
            at = 0
            for rid, count, reason in zip(msg.rids, msg.counts, msg.finish, strict=True):
                assert rid not in self.ended, "a row after the last one"
                self.got[rid] += msg.token_ids[at : at + count]
                at += count
                if reason:
                    self.ended[rid] = Finish(reason)
                    assert reason != Finish.ABORT or rid in self.aborted

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=0, max_size=44),
        max_tokens=st.integers(1, 20),
        stop=st.sets(st.integers(0, 49), max_size=6),
    )
    def arrive(self, prompt, max_tokens, stop):
        msg = AddRequest(self.rid, ints(*prompt), max_tokens, ints(*stop), DrawParams())
        self.asked[self.rid] = msg
        self.got[self.rid] = []
        full = len(self.scheduler.waiting) >= 6
        self.rid += 1
        self.take(self.scheduler.handle(msg))
        refused = msg.rid in self.ended
        assert refused == (not prompt or len(prompt) + 1 > self.limit or full)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data):
        rid = data.draw(st.sampled_from(sorted(self.asked)))
        self.aborted.add(rid)
        self.take(self.scheduler.handle(Abort(rid)))
        assert rid in self.ended, "an abort ends a request at once"

    @rule()
    def plan(self):
        plan = self.scheduler.plan(0)
        if plan is not None:
            self.plans.append(plan)

    @precondition(lambda self: self.plans)
    @rule()
    def execute(self):
        self.results.append(self.worker.execute(self.plans.popleft()))

    @precondition(lambda self: self.results)
    @rule()
    def commit(self):
        self.take(self.scheduler.commit(self.results.popleft(), 0))

    @invariant()
    def sound(self):
        if hasattr(self, "scheduler"):
            check(self.scheduler)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            self.plan()
            if self.plans:
                self.execute()
            if self.results:
                self.commit()
            check(self.scheduler)
            if not self.scheduler.has_work:
                break
        assert not self.scheduler.has_work, "live-lock: admitted requests do not finish"
        stats = self.scheduler.stats()
        assert stats["held_pages"] == stats["locked_pages"] == stats["running"] == stats["waiting"] == 0
        assert stats["free_pages"] + stats["evictable_pages"] == stats["total_pages"]
        assert self.scheduler.admission.promised == 0
        for rid, msg in self.asked.items():
            if isinstance(self.ended[rid], RequestError):
                assert self.got[rid] == []
                continue
            room = min(msg.max_tokens, self.limit - len(msg.prompt))
            alone = solo_output(list(msg.prompt), room, frozenset(msg.stop_token_ids))
            if self.ended[rid] is Finish.ABORT:
                assert self.got[rid] == alone[: len(self.got[rid])]
            else:
                assert self.got[rid] == alone
                assert (self.ended[rid] is Finish.STOP) == (alone[-1] in msg.stop_token_ids)


SchedulerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
