"""Does the simulator say what a cluster does? Measure both on the same workloads.

    python -m bench.validate_simulator

The cost model is fitted on a calibration of its own (bench/calibrate.py), before, between and after rounds of the
workloads, so that a machine that drifts is seen. Each workload runs on fresh clusters, several times, and in the
simulator with the same options; nothing is fitted to them. `--fit FILE` only measures and writes the costs, which
`python -m scheduler_proc.simulator --costs FILE` reads. The machine must be otherwise idle: a run during which other
programs computed is repeated.
"""

import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from bench.calibrate import Calibration, Samples, fit
from bench.clusters import ROOT, cluster, machine
from bench.other_load import OtherLoad, wait_until_idle
from bench.replay import replay
from common.config import SchedulerConfig
from common.connection import Connection
from scheduler_proc.cost_model import Costs
from scheduler_proc.sim_report import PARTS, Report
from scheduler_proc.simulator import Setup, simulate
from scheduler_proc.workload import Lengths, Recipe, Vocabulary, Workload, generate

T = TypeVar("T")
FIRST_TOKEN = 16  # below it are special tokens


def _part(name: str) -> Callable[[Report], float]:
    return lambda report: 1e3 * report.ttft_parts_s[name]


FIGURES: tuple[tuple[str, Callable[[Report], float], bool], ...] = (
    ("output tokens/s", lambda r: r.output_tokens_per_s, True),
    ("TTFT mean, ms", lambda r: 1e3 * r.ttft_s.mean, True),
    ("TTFT p50, ms", lambda r: 1e3 * r.ttft_s.p50, False),
    ("TTFT p90, ms", lambda r: 1e3 * r.ttft_s.p90, False),
    ("TPOT mean, ms", lambda r: 1e3 * r.tpot_s.mean, False),
    ("E2E mean, ms", lambda r: 1e3 * r.e2e_s.mean, False),
    ("hit rate, %", lambda r: 100 * r.hit_rate, False),
    *((f"of TTFT: {name}, ms", _part(name), False) for name in PARTS),
)  # name, figure, whether it must be within the tolerance


@dataclass(frozen=True, slots=True)
class Bench:
    """One cluster's options, for both sides."""

    model: Path
    threads: int
    context_len: int
    kv_tokens: int
    page_size: int
    config: SchedulerConfig
    vocabulary: Vocabulary
    decode_steps: int = 40

    @contextmanager
    def cluster(self, **changed: Any) -> Iterator[Connection]:
        """One that has been warmed up; `changed` are fields of its SchedulerConfig."""
        c = dataclasses.replace(self.config, **changed)
        options = {
            "model": self.model, "threads": self.threads, "context-len": self.context_len,
            "kv-tokens": self.kv_tokens, "page-size": self.page_size, "max-running": c.max_running,
            "max-batch-tokens": c.max_batch_tokens, "chunk-tokens": c.chunk_tokens, "policy": c.policy,
            "admission": c.admission, "steps-in-flight": c.steps_in_flight, "chunk-slowdown": c.chunk_slowdown,
        }  # fmt: skip
        flags = [str(x) for name, value in options.items() for x in (f"--{name}", value)]
        with cluster(*flags) as (connection, _):
            warm_up = Recipe(requests=24, prompt=Lengths("uniform", 8, 200), output=Lengths("fixed", 24), concurrency=8)
            replay(connection, generate(warm_up), dataclasses.replace(self.vocabulary, seed=10**6))
            yield connection

    def calibrate(self) -> Samples:
        with self.cluster(chunk_slowdown=0.0) as connection:  # what is sent as one chunk is computed as one
            batches = [b for b in (1, 3, 8, 16, 32) if b <= self.config.max_running]
            plan = Calibration(connection, self.config, self.context_len, self.kv_tokens, self.vocabulary)
            plan.run(batches, self.decode_steps)
        return plan.samples

    def measured(self, workload: Workload) -> Report:
        with self.cluster() as connection:
            return Report.of(replay(connection, workload, self.vocabulary))

    def simulated(self, workload: Workload, costs: Costs) -> Report:
        pages = self.kv_tokens // self.page_size
        setup = Setup(self.config, pages, self.page_size, self.context_len, costs.step, costs.overheads)
        return simulate(setup, workload, self.vocabulary).report


