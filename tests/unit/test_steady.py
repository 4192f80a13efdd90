"""Steps that are taken together leave everything as single steps do."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import SchedulerConfig
from scheduler_proc.cost_model import Overheads
from scheduler_proc.invariants import check
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.simulation import Simulation
from scheduler_proc.workload import KINDS, Lengths, Recipe, Traffic, Workload, generate
from tests.examples import examples
from tests.unit.simulator_runs import COST, VOCABULARY

WAYS = Overheads(1e-3, 0.2e-3, 0.1e-3, 0.3e-3, 0.1e-3, 0.5e-3, 0.01e-3, 0.4e-3, 0.7e-3)


def finished(
    workload: Workload, config: SchedulerConfig, pages: int, page_size: int, leaps: bool, host_pages: int = 0,
    snapshots: int | None = None,
) -> Simulation:  # fmt: skip
    recurrent = snapshots is not None
    kv = KVManager(pages, page_size, host_pages=host_pages, recurrent=recurrent, snapshots=snapshots or 0)
    scheduler = Scheduler(config, kv, workload.longest)
    run = Simulation(scheduler, Traffic(workload, VOCABULARY), VOCABULARY, COST, WAYS, leaps=leaps, transfer_s=1e-4)
    run.run()
    check(scheduler)
    return run


def everything(run: Simulation) -> object:
    """All that a run leaves: what clients saw, counters, sums, what was learned, who owns which page, its next step."""
    scheduler = run.scheduler
    tree = sorted((node.key, node.pages, node.last_access) for node in scheduler.kv.tree.nodes())
    seen = {number: dataclasses.astuple(record) for number, record in run.records.items()}
    learned = scheduler.step_time.coefficients(), scheduler.step_time.samples, getattr(scheduler.admission, "ratio", 0)
    pages = scheduler.kv.pool.free_pages()
    states = sorted((node.key, node.states) for node in scheduler.kv.tree.nodes() if node.states)
    return (
        seen,
        scheduler.stats(),
        dataclasses.astuple(run.meter),
        learned,
        scheduler.measures.flat(),
        tree,
        pages,
        states,
        scheduler._next_step,
    )


@pytest.fixture
def skipped(monkeypatch):
    """How many steps were taken together, leap by leap."""
    counts = []
    skip = Scheduler.skip

    def counting(self, steps, tokens):
        counts.append(steps)
        skip(self, steps, tokens)
        ids = [step.step_id for step in self.in_flight]
        assert ids == list(range(self._next_step - len(ids), self._next_step))

    monkeypatch.setattr(Scheduler, "skip", counting)
    return counts


@pytest.mark.soak
@settings(max_examples=examples(80), deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    load=st.sampled_from([{"rate": 20.0}, {"rate": 200.0}, {"concurrency": 3}, {}]),
    limit=st.sampled_from([None, 90]),
    page_size=st.sampled_from([1, 4, 16]),
    spare=st.integers(0, 600),
    policy=st.sampled_from(["fcfs", "lpm", "round-robin", "priority"]),
    admission=st.sampled_from(["ratio", "peak", "reserve"]),
    running=st.sampled_from([2, 5, 16]),
    in_flight=st.integers(1, 2),
    target=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 10**6),
    beside=st.sampled_from([(0, None), (20, None), (2000, None), (0, 0), (0, 3), (0, 40)]),
    gain=st.sampled_from([1, 32]),
)
def test_any_run_is_the_same_with_leaps_and_without(
    kind, load, limit, page_size, spare, policy, admission, running, in_flight, target, seed, beside, gain
):
    """`beside` are pages of a host tier, or snapshots of a recurrent model."""
    recipe = Recipe(
        kind, 24, Lengths("uniform", 1, 90), Lengths("uniform", 1, 80), limit, 3, 40, 2, 0.02, seed=seed, **load
    )
    workload = generate(recipe)
    config = SchedulerConfig(
        max_running=running, max_batch_tokens=256, chunk_tokens=32, policy=policy, admission=admission,
        steps_in_flight=in_flight, itl_target_ms=target, in_batch_gain=gain,
    )  # fmt: skip
    pages = -(-(workload.longest + page_size + spare) // page_size)
    one, other = (finished(workload, config, pages, page_size, leaps, *beside) for leaps in (True, False))
    assert everything(one) == everything(other)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_long_answer_is_one_leap(skipped, in_flight):
    workload = generate(Recipe("random", 4, Lengths("fixed", 50), Lengths("fixed", 1000)))
    config = SchedulerConfig(max_running=4, steps_in_flight=in_flight)
    run = finished(workload, config, 400, 16, True)
    assert run.meter.steps == 1000
    assert sum(skipped) > 990 - 2 * in_flight and len(skipped) <= 3


def test_pages_that_must_be_evicted_are_evicted_in_the_same_order(skipped):
    """A pool that is full of old answers: every page of a leap is taken from the cache."""
    workload = generate(Recipe("random", 12, Lengths("fixed", 60), Lengths("fixed", 100), concurrency=2))
    config = SchedulerConfig(max_running=4)
    one, other = (finished(workload, config, 40, 16, leaps) for leaps in (True, False))
    assert sum(skipped) > 300 and one.scheduler.stats()["evicted_pages"] > 50
    assert everything(one) == everything(other)


def test_a_checked_run_takes_every_step_by_itself(skipped):
    workload = generate(Recipe("random", 2, Lengths("fixed", 9), Lengths("fixed", 50)))
    scheduler = Scheduler(SchedulerConfig(), KVManager(100, 16), 100)
    Simulation(scheduler, Traffic(workload, VOCABULARY), VOCABULARY, COST, WAYS, check_every=1).run()
    assert not skipped


def test_a_scheduler_that_is_watched_takes_every_step_by_itself(skipped):
    class Watched(Scheduler):
        plans = 0

        def plan(self, now):
            plan = super().plan(now)
            self.plans += plan is not None
            return plan

    workload = generate(Recipe("random", 2, Lengths("fixed", 9), Lengths("fixed", 50)))
    scheduler = Watched(SchedulerConfig(), KVManager(100, 16), 100)
    run = Simulation(scheduler, Traffic(workload, VOCABULARY), VOCABULARY, COST, WAYS)
    run.run()
    assert not skipped and scheduler.plans == run.meter.steps == 50
