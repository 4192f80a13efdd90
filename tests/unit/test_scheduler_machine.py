"""Random schedules over tiny pools: every invariant after every event, every output as if the request were alone."""

from collections import deque
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from common.codec import decode, encode
from common.config import ADMISSIONS, POLICIES, SchedulerConfig
from common.messages import Abort, AddRequest, ErrorCode, Finish, RequestError, StepPlan, TokenBatch, ints
from common.sampling_params import DrawParams, LogitEdits
from scheduler_proc import planner
from scheduler_proc.admission import NewTokenRatio
from scheduler_proc.invariants import check
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler
from tests.paper_worker import PaperWorker, logprob_of, solo_output
from tests.random_guesses import speculate

CONTEXT = 40


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 8]),
        pages=st.integers(3, 24),
        running=st.integers(1, 6),
        budget=st.integers(6, 24),
        chunk=st.integers(1, 5),
        in_flight=st.integers(1, 2),
        prefix_cache=st.booleans(),
        policy=st.sampled_from(POLICIES),
        admission=st.sampled_from(ADMISSIONS),
        itl_target=st.sampled_from([0.0, 0.0, 1.0]),
        gain=st.sampled_from([1, 4]),
        guesses=st.one_of(st.sampled_from(["off", "ngram", "ngram-always"]), st.integers(0, 99)),
        host_pages=st.one_of(st.just(0), st.integers(1, 6), st.integers(10, 60)),
    )
    def start(
        self, page_size, pages, running, budget, chunk, in_flight, prefix_cache, policy, admission, itl_target, gain,
        guesses, host_pages, snapshots=None,
    ):  # fmt: skip
        config = SchedulerConfig(
            max_running=running,
            max_batch_tokens=budget,
            chunk_tokens=chunk,
            max_waiting=6,
            steps_in_flight=in_flight,
            policy=policy,
            admission=admission,
            ageing_s=1.0,
            itl_target_ms=itl_target,
            in_batch_gain=gain,
            speculation="off" if isinstance(guesses, int) else guesses,
            prompt_lookup_min=1,
        )

        def new_scheduler(epoch):
            kv = KVManager(
                pages,
                page_size,
                prefix_cache=prefix_cache,
                host_pages=host_pages * prefix_cache,
                recurrent=snapshots is not None,
                snapshots=snapshots or 0,
            )
            scheduler = Scheduler(config, kv, CONTEXT, epoch=epoch)
            if isinstance(guesses, int):
                speculate(scheduler, guesses)
            return scheduler

        self.new_scheduler = new_scheduler
        self.scheduler = self.new_scheduler(0)
        self.new_worker = lambda: PaperWorker(page_size, pages, snapshots)
        self.worker = self.new_worker()
        self.plans: deque[StepPlan] = deque()
        self.results = deque()
        self.asked: dict[int, AddRequest] = {}
        self.limit = min(CONTEXT, pages * page_size)
        self.got: dict[int, list[int]] = {}
        self.arrived: dict[int, int] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.prompt_logprobs: dict[int, list[float]] = {}
        self.ended: dict[int, Finish | RequestError] = {}
        self.aborted: set[int] = set()
        self.rid = 0
        self.now = 1

    def take(self, messages):
        for msg in messages:
            if isinstance(msg, RequestError):
                assert msg.rid not in self.ended
                self.ended[msg.rid] = msg
                continue
            assert isinstance(msg, TokenBatch)
            at = 0
            scores = msg.logprobs.by_row() if msg.logprobs else {}
            prompts = msg.prompt_logprobs.by_row() if msg.prompt_logprobs else {}
            for row, (rid, count, reason) in enumerate(zip(msg.rids, msg.counts, msg.finish, strict=True)):
                assert rid not in self.ended, "a row after the last one"
                if row in prompts:
                    assert not self.got[rid], "prompt log probabilities after a token"
                    self.prompt_logprobs.setdefault(rid, []).extend(prompts[row].logprobs)
                if count and self.asked[rid].draw.logprobs is not None:
                    assert list(scores[row].token_ids) == list(msg.token_ids[at : at + count])
                    assert list(scores[row].top_counts) == [self.asked[rid].draw.logprobs] * count
                    self.logprobs.setdefault(rid, []).extend(scores[row].logprobs)
                else:
                    assert row not in scores
                self.got[rid] += msg.token_ids[at : at + count]
                at += count
                if reason:
                    self.ended[rid] = Finish(reason)
                    assert reason != Finish.ABORT or rid in self.aborted

    @rule(
        prompt=st.one_of(st.lists(st.integers(0, 1), max_size=12), st.integers(0, 44).map(lambda n: [0] * n)),
        max_tokens=st.integers(1, 20),
        stop=st.sets(st.integers(0, 49), max_size=6),
        salt=st.sampled_from(["", "", "a"]),
        priority=st.integers(-1, 1),
        deadline=st.sampled_from([0, 0, 0, 5, 500]),
        draw=st.builds(
            DrawParams,
            edits=st.sampled_from(
                [
                    None,
                    LogitEdits(repetition_penalty=2.0),
                    LogitEdits(logit_bias={1: 2.0}),
                    LogitEdits(bad_words=(ints(1, 2),)),
                    LogitEdits(allowed=ints(1, 2, 1, 3, 1)),
                ]
            ),
            logprobs=st.sampled_from([None, 0, 3]),
            prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        ),
    )
    def arrive(self, prompt, max_tokens, stop, salt, priority, deadline, draw):
        msg = AddRequest(self.rid, ints(*prompt), max_tokens, ints(*stop), draw, salt, priority, deadline)
        self.asked[self.rid] = msg
        self.got[self.rid] = []
        self.arrived[self.rid] = self.now
        full = len(self.scheduler.waiting) >= 6
        self.rid += 1
        before = self.scheduler.stats()
        self.take(self.scheduler.handle(msg, self.now))
        after = self.scheduler.stats()
        refused = msg.rid in self.ended
        counted = "refused" if refused else "requests"
        assert after == before | {counted: before[counted] + 1, "waiting": before["waiting"] + (not refused)}
        culprits = {tuple(self.asked[r].prompt) for r, e in self.ended.items() if condemned(e)}
        assert refused == (not prompt or len(prompt) + 1 > self.limit or full) or tuple(prompt) in culprits

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=2), max_tokens=st.integers(1, 8))
    def come_back(self, data, more, max_tokens):
        """The next turn of a conversation, whose beginning may have been evicted."""
        rid = data.draw(st.sampled_from(sorted(self.asked)))
        prompt = [*self.asked[rid].prompt, *self.got[rid], *more]
        self.arrive(prompt, max_tokens, set(), self.asked[rid].salt, 0, 0, DrawParams())

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data):
        rid = data.draw(st.sampled_from(sorted(self.asked)))
        self.aborted.add(rid)
        self.take(self.scheduler.handle(Abort(rid), self.now))
        assert rid in self.ended, "an abort ends a request at once"

    @rule(ms=st.integers(1, 3000))
    def time_passes(self, ms):
        self.now += ms * 10**6
        self.take(self.scheduler.expire(self.now))
        assert self.scheduler.next_deadline is None or self.scheduler.next_deadline > self.now

    @rule(lost=st.integers(0, 3), crashed=st.booleans())
    def workers_restart(self, lost, crashed):
        """All KV is gone, and so are plans and results on their way; it happens rarely."""
        if lost:
            return
        self.take(self.scheduler.reset(self.scheduler.epoch + 1, self.now, crashed=crashed))
        self.worker = self.new_worker()
        self.plans.clear()
        self.results.clear()

    @rule(lost=st.integers(0, 5))
    def scheduler_or_tokenizer_restarts(self, lost):
        """All live requests are handed in again with what they have: to a new scheduler, whose workers have forgotten
        everything, or to the same one, which drops those that it has without an answer."""
        if lost == 0:
            self.scheduler = self.new_scheduler(self.scheduler.epoch + 1)
            self.worker = self.new_worker()
            self.plans.clear()
            self.results.clear()
        elif lost == 1:
            for rid in list(self.scheduler.requests):
                self.scheduler.handle(Abort(rid), self.now)
        else:
            return
        for rid, msg in self.asked.items():
            if rid in self.ended:
                continue
            left, waited = 0, max(1, (self.now - self.arrived[rid]) // 10**6)
            if msg.deadline_ms:
                left = max(1, msg.deadline_ms - (self.now - self.arrived[rid]) // 10**6)
            got, scored = self.got[rid], len(self.prompt_logprobs.get(rid, ()))
            tokens = msg.prompt + ints(*got)
            again = replace(msg, prompt=tokens, deadline_ms=left, generated=len(got), scored=scored, waited_ms=waited)
            self.take(self.scheduler.handle(decode(encode(again), {AddRequest}), self.now))
            refused = rid in self.ended
            assert not refused or condemned(self.ended[rid]), "nobody is refused whom an earlier scheduler had taken"

    @rule()
    def hope(self):
        """The ratio has fallen to nothing, as it does while all goes well: requests are admitted that will not fit."""
        if isinstance(self.scheduler.admission, NewTokenRatio):
            self.scheduler.admission.ratio = 0.0

    @rule(times=st.integers(1, 12))
    def work(self, times):
        """Whole steps, so that requests come far."""
        for number in range(times):
            if number:
                check(self.scheduler)  # after the last one, too: see `sound`
            self.plan()
            if self.plans:
                self.execute()
            if self.results:
                self.commit()

    @rule()
    def plan(self):
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return
        self.plans.append(plan)
        if len(plan.enter_slots) > 1:
            pages = dict(zip(plan.page_slots, plan.page_counts, strict=True))
            size = sum(pages[slot] for slot in plan.enter_slots) + sum(len(h.tokens) for h in plan.histories)
            size += sum(len(draw.edits.allowed) for draw in plan.enter_draw if draw.edits is not None)
            assert size <= planner.MOST_ENTERING

    @precondition(lambda self: self.plans)
    @rule()
    def execute(self):
        self.results.append(self.worker.execute(self.plans.popleft()))

    @precondition(lambda self: self.results)
    @rule()
    def commit(self):
        self.take(self.scheduler.commit(self.results.popleft(), self.now))

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
        assert self.scheduler.kv.prefix_cache or not stats["evictable_pages"]
        ends = ("finished", "aborted", "expired", "failed", "condemned")
        assert stats["requests"] == sum(stats[name] for name in ends)
        moved = stats["offloaded_pages"] - stats["loaded_pages"] - stats["host_used_pages"]
        assert moved >= 0 and (stats["host_total_pages"] or not stats["offloaded_pages"])
        for rid, msg in self.asked.items():
            end = self.ended[rid]
            if isinstance(end, RequestError) and end.code not in (ErrorCode.DEADLINE, ErrorCode.INTERNAL):
                assert self.got[rid] == []
                continue
            room = min(msg.max_tokens, self.limit - len(msg.prompt))
            alone = solo_output(list(msg.prompt), room, frozenset(msg.stop_token_ids))
            self.check_scores(msg)
            if isinstance(end, RequestError) or end is Finish.ABORT:
                assert self.got[rid] == alone[: len(self.got[rid])]
            else:
                assert self.got[rid] == alone
                assert (end is Finish.STOP) == (alone[-1] in msg.stop_token_ids)

    def check_scores(self, msg):
        """Log probabilities are those of each token in its context, and each came once."""
        prompt, tokens = list(msg.prompt), self.got[msg.rid]
        known = prompt + tokens
        expected = [logprob_of(known[:at], known[at]) for at in range(1, len(known))]
        if msg.draw.logprobs is not None:
            assert self.logprobs.get(msg.rid, []) == expected[len(prompt) - 1 :]
        scores = self.prompt_logprobs.get(msg.rid)
        if msg.draw.prompt_logprobs is None:
            assert scores is None
        elif tokens:
            assert scores == expected[: len(prompt) - 1]
        else:
            assert (scores or []) == expected[: len(scores or [])]


class HostTierMachine(SchedulerMachine):
    """Conversations that take turns on a device that holds few of them at once, over a host tier."""

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4]),
        pages=st.integers(8, 16),
        host_pages=st.one_of(st.integers(1, 8), st.integers(20, 100)),
        running=st.integers(1, 3),
        in_flight=st.integers(1, 2),
        policy=st.sampled_from(POLICIES),
        admission=st.sampled_from(ADMISSIONS),
        guesses=st.one_of(st.just("off"), st.integers(0, 99)),
    )
    def start(self, page_size, pages, host_pages, running, in_flight, policy, admission, guesses):
        SchedulerMachine.start(
            self, page_size, pages, running, 40, 5, in_flight, True, policy, admission, 0.0, 1, guesses, host_pages
        )

    @rule(speakers=st.lists(st.integers(0, 4), min_size=2, max_size=6), length=st.integers(2, 14))
    def talk(self, speakers, length):
        for speaker in speakers:
            prompt = [2 + speaker] * length
            before = [r for r in self.asked if list(self.asked[r].prompt[:length]) == prompt]
            if before:
                prompt = [*self.asked[before[-1]].prompt, *self.got[before[-1]]]
            self.arrive([*prompt, 1], 2, set(), "", 0, 0, DrawParams())
            self.work(8)


def condemned(end):
    """Whether a request has ended because the workers died of it, as it seemed."""
    return isinstance(end, RequestError) and end.code == ErrorCode.INTERNAL


def test_random_schedules(request, monkeypatch):
    """As many runs as `--soak N` says, else 40. The bounds of a plan are small enough to be met."""
    run_machine(SchedulerMachine, request.config.getoption("--soak") or 40, monkeypatch)


def test_random_schedules_over_a_host_tier(request, monkeypatch):
    """A quarter as many. A copy that is missing, wrong or in the wrong order changes what is read from pages."""
    run_machine(HostTierMachine, (request.config.getoption("--soak") or 40) // 4, monkeypatch)


def run_machine(machine, runs, monkeypatch):
    monkeypatch.setattr("scheduler_proc.planner.SCORED_TOKENS", 5)
    monkeypatch.setattr("scheduler_proc.planner.MOST_ENTERING", 10)
    monkeypatch.setattr("scheduler_proc.planner.MOVED_PAGES", 5)
    run_state_machine_as_test(machine, settings=settings(max_examples=runs, stateful_step_count=60, deadline=None))
