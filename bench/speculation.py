"""Speculation on and off, side by side: how many tokens per second, and how many guesses were right.

    python -m bench.speculation --model ./demo_model

Two clusters run, one with `--speculation ngram`; they take turns, workload by workload, so that a drifting machine hits
both. Each figure is the median over the repeats; a ratio is the median of the ratios of neighbouring runs.

    loop     the same token again and again (logit_bias): every guess is right
    greedy   greedy, from random tokens: small models, and random weights, fall into loops sooner or later
    few      drawn from three tokens alone (logit_bias, temperature 10): one guess of three is right
    random   drawn from the whole vocabulary: guesses are never right
"""

import json
import random
import statistics
from collections.abc import Callable, Sequence

import click

from bench.clusters import cluster, machine
from common.connection import Connection, Row
from common.fields import IntArray
from common.messages import Finish
from common.sampling_params import SamplingParams

Prompt = str | list[int]
COUNTERS = ("output_tokens", "steps", "drafts", "draft_tokens", "accepted_tokens")


def loop(rng: random.Random, tokens: int) -> tuple[Prompt, SamplingParams]:
    prompt = [rng.randrange(100, 1000) for _ in range(64)]
    bias = {rng.randrange(100, 1000): 100.0}
    return prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, logit_bias=bias)


def greedy(rng: random.Random, tokens: int) -> tuple[Prompt, SamplingParams]:
    prompt = [rng.randrange(100, 1000) for _ in range(64)]
    return prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)


def few(rng: random.Random, tokens: int) -> tuple[Prompt, SamplingParams]:
    prompt = [rng.randrange(100, 1000) for _ in range(64)]
    bias = dict.fromkeys(rng.sample(range(100, 1000), 3), 100.0)
    return prompt, SamplingParams(
        temperature=10.0, seed=rng.randrange(2**31), ignore_eos=True, max_tokens=tokens, logit_bias=bias
    )


def at_random(rng: random.Random, tokens: int) -> tuple[Prompt, SamplingParams]:
    prompt = [rng.randrange(100, 1000) for _ in range(64)]
    return prompt, SamplingParams(temperature=1.0, seed=rng.randrange(2**31), ignore_eos=True, max_tokens=tokens)


WORKLOADS: dict[str, Callable[[random.Random, int], tuple[Prompt, SamplingParams]]] = {
    "loop": loop,
    "greedy": greedy,
    "few": few,
    "random": at_random,
}


def drive(
    connection: Connection, requests: Sequence[tuple[Prompt, SamplingParams]]
) -> tuple[float, list[IntArray], dict[str, int]]:
    """Send all requests at once; output tokens per second from the first to the last token, the answers, and what the
    scheduler counted meanwhile."""
    before = connection.stats()
    rids = {connection.submit(prompt, params): i for i, (prompt, params) in enumerate(requests)}
    answers: list[IntArray] = [[] for _ in requests]  # type: ignore[misc]
    first, left, tokens = 0, len(requests), 0
    while left:
        for row in connection.poll(30):
            if not isinstance(row, Row):
                raise SystemExit(f"refused: {row.problem}")
            answers[rids[row.rid]].extend(row.token_ids)
            tokens += len(row.token_ids)
            first = first or row.received_ns
            left -= row.finish is not Finish.NONE
            last = row.received_ns
    after = connection.stats()
    counts = {name: after[f"scheduler.{name}"] - before[f"scheduler.{name}"] for name in COUNTERS}
    return (tokens - len(requests)) / (last - first) * 1e9, answers, counts


@click.command(context_settings={"show_default": True})
@click.option("--model", default=None, help="Checkpoint directory.  [default: the demo model]")
@click.option("--repeats", default=5, help="Runs of each workload on each cluster.")
@click.option("--tokens", default=128, help="Tokens per answer.")
@click.option("--batches", default="1,8,32", help="Requests at once.")
@click.option("--workloads", default=",".join(WORKLOADS))
@click.option("--flags", default="", help="Further flags of launch.py for both clusters.")
@click.option(
    "--on", default="--speculation ngram", help="Flags of the cluster that speculates; none: how equal are equals?"
)
@click.option("--json-file", type=click.File("w"), default=None)
def main(
    model: str | None, repeats: int, tokens: int, batches: str, workloads: str, flags: str, on: str, json_file: object
) -> None:
    """Print the table of docs/speculation.md. Ends with an error when a token differs."""
    common = [*(["--model", model] if model else []), *flags.split()]
    cases = [(name, int(size)) for name in workloads.split(",") for size in batches.split(",")]
    rates: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    counted: dict[tuple[str, int], dict[str, int]] = {}
    with cluster(*common) as (off, _), cluster(*common, *on.split()) as (ngram, _):
        for repeat in range(-1, repeats):  # the first one warms up
            for name, size in cases:
                rng = random.Random(f"{name} {size} {repeat}")
                requests = [WORKLOADS[name](rng, tokens) for _ in range(size)]
                sides = (off, ngram) if repeat % 2 else (ngram, off)
                results = {id(side): drive(side, requests) for side in sides}
                (plain, expected, _), (guessed, answers, counts) = results[id(off)], results[id(ngram)]
                if answers != expected:
                    raise SystemExit(f"{name}: a token differs")
                if repeat >= 0:
                    rates[name, size].append((plain, guessed))
                    sums = counted.setdefault((name, size), dict.fromkeys(COUNTERS, 0))
                    counted[name, size] = {key: sums[key] + counts[key] for key in COUNTERS}
    median = statistics.median
    click.echo(f"{machine()}\nmedians of {repeats} runs in turns, {tokens} tokens per request, every token equal\n")
    click.echo("| workload | requests at once | off, tokens/s | ngram, tokens/s | ratio | least | guesses right "
               "| tokens per row and step |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    report = []
    for (name, size), pairs in rates.items():
        c = counted[name, size]
        ratios = [b / a for a, b in pairs]
        right = c["accepted_tokens"] / c["draft_tokens"] if c["draft_tokens"] else None
        # a request's first token comes with its prompt, each further row gives one and the guesses that were right
        rows = c["output_tokens"] - c["accepted_tokens"]
        row = {
            "workload": name, "batch": size, "off": median(a for a, _ in pairs), "on": median(b for _, b in pairs),
            "ratio": median(ratios), "least": min(ratios), "right": right, "per_row": c["output_tokens"] / rows,
            **c,
        }  # fmt: skip
        report.append(row)
        shown = "-" if right is None else f"{right:.0%} of {c['draft_tokens']}"
        click.echo(f"| {name} | {size} | {row['off']:.0f} | {row['on']:.0f} | {row['ratio']:.2f} | {row['least']:.2f} "
                   f"| {shown} | {row['per_row']:.2f} |")  # fmt: skip
    if json_file is not None:
        json.dump({"machine": machine(), "rows": report}, json_file, indent=1)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
