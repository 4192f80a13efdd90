"""What sampling features cost in a step: `python -m bench.sampling_cost`.

Every case draws tokens for the same logits, by torch and by the native kernels (`worker_proc/cpu/sampling.py`); cases
take turns, so that a busy machine slows all of them alike. Medians in milliseconds, and the difference to a batch that
uses nothing.
"""

import statistics
import time
from array import array

import click
import torch

from bench.clusters import machine
from common.messages import History, StepPlan, ints
from common.sampling_params import DrawParams, LogitEdits
from worker_proc.cpu.library import best_library
from worker_proc.cpu.sampling import NativeDraws
from worker_proc.draw_step import DrawStep
from worker_proc.input_batch import SampledRows
from worker_proc.memory import keep_freed_memory
from worker_proc.staging import Staged, Staging

NOTHING = "nothing"
CASES = {
    "repetition_penalty": DrawParams(0.0, edits=LogitEdits(repetition_penalty=1.2)),
    "presence_penalty": DrawParams(0.0, edits=LogitEdits(presence_penalty=0.5)),
    "frequency_penalty": DrawParams(0.0, edits=LogitEdits(frequency_penalty=0.5)),
    "logit_bias, 8 tokens": DrawParams(0.0, edits=LogitEdits(logit_bias=dict.fromkeys(range(8), 1.0))),
    "allowed_token_ids, 100": DrawParams(0.0, edits=LogitEdits(allowed=ints(*range(100)))),
    "bad_words, 8 of a token": DrawParams(0.0, edits=LogitEdits(bad_words=tuple(ints(i) for i in range(8)))),
    "bad_words, 8 of 3 tokens": DrawParams(0.0, edits=LogitEdits(bad_words=tuple(ints(i, 1, 2) for i in range(8)))),
    "min_tokens": DrawParams(0.0, edits=LogitEdits(min_len=2**20, ends=array("i", [2, 3]))),
    "logprobs 0": DrawParams(0.0, logprobs=0),
    "logprobs 5": DrawParams(0.0, logprobs=5),
    "logprobs 20": DrawParams(0.0, logprobs=20),
    "logprobs 5, temperature": DrawParams(0.8, logprobs=5),
    "logprobs 5, frequency_penalty": DrawParams(0.0, edits=LogitEdits(frequency_penalty=0.5), logprobs=5),
    "temperature": DrawParams(0.8),
    "temperature, top_k 50": DrawParams(0.8, top_k=50),
    "temperature, top_p 0.95": DrawParams(0.8, top_p=0.95),
    "temperature, min_p 0.05": DrawParams(0.8, min_p=0.05),
}


def step_of(
    rows: int, vocab: int, draws: list[DrawParams], known: int, native: NativeDraws | None
) -> tuple[DrawStep, SampledRows]:
    kernels = () if native is None else (native.draw, native.best, native.score)
    step = DrawStep(rows, vocab, "cpu", None, *kernels)
    histories = tuple(
        History(slot, known // 2, ints(*((slot + 7 * i) % vocab for i in range(known))))
        for slot, draw in enumerate(draws)
        if draw.needs_history
    )
    slots, lens = ints(*range(rows)), ints(*[known] * rows)
    plan = StepPlan(0, 0, "0", enter_slots=slots, enter_lens=lens, enter_draw=tuple(draws), histories=histories)
    staging = Staging("cpu")
    step.apply(plan, staging)
    staging.send()
    index = torch.arange(rows)
    return step, SampledRows(index, torch.full((rows,), known), Staged(index))


@click.command()
@click.option("--rows", default=256)
@click.option("--vocab", default=32_000)
@click.option("--known", default=512, help="Tokens of each request, half of them output.")
@click.option("--threads", default=1)
@click.option("--rounds", default=15)
def main(rows: int, vocab: int, known: int, threads: int, rounds: int) -> None:
    keep_freed_memory()  # as a worker does
    torch.set_num_threads(threads)
    library = best_library()
    if library is not None:
        library.set_threads(threads)
    ways = {"torch": None} if library is None else {"torch": None, "native": NativeDraws(library)}
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3
    all_penalties = DrawParams(0.0, edits=LogitEdits({1: 1.0}, 0, ints(), 1.2, 0.5, 0.5))
    cases = {name: [draw] * rows for name, draw in CASES.items()}
    cases = {NOTHING: [DrawParams(0.0)] * rows} | cases
    cases["one row with all penalties"] = [all_penalties, *[DrawParams(0.0)] * (rows - 1)]
    steps = {(name, way): step_of(rows, vocab, cases[name], known, ways[way]) for name in cases for way in ways}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    fresh = torch.empty_like(logits)
    with torch.inference_mode():
        for _ in range(rounds):
            for key, (step, sampled) in steps.items():
                fresh.copy_(logits)  # edits change them
                begin = time.perf_counter()
                step.draw(fresh, sampled, step.prepare(sampled, Staging("cpu")))
                times[key].append((time.perf_counter() - begin) * 1e3)
    middle = {key: statistics.median(values) for key, values in times.items()}
    click.echo(f"{machine()}: {rows} greedy rows of {vocab} logits, {known} known tokens each, {threads} threads\n")
    click.echo(
        "| in all rows | " + " | ".join(f"{way}, ms | more" for way in ways) + " |\n|---|" + "---|---|" * len(ways)
    )
    for name in cases:
        found = [(middle[name, way], middle[name, way] - middle[NOTHING, way]) for way in ways]
        click.echo(f"| {name} | " + " | ".join(f"{took:.2f} | {more:+.2f}" for took, more in found) + " |")


if __name__ == "__main__":
    main()