def workloads(bench: Bench, costs: Costs, requests: int) -> dict[str, Workload]:
    """Random prompts at half the rate that the simulator says is the most, a closed loop over shared prefixes, and
    conversations; lengths fit a context window of 1024."""
    uniform = Lengths.parse
    recipe = Recipe("random", requests, uniform("uniform:32:400"), uniform("uniform:16:96"), seed=1)
    busy = bench.simulated(generate(dataclasses.replace(recipe, concurrency=16)), costs)
    rate = 0.5 * busy.finished / busy.duration_s
    shared = Recipe(
        "shared-prefix", requests, uniform("uniform:16:96"), uniform("uniform:16:64"), prefixes=4, prefix_tokens=512,
        concurrency=8, seed=2,
    )  # fmt: skip
    chat = Recipe(
        "chat", requests, uniform("uniform:24:96"), uniform("uniform:24:96"), prefixes=1, prefix_tokens=64, turns=4,
        think_s=0.05, concurrency=6, seed=3,
    )  # fmt: skip
    return {
        f"random prompts, Poisson arrivals at {rate:.1f}/s": generate(dataclasses.replace(recipe, rate=rate)),
        "shared prefixes, 8 at a time": generate(shared),
        "conversations of 4 turns, 6 at a time": generate(chat),
    }


@dataclass(slots=True)
class Attempts:
    """Repeats what other programs disturbed: more than `most` processors busy with something else meanwhile."""

    most: float
    tries: int
    patience_s: float = 20.0
    disturbed: int = 0  # results that are used although they were
    repeated: int = 0

    def undisturbed(self, measure: Callable[[], T]) -> T:
        for attempt in range(1, self.tries + 1):
            wait_until_idle(self.most, self.patience_s)
            with OtherLoad() as load:
                result = measure()
            quiet = load.cores is None or load.cores <= self.most
            if quiet or attempt == self.tries:
                self.disturbed += not quiet
                break
            self.repeated += 1
        return result


