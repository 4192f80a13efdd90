"""`python -m tests.faults --minutes 60 --seed N`: a soak. The exit status is 1 when anything was found."""

import secrets
import sys
from pathlib import Path

import click

from bench.clusters import machine
from tests.faults.run import run


@click.command(context_settings={"show_default": True})
@click.option("--minutes", type=float, default=None, help="How long; rounds that have begun are finished.")
@click.option("--rounds", type=int, default=None, help="How many rounds.  [default: as --minutes allow]")
@click.option("--seed", type=int, default=None, help="Of the plan of all rounds.  [default: a new one]")
@click.option("--begin", type=int, default=0, help="Number of the first round.")
@click.option("--log", type=click.Path(path_type=Path), default=None, help="For the log of a cluster in trouble.")
def main(minutes: float | None, rounds: int | None, seed: int | None, begin: int, log: Path | None) -> None:
    """Hurt real clusters in random ways, and see that nothing is lost, duplicated or wrong."""
    if minutes is None and rounds is None:
        rounds = 8
    seconds = None if minutes is None else minutes * 60
    chosen = secrets.randbelow(2**31) if seed is None else seed
    click.echo(f"{machine()}\nseed {chosen}")
    report = run(chosen, rounds=rounds, seconds=seconds, begin=begin, tell=click.echo, log=log)
    click.echo(report.text())
    sys.exit(0 if report.ok else 1)


if __name__ == "__main__":
    main()
