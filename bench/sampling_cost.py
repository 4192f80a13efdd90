"""What sampling features cost in a step: `python -m bench.sampling_cost`.

Every case draws tokens for the same logits; cases take turns, so that a busy machine slows all of them alike. Medians
in milliseconds, and the difference to a batch that uses nothing.
"""

import statistics
import time
from array import array
from collections.abc import Callable

import click
import torch
from torch import Tensor

from common.messages import History, StepPlan, ints
from common.sampling_params import DrawParams, LogitEdits
from worker_proc.draw_step import DrawStep
from worker_proc.input_batch import SampledRows
from worker_proc.sampler import Sampler
from worker_proc.staging import Staged, Staging

CASES = {
    "repetition_penalty": DrawParams(0.0, edits=LogitEdits(repetition_penalty=1.2)),
    "presence_penalty": DrawParams(0.0, edits=LogitEdits(presence_penalty=0.5)),
    "frequency_penalty": DrawParams(0.0, edits=LogitEdits(frequency_penalty=0.5)),
    "logit_bias, 8 tokens": DrawParams(0.0, edits=LogitEdits(logit_bias=dict.fromkeys(range(8), 1.0))),
    "min_tokens": DrawParams(0.0, edits=LogitEdits(min_len=2**20, ends=array("i", [2, 3]))),
    "logprobs 0": DrawParams(0.0, logprobs=0),
    "logprobs 5": DrawParams(0.0, logprobs=5),
    "temperature": DrawParams(0.8),
    "temperature, top_k 50": DrawParams(0.8, top_k=50),
    "temperature, top_p 0.95": DrawParams(0.8, top_p=0.95),
    "temperature, min_p 0.05": DrawParams(0.8, min_p=0.05),
}


def step_of(rows: int, vocab: int, draws: list[DrawParams], known: int) -> tuple[DrawStep, SampledRows]:
    step = DrawStep(rows, vocab)
    histories = tuple(
        History(slot, known // 2, ints(*((slot + 7 * i) % vocab for i in range(known))))
        for slot, draw in enumerate(draws)
        if draw.needs_history
    )
    none = ints()
    slots = ints(*range(rows))
    plan = StepPlan(
        0, 0, "0", none, slots, ints(*[known] * rows), tuple(draws), none, none, none, none, none, none, none, none,
        b"", histories,
    )  # fmt: skip
    staging = Staging("cpu")
    step.apply(plan, staging)
    staging.send()
    index = torch.arange(rows)
    return step, SampledRows(index, torch.full((rows,), known), Staged(index))


@click.command()
@click.option("--rows", default=256)
@click.option("--vocab", default=32_000)
@click.option("--known", default=512, help="Tokens of each request, half of them output.")
@click.option("--rounds", default=15)
def main(rows: int, vocab: int, known: int, rounds: int) -> None:
    torch.set_num_threads(1)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3
    sampler = Sampler(rows)
    staging = Staging("cpu")
    sampler.set_params(range(rows), [DrawParams(0.0)] * rows, staging)
    staging.send()
    index, positions = torch.arange(rows), torch.full((rows,), known)
    runs: dict[str, Callable[[Tensor], object]] = {
        "the sampler alone": lambda x: sampler.sample(x, sampler.prepare(index, positions, Staging("cpu")))
    }

    def add(name: str, draws: list[DrawParams]) -> None:
        step, sampled = step_of(rows, vocab, draws, known)
        runs[name] = lambda x: step.draw(x, sampled, step.prepare(sampled, Staging("cpu")))

    add("nothing of it", [DrawParams(0.0)] * rows)
    for name, draw in CASES.items():
        add(name, [draw] * rows)
    add("one row with all penalties", [DrawParams(0.0, edits=LogitEdits({1: 1.0}, 0, ints(), 1.2, 0.5, 0.5)),
                                       *[DrawParams(0.0)] * (rows - 1)])  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        for _ in range(rounds):
            for name, run in runs.items():
                fresh = logits.clone()  # edits change them
                begin = time.perf_counter()
                run(fresh)
                times[name].append((time.perf_counter() - begin) * 1e3)
    plain = statistics.median(times["nothing of it"])
    click.echo(f"{rows} rows of {vocab} logits, greedy unless said, {known} known tokens each, one thread")
    for name, values in times.items():
        median = statistics.median(values)
        click.echo(f"{name:<28} {median:9.2f} ms {median - plain:+9.2f}")


if __name__ == "__main__":
    main()