def compare(measured: Sequence[Report], simulated: Report) -> list[dict[str, Any]]:
    """A row per figure: the median of what was measured, its least and its most, and what the simulator says."""
    rows = []
    for name, figure, judged in FIGURES:
        real, sim = [figure(report) for report in measured], figure(simulated)
        middle = statistics.median(real)
        error = (sim - middle) / middle if middle else 0.0
        row = {"figure": name, "measured": middle, "least": min(real), "most": max(real), "simulated": sim}
        rows.append(row | {"error": error, "judged": judged})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| | measured | least to most | simulated | error |", "|---|---|---|---|---|"]
    for r in rows:
        spread = f"{r['least']:.2f} to {r['most']:.2f}"
        lines.append(f"| {r['figure']} | {r['measured']:.2f} | {spread} | {r['simulated']:.2f} | {r['error']:+.1%} |")
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.option("--model", type=click.Path(path_type=Path), default=ROOT / "demo_model", show_default="the demo model")
@click.option("--threads", type=int, default=1, help="CPU threads of the worker.")
@click.option("--context-len", type=int, default=1024)
@click.option("--kv-tokens", type=int, default=32768)
@click.option("--page-size", type=int, default=16)
@click.option("--vocab", type=int, default=3000, help="Token ids used, at most the model's.")
@click.option("--max-running", type=int, default=32)
@click.option("--policy", default="fcfs")
@click.option("--steps-in-flight", type=int, default=2)
@click.option("--requests", type=int, default=240, help="Requests per workload.")
@click.option("--repeats", type=int, default=3, help="Runs of each workload, with a calibration before and after them.")
@click.option("--decode-steps", type=int, default=40, help="Steps per batch that decodes, in the calibration.")
@click.option(
    "--others", type=float, default=0.1, help="Processors that other programs may use, else a run is repeated."
)
@click.option("--tries", type=int, default=4, help="How often a disturbed run is made at most.")
@click.option("--fit", "fit_file", type=click.Path(path_type=Path), default=None, help="Only measure costs, into FILE.")
@click.option("--costs", "costs_file", type=click.Path(path_type=Path), default=None, help="Use these, measure none.")
@click.option("--tolerance", type=float, default=0.15, help="Allowed relative error.")
@click.option("--json-file", type=click.File("w"), default=None)
def main(
    model: Path, threads: int, context_len: int, kv_tokens: int, page_size: int, vocab: int, max_running: int,
    policy: str, steps_in_flight: int, requests: int, repeats: int, decode_steps: int, others: float, tries: int,
    fit_file: Path | None, costs_file: Path | None, tolerance: float, json_file: Any,
) -> None:  # fmt: skip
    """Print measured and simulated figures side by side; exit 1 when throughput or mean TTFT are further apart."""
    config = SchedulerConfig(max_running=max_running, policy=policy, steps_in_flight=steps_in_flight)
    vocabulary = Vocabulary(FIRST_TOKEN, vocab - FIRST_TOKEN)
    bench = Bench(model.resolve(), threads, context_len, kv_tokens, page_size, config, vocabulary, decode_steps)
    attempts = Attempts(others, tries)
    click.echo(machine())
    first = attempts.undisturbed(bench.calibrate) if costs_file is None else Samples()
    costs = Costs.load(costs_file) if costs_file is not None else _fit(bench, first)
    if fit_file is not None:
        costs.save(fit_file)
        return
    loads = workloads(bench, costs, requests)
    measured: dict[str, list[Report]] = {name: [] for name in loads}
    samples, drift = first, []
    for _ in range(repeats):
        for name, workload in loads.items():
            report = attempts.undisturbed(functools.partial(bench.measured, workload))
            measured[name].append(report)
            click.echo(f"{name}: {report.output_tokens_per_s:.0f} tokens/s, TTFT {1e3 * report.ttft_s.mean:.2f} ms")
        if costs_file is None:
            again = attempts.undisturbed(bench.calibrate)
            drift.append(again.slower_than(first))
            samples = samples + again
    if costs_file is None:
        click.echo("\nthe same steps took longer than at first, after each round of workloads: " + _percents(drift))
        costs = _fit(bench, samples)
    click.echo(f"\n{attempts.repeated} runs were disturbed and repeated, {attempts.disturbed} disturbed ones are used")
    results: list[dict[str, Any]] = []
    for name, workload in loads.items():
        rows = compare(measured[name], bench.simulated(workload, costs))
        results.append({"workload": name, "figures": rows})
        click.echo(f"\n{name}: {workload.num_requests} requests, {repeats} runs\n\n{table(rows)}")
    if json_file is not None:
        everything = {"machine": machine(), "costs": dataclasses.asdict(costs), "workloads": results}
        json.dump(everything, json_file, indent=1)
    worst = max(abs(row["error"]) for r in results for row in r["figures"] if row["judged"])
    click.echo(f"\nlargest error of throughput and mean TTFT: {worst:.1%}, allowed: {tolerance:.0%}")
    sys.exit(worst > tolerance)


def _percents(shares: list[float]) -> str:
    return ", ".join(f"{share:+.1%}" for share in shares)


def _fit(bench: Bench, samples: Samples) -> Costs:
    costs, points = fit(samples, bench.model.name)
    errors = sorted((abs(fitted - real) / real, name, real, fitted) for name, real, fitted in points)
    mean = sum(error for error, *_ in errors) / len(errors)
    click.echo(f"fitted {len(points)} points, mean error {mean:.1%}; the worst:")
    for error, name, real, fitted in errors[-5:]:
        click.echo(f"  {name}: {1e3 * real:.2f} ms measured, {1e3 * fitted:.2f} ms fitted ({error:.0%})")
    for part in (costs.step, costs.overheads):
        values = ", ".join(f"{name} {1e6 * value:.4g}" for name, value in dataclasses.asdict(part).items())
        click.echo(f"{type(part).__name__}, µs: {values}")
    return costs


if __name__ == "__main__":
    main()
