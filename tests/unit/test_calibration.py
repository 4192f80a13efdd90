"""Fitting the simulator's costs, and telling disturbed runs from others."""

import itertools
import subprocess
import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.calibrate import Calibration, Samples, fit
from bench.other_load import OtherLoad
from bench.validate_simulator import Attempts, compare, table
from common.config import SchedulerConfig
from common.messages import AddRequest, Finish, StepResult, ints
from common.rows import Row
from common.sampling_params import DrawParams, SamplingParams
from scheduler_proc.cost_model import LinearCost, StepWork
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.sim_report import Report
from scheduler_proc.simulation import Record
from scheduler_proc.workload import Vocabulary

TRUE = LinearCost(500e-6, 7e-6, 11e-6, 300e-6, 70e-9, 20e-9)
MS = 10**6


def step(tokens: int, rows: int, chunks: int, context: int, pairs: int) -> StepWork:
    return StepWork(tokens, rows, chunks, rows, context, pairs, 0 if chunks else rows * context // rows)


def samples() -> Samples:
    found = Samples(submit=[1e-3], submit_busy=[3e-3, 2e-3], plan=[2e-4], result=[3e-4], commit=[1e-4, 3e-4])
    works = [step(n, 1, 1, n, n * (n + 1) // 2) for n in (8, 16, 64, 200, 700)]
    works += [step(n, k, k, 500 * k, 500 * n) for n, k in itertools.product((64, 256), (1, 2, 3))]
    works += [step(b, b, 0, b * c, b * c) for b, c in itertools.product((1, 3, 8, 16, 32), (20, 300, 900))]
    for i, work in enumerate(works):
        found.steps["point", i] = [(work, TRUE.seconds(work) * f) for f in (0.9, 1.0, 1.1)]
    return found


def test_a_fit_finds_the_costs_behind_its_samples():
    found = samples()
    for rows in (1, 8, 32):
        found.deliver += [(rows, (5e-4 + rows * 2e-5) * f) for f in (0.5, 1.5)]
    found.turnaround = [1e-4] * 9 + [2e-4]
    costs, shown = fit(found, "a model")
    for _, seconds, fitted in shown:
        assert fitted == pytest.approx(seconds, rel=0.02)
    ways = costs.overheads
    assert (ways.submit_s, ways.submit_busy_s) == pytest.approx((1e-3, 1.5e-3))
    assert (ways.plan_s, ways.result_s, ways.commit_s) == pytest.approx((2e-4, 3e-4, 2e-4))
    assert ways.turnaround_s == pytest.approx(1.1e-4)  # the mean: what a run takes is made of slow ways too
    assert (ways.deliver_s, ways.deliver_row_s) == pytest.approx((5e-4, 2e-5))


def test_steps_beside_an_arrival_show_by_how_much_it_lengthens_them():
    found = samples()
    found.deliver, found.turnaround = [(1, 1e-3), (2, 1e-3)], [1e-4]
    for batch in (3, 8):
        calm = [batch * 1e-4 * f for f in (0.9, 1.0, 1.1)] * 15
        found.beside += [(batch, False, seconds) for seconds in calm]
        found.beside += [(batch, True, seconds + 200e-6) for seconds in calm[:9]]
    found.comers = [1] * 9  # two steps for each
    assert fit(found, "a model")[0].overheads.arrival_s == pytest.approx(400e-6)
    found.beside = [(batch, came, seconds * 1e3 - 0.2 * came) for batch, came, seconds in found.beside]
    assert fit(found, "a model")[0].overheads.arrival_s == 0.0  # steps of a second that scatter by a tenth tell nothing


class PaperCluster:
    """A connection to a scheduler whose worker takes a millisecond for a step and one for each of its tokens."""

    def __init__(self, config: SchedulerConfig):
        self.scheduler = Scheduler(replace(config, steps_in_flight=1), KVManager(4096, 16), 1024)
        self.now = 0
        self.rids = itertools.count()

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> int:
        rid = next(self.rids)
        assert params.max_tokens is not None
        added = AddRequest(rid, ints(*prompt), params.max_tokens, ints(), DrawParams())
        assert not self.scheduler.handle(added, self.now)
        return rid

    def poll(self, _seconds: float) -> list[Row]:
        """The rows of one step, as a client would see them."""
        plan = self.scheduler.plan(self.now)
        assert plan is not None, "everybody is served"
        step = self.scheduler.in_flight[-1]
        begin, self.now = self.now, self.now + MS * (1 + step.shape.tokens)
        result = StepResult(plan.step_id, 0, "0", ints(*[7] * len(step.sampled)), array("q", (begin, begin, self.now)))
        rows: list[Row] = []
        for batch in self.scheduler.commit(result, self.now):
            for i, (rid, finish) in enumerate(zip(batch.rids, batch.finish, strict=True)):
                rows.append(Row(rid, 0, "", [7], Finish(finish), 0, batch.cached[i], batch.times, self.now))
        return rows


def points(config: SchedulerConfig) -> list[tuple[tuple[object, ...], int, float]]:
    """What a calibration of such a cluster takes down: the point, its tokens and its milliseconds."""
    cluster = PaperCluster(config)
    plan = Calibration(cluster, config, 1024, 60_000, Vocabulary(3, 500))  # type: ignore[arg-type]
    plan.run((1, 8), 10)
    found = plan.samples.steps.items()
    return [(point, work.tokens, 1e3 * seconds) for point, taken in found for work, seconds in taken]


def test_a_calibration_knows_what_each_of_its_steps_computed():
    found = points(SchedulerConfig(max_running=32, chunk_slowdown=0.0))
    assert {point[0] for point, _, _ in found} == {"prompts", "extends", "decodes", "mixed"}
    assert [x for x in found if x[2] != pytest.approx(1 + x[1])] == []


def test_where_chunks_follow_the_step_time_it_would_be_wrong():
    """So a cluster is calibrated without that (`Bench.calibrate`)."""
    wrong = [point for point, tokens, ms in points(SchedulerConfig(max_running=32)) if ms != pytest.approx(1 + tokens)]
    assert any(point[0] == "mixed" for point in wrong)


def busy_child(seconds: float) -> None:
    code = f"import time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_measurement_started_itself_is_no_other_load(monkeypatch):
    busy = iter((5.0, 6.0))  # one second of all processors together, at least 0.3 of it the child's
    monkeypatch.setattr("bench.other_load._busy", lambda: next(busy))
    with OtherLoad() as load:
        busy_child(0.3)
    if load.cores is None:
        pytest.skip("no /proc/stat here")
    assert 0 <= load.cores <= 0.7 / 0.3  # the child alone takes 0.3 s of time


def test_disturbed_runs_are_repeated_and_then_counted(monkeypatch):
    loads = iter((0.5, 0.0, 0.5, 0.5))

    class Fake:
        cores = 0.0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.cores = next(loads)

    monkeypatch.setattr("bench.validate_simulator.OtherLoad", Fake)
    monkeypatch.setattr("bench.validate_simulator.wait_until_idle", lambda most, patience: True)
    attempts, calls = Attempts(0.1, 2), itertools.count()
    assert attempts.undisturbed(lambda: next(calls)) == 1  # the second one
    assert (attempts.repeated, attempts.disturbed) == (1, 0)
    assert attempts.undisturbed(lambda: next(calls)) == 3
    assert (attempts.repeated, attempts.disturbed) == (2, 1)


def report(ttft_ms: int) -> Report:
    record = Record(0, 10, submitted=0, cached=0)
    record.token(1, ttft_ms * MS, [ttft_ms * MS * i // 8 for i in range(1, 6)])
    record.token(1, 2 * ttft_ms * MS, [])
    record.finished = True
    return Report.of([record])


def test_the_table_has_the_median_and_the_spread():
    rows = compare([report(30), report(10), report(12)], report(9))
    ttft = next(row for row in rows if row["figure"] == "TTFT mean, ms")
    assert (ttft["measured"], ttft["least"], ttft["most"]) == pytest.approx((12, 10, 30))
    assert ttft["error"] == pytest.approx(-0.25) and ttft["judged"]
    assert "| TTFT mean, ms | 12.00 | 10.00 to 30.00 | 9.00 | -25.0% |" in table(rows)
