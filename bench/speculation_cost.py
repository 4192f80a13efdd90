"""What speculation costs the scheduler where nothing is ever guessed: processor time per step, on and off.

    python -m bench.speculation_cost

Random tokens, no workers: results come at once, so that nothing but `plan` and `commit` is measured.
"""

import random
import time
from array import array
from collections import deque

import click

from bench.clusters import machine
from common.config import SchedulerConfig
from common.messages import AddRequest, StepPlan, StepResult, ints
from common.sampling_params import DrawParams
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler

VOCABULARY, STEP_NS = 8000, 2_000_000


def cost(speculation: str, rows: int, steps: int) -> float:
    """Microseconds per step with `rows` requests that decode."""
    rng = random.Random(rows)
    scheduler = Scheduler(SchedulerConfig(speculation=speculation), KVManager(8192, 16), 4096)
    for rid in range(rows):
        prompt = ints(*(rng.randrange(VOCABULARY) for _ in range(64)))
        scheduler.handle(AddRequest(rid, prompt, 2 * steps, ints(), DrawParams()), 1)
    tokens = [ints(*(rng.randrange(VOCABULARY) for _ in range(rows))) for _ in range(steps)]
    plans: deque[StepPlan] = deque()
    spent, now = 0, 1
    for own in tokens:
        begin = time.process_time_ns()
        while (plan := scheduler.plan(now)) is not None:
            plans.append(plan)
        spent += time.process_time_ns() - begin
        step = scheduler.in_flight[0]
        wrong = ints(*(0 for guesses in step.guesses if guesses))
        times = array("q", (now, now, now + STEP_NS))
        result = StepResult(plans.popleft().step_id, 0, "0", own[: len(step.sampled)], times, accepted=wrong)
        now += STEP_NS
        begin = time.process_time_ns()
        scheduler.commit(result, now)
        spent += time.process_time_ns() - begin
    return spent / steps / 1e3


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=600)
@click.option("--repeats", default=5)
@click.option("--batches", default="1,8,32", help="Requests at once.")
def main(steps: int, repeats: int, batches: str) -> None:
    """Print the table of docs/speculation.md; the least of the repeats, in turns."""
    click.echo(f"{machine()}\n\n| requests at once | off, µs per step | ngram, µs per step |\n|---|---|---|")
    for rows in map(int, batches.split(",")):
        runs = [(cost("off", rows, steps), cost("ngram", rows, steps)) for _ in range(repeats)]
        click.echo(f"| {rows} | {min(a for a, _ in runs):.0f} | {min(b for _, b in runs):.0f} |")


if __name__ == "__main__":
    main()
