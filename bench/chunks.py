"""What the rules for chunks of prompts do (scheduler_proc/chunk_budget.py): `python -m bench.chunks`.

The scheduler of a cluster serves the same requests by other rules, on machines that are two or three numbers: nothing
but the rules differs, and a run is the same every time. Rules are pairs: how far a step goes beyond what comes
(HEADROOM, 0 does not look at it), and the power of the number of decodes by which what waits counts less (CROWD).
"""

from collections.abc import Iterable

import click

from scheduler_proc import chunk_budget
from scheduler_proc.cost_model import CostModel, LinearCost, ModelShape, Overheads, Roofline
from scheduler_proc.sim_report import Report
from scheduler_proc.simulator import configure, simulate
from scheduler_proc.workload import Lengths, Recipe, Vocabulary, generate

RULES = {"slowdown alone": (0.0, 1.4), "keeping up": (chunk_budget.HEADROOM, chunk_budget.CROWD)}
LLAMA_8B = ModelShape(
    weight_bytes=15_009_000_000, kv_bytes_per_token=131_072, flops_per_token=13_960_000_000,
    flops_per_sample=1_050_700_000, flops_per_pair=524_288,
)  # fmt: skip
OVERHEADS = Overheads(submit_s=0.002, plan_s=0.001, turnaround_s=0.001, result_s=0.001, deliver_s=0.002)
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
)
LARGE = (
    recipe("1024", "128", 640, 64),
    recipe("lognormal:500:1", "lognormal:200:0.6", 640, 64),
    recipe("lognormal:500:1", "lognormal:200:0.6", 1000, rate=15.0),
)
MACHINES: tuple[Machine, ...] = (
    ("0.6B parameters, two cores with AVX2 (37 ms, 7 ms a token)", LinearCost(0.037, 0.007), SMALL),
    ("0.6B parameters, two threads with AMX (42 ms, 0.5 ms a token)", LinearCost(0.042, 0.0005), SMALL),
    ("8B parameters, a GPU (2.8 TB/s, 500 TFLOP/s)", Roofline(LLAMA_8B, 2.8e12, 500e12, 0.0008), LARGE),
)


def name_of(work: Recipe) -> str:
    lengths = [f"{x.a:g}" if x.kind == "fixed" else f"about {x.a:g}" for x in (work.prompt, work.output)]
    come = f"{work.concurrency} at a time" if work.concurrency else f"{work.rate:g} a second"
    return "in {}, out {}, {}".format(*lengths, come)


def serve(work: Recipe, cost: CostModel, rules: tuple[float, float]) -> Report:
    """Serve the workload by these rules."""
    own = chunk_budget.HEADROOM, chunk_budget.CROWD
    chunk_budget.HEADROOM, chunk_budget.CROWD = rules
    try:
        traffic = generate(work)
        setup = configure({"kv_tokens": 400_000}, traffic.longest, cost, OVERHEADS)
        return simulate(setup, traffic, Vocabulary(seed=work.seed)).report
    finally:
        chunk_budget.HEADROOM, chunk_budget.CROWD = own


def table(machine: Machine, rules: dict[str, tuple[float, float]]) -> Iterable[str]:
    """A table in Markdown, row by row as they are computed."""
    title, cost, workloads = machine
    yield f"{title}\n"
    yield "| requests | rules | output tok/s | TTFT p50, ms | TTFT p99, ms | ITL p50, ms | ITL p99, ms |"
    yield "|---|---|---|---|---|---|---|"
    for work in workloads:
        for name, pair in rules.items():
            report = serve(work, cost, pair)
            times = (report.ttft_s.p50, report.ttft_s.p99, report.itl_s.p50, report.itl_s.p99)
            columns = [f"{report.output_tokens_per_s:.1f}", *(f"{1e3 * x:,.0f}" for x in times)]
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
        rules[text] = (headroom, crowd)
    for machine in MACHINES:
        for line in table(machine, rules):
            click.echo(line)


if __name__ == "__main__":
    main()
