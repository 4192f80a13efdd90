"""What the rules for chunks of prompts do (scheduler_proc/chunk_budget.py, ramp_up.py): `python -m bench.chunks`.

The scheduler of a cluster serves the same requests by other rules, on machines that are two or three numbers: nothing
but the rules differs, and a run is the same every time.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest.mock import patch

import click

from scheduler_proc import chunk_budget
from scheduler_proc.cost_model import CostModel, LinearCost, ModelShape, Overheads, Roofline
from scheduler_proc.ramp_up import RampUp
from scheduler_proc.sim_report import Report
from scheduler_proc.simulator import configure, simulate
from scheduler_proc.workload import Lengths, Recipe, Vocabulary, Workload, generate


@dataclass(frozen=True)
class Rules:
    """How far a step goes beyond what comes (0 does not look at it), the power of the number of decodes by which what
    waits counts less, and whether answers that have only begun wait for the prompts of their burst."""

    headroom: float = chunk_budget.HEADROOM
    crowd: float = chunk_budget.CROWD
    ramp_up: bool = True


RULES = {
    "slowdown alone": Rules(0.0, 1.4, ramp_up=False),
    "keeping up": Rules(ramp_up=False),
    "first tokens first": Rules(),
}
LLAMA_8B = ModelShape(
    weight_bytes=15_009_000_000, kv_bytes_per_token=131_072, flops_per_token=13_960_000_000,
    flops_per_sample=1_050_700_000, flops_per_pair=524_288,
)  # fmt: skip
OVERHEADS = Overheads(submit_s=0.002, plan_s=0.001, turnaround_s=0.001, result_s=0.001, deliver_s=0.002)
BURST = 32  # requests
Machine = tuple[str, CostModel, tuple[Recipe, ...]]


def recipe(
    prompt: str, output: str, requests: int, concurrency: int | None = None, rate: float | None = None
) -> Recipe:
    lengths = Lengths.parse(prompt), Lengths.parse(output)
    return Recipe("random", requests, *lengths, concurrency=concurrency, rate=rate)


SMALL = (
    recipe("128", "128", 160, 8),
    recipe("128", "128", 320, 32),
    recipe("1024", "16", 80, 4),
    recipe("lognormal:200:1", "lognormal:100:0.6", 300, 8),
    recipe("lognormal:200:1", "lognormal:100:0.6", 400, 32),
    recipe("lognormal:200:1", "lognormal:100:0.6", 300, rate=0.2),
    recipe("128", "128", 320),
    recipe("lognormal:200:1", "lognormal:100:0.6", 320),
)
LARGE = (
    recipe("1024", "128", 640, 64),
    recipe("lognormal:500:1", "lognormal:200:0.6", 640, 64),
    recipe("lognormal:500:1", "lognormal:200:0.6", 1000, rate=15.0),
    recipe("lognormal:500:1", "lognormal:200:0.6", 320),
)
MACHINES: tuple[Machine, ...] = (
    ("0.6B parameters, two cores with AVX2 (37 ms, 7 ms a token)", LinearCost(0.037, 0.007), SMALL),
    ("0.6B parameters, two threads with AMX (42 ms, 0.5 ms a token)", LinearCost(0.042, 0.0005), SMALL),
    ("8B parameters, a GPU (2.8 TB/s, 500 TFLOP/s)", Roofline(LLAMA_8B, 2.8e12, 500e12, 0.0008), LARGE),
)


def name_of(work: Recipe) -> str:
    lengths = [f"{x.a:g}" if x.kind == "fixed" else f"about {x.a:g}" for x in (work.prompt, work.output)]
    come = f"{BURST} at once"
    if work.concurrency:
        come = f"{work.concurrency} at a time"
    elif work.rate:
        come = f"{work.rate:g} a second"
    return "in {}, out {}, {}".format(*lengths, come)


def traffic_of(work: Recipe) -> Workload:
    """Where nothing says how its requests come, they do so in bursts, each long after the one before it has ended."""
    made = generate(work)
    if work.concurrency or work.rate:
        return made
    far = 10_000.0  # seconds
    return Workload(
        tuple(
            replace(one, turns=(replace(one.turns[0], not_before_s=far * (i // BURST)),))
            for i, one in enumerate(made.sessions)
        )
    )


def serve(work: Recipe, cost: CostModel, rules: Rules) -> Report:
    """Serve the workload by these rules."""
    with ExitStack() as changed:
        changed.enter_context(patch.object(chunk_budget, "HEADROOM", rules.headroom))
        changed.enter_context(patch.object(chunk_budget, "CROWD", rules.crowd))
        if not rules.ramp_up:
            changed.enter_context(patch.object(RampUp, "holds", lambda *_: False))
        traffic = traffic_of(work)
        setup = configure({"kv_tokens": 400_000}, traffic.longest, cost, OVERHEADS)
        return simulate(setup, traffic, Vocabulary(seed=work.seed)).report


def table(machine: Machine, rules: dict[str, Rules]) -> Iterable[str]:
    """A table in Markdown, row by row as they are computed."""
    title, cost, workloads = machine
    yield f"{title}\n"
    yield "| requests | rules | output tok/s | TTFT p50, ms | TTFT p99, ms | ITL p50, ms | ITL p99, ms | E2E p50, s |"
    yield "|---|---|---|---|---|---|---|---|"
    for work in workloads:
        for name, own in rules.items():
            report = serve(work, cost, own)
            times = (report.ttft_s.p50, report.ttft_s.p99, report.itl_s.p50, report.itl_s.p99)
            rate = f"{report.output_tokens_per_s:.1f}" if work.concurrency or work.rate else ""
            columns = [rate, *(f"{1e3 * x:,.0f}" for x in times), f"{report.e2e_s.p50:.1f}"]
            yield f"| {name_of(work)} | {name} | {' | '.join(columns)} |"
    yield ""


@click.command()
@click.option(
    "--rule", "added", multiple=True, metavar="HEADROOM:CROWD", help="Further rules, such as 1.25:1.6 (repeatable)."
)
def main(added: tuple[str, ...]) -> None:
    """Print a table for each machine."""
    rules = dict(RULES)
    for text in added:
        try:
            headroom, crowd = map(float, text.split(":"))
        except ValueError:
            raise click.BadParameter("must be HEADROOM:CROWD", param_hint="--rule") from None
        rules[text] = Rules(headroom, crowd)
    for machine in MACHINES:
        for line in table(machine, rules):
            click.echo(line)


if __name__ == "__main__":
    main()
