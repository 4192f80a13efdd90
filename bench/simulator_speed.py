"""How fast the simulator is, in wall time per simulated step and against real time.

    python -m bench.simulator_speed [--costs FILE ...]

A closed loop of `batch` requests with answers of 256 tokens, steps taken one by one and together (steady.py); and the
same with lengths that differ and arrivals at random, where fewer steps can be taken together. Each is run `--repeats`
times in turn, and medians are printed. Without costs files a step takes 10 ms.
"""

import dataclasses
import statistics
from pathlib import Path

import click

from bench.clusters import machine
from common.config import SchedulerConfig
from scheduler_proc.cost_model import Costs, LinearCost, Overheads
from scheduler_proc.simulator import Setup, simulate
from scheduler_proc.workload import Lengths, Recipe, Vocabulary, Workload, generate


def workloads(batch: int) -> dict[str, Workload]:
    recipe = Recipe("random", 8 * batch, Lengths("fixed", 64), Lengths("fixed", 256), concurrency=batch)
    uneven = dataclasses.replace(recipe, prompt=Lengths("uniform", 32, 400), output=Lengths("uniform", 16, 496))
    return {"equal lengths": generate(recipe), "uneven lengths": generate(uneven)}


@click.command(context_settings={"show_default": True})
@click.option("--costs", "files", type=click.Path(path_type=Path), multiple=True, help="Fitted costs.")
@click.option("--repeats", type=int, default=3)
def main(files: tuple[Path, ...], repeats: int) -> None:
    """Print a table."""
    costs = [Costs.load(file) for file in files] or [Costs(LinearCost(10e-3), Overheads(), "steps of 10 ms")]
    click.echo(machine() + "\n")
    click.echo("| costs | batch | answers | step, ms | one by one, µs | together, µs | times real time |")
    click.echo("|---|---|---|---|---|---|---|")
    for each in costs:
        for batch in (1, 8, 32):
            for name, work in workloads(batch).items():
                setup = Setup(SchedulerConfig(max_running=batch), 8192, 16, work.longest, each.step, each.overheads)
                taken: dict[bool, list[float]] = {True: [], False: []}
                for _ in range(repeats):
                    for leaps, seconds in taken.items():
                        report = simulate(setup, work, Vocabulary(), leaps=leaps)
                        seconds.append(report.wall_s)
                single, joint = (statistics.median(taken[leaps]) for leaps in (False, True))
                steps, duration = report.steps, report.report.duration_s
                click.echo(
                    f"| {each.source.split(' on ')[0]} | {batch} | {name} | {1e3 * duration / steps:.2f} | "
                    f"{1e6 * single / steps:.1f} | {1e6 * joint / steps:.1f} | {duration / joint:,.0f} |"
                )


if __name__ == "__main__":
    main()
