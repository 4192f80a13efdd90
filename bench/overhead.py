"""What the processes around the model cost: start-up, step overhead by batch size, one token's way by process.

    python -m bench.overhead --repeats 5

Every figure is a median over all steps of a run, then over the repeats. Times come from the stamps that travel with
each batch (CLOCK_MONOTONIC, one machine), so nothing is measured twice and nothing is added to the path.
"""

import itertools
import json
import statistics
from collections.abc import Sequence

import click

from bench.clusters import cluster, machine
from common.connection import Connection, Row
from common.messages import Finish
from common.sampling_params import SamplingParams

# what lies between two neighbouring stamps of a token's way
HOPS = (
    "scheduler -> worker (encode, socket, decode)",
    "worker: build the batch",
    "worker: forward and sample",
    "worker -> scheduler (socket, commit)",
    "scheduler -> detokenizer (socket)",
    "detokenizer: text",
    "detokenizer -> tokenizer (socket, ledger)",
    "tokenizer -> client (socket, decode)",
)


def drive(connection: Connection, batch: int, tokens: int) -> list[list[int]]:
    """Run `batch` equal requests at once; the stamps of every step in which all of them decoded, one list per step."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
    rids = {connection.submit([5 + i, 6, 7, 8], params) for i in range(batch)}
    steps: dict[int, tuple[int, list[int]]] = {}
    while rids:
        for row in connection.poll(10):
            if not isinstance(row, Row):
                raise SystemExit(f"refused: {row.problem}")
            seen, _ = steps.get(row.times[0], (0, []))
            steps[row.times[0]] = (seen + 1, [*row.times, row.received_ns])
            if row.finish is not Finish.NONE:
                rids.remove(row.rid)
    full = [stamps for _, (seen, stamps) in sorted(steps.items()) if seen == batch]
    return full[5:-5]  # the first and last ones mix with prefill and endings


def summarize(stamps: Sequence[Sequence[int]]) -> dict[str, float]:
    """Medians in microseconds: the period of a step, the model's part of it, and each hop."""
    median = statistics.median
    result = {
        "period": median((b[0] - a[0]) / 1e3 for a, b in itertools.pairwise(stamps)),
        "model": median((s[3] - s[2]) / 1e3 for s in stamps),
        "way": median((s[-1] - s[0]) / 1e3 for s in stamps),
    }
    for i, hop in enumerate(HOPS):
        result[hop] = median((s[i + 1] - s[i]) / 1e3 for s in stamps)
    return result


@click.command()
@click.option("--repeats", default=5, help="Clusters started for each setting.")
@click.option("--tokens", default=200, help="Tokens per request.")
@click.option("--batches", default="1,8,32")
@click.option("--model", default=None, help="Checkpoint directory.  [default: the demo model]")
@click.option("--steps-in-flight", default="1,2")
@click.option("--tp", default="1,2")
@click.option("--json-file", type=click.File("w"), default=None)
def main(
    repeats: int, tokens: int, batches: str, model: str | None, steps_in_flight: str, tp: str, json_file: object
) -> None:
    """Print the tables of docs/benchmarks.md."""
    sizes = [int(b) for b in batches.split(",")]
    settings = [(int(t), int(s)) for t in tp.split(",") for s in steps_in_flight.split(",")]
    ready: dict[tuple[int, int], list[float]] = {s: [] for s in settings}
    runs: dict[tuple[int, int, int], list[dict[str, float]]] = {}
    for _ in range(repeats):  # settings take turns, so that a drifting machine hits all of them
        for ranks, ahead in settings:
            flags = ["--tp", str(ranks), "--steps-in-flight", str(ahead), *(["--model", model] if model else [])]
            with cluster(*flags) as (connection, ready_s):
                ready[ranks, ahead].append(ready_s)
                for size in sizes:
                    drive(connection, size, 30)  # warm-up
                    runs.setdefault((ranks, ahead, size), []).append(summarize(drive(connection, size, tokens)))
    report = {
        key: {name: statistics.median(run[name] for run in results) for name in results[0]}
        for key, results in runs.items()
    }
    click.echo(f"{machine()}\nmedians of {repeats} runs of {tokens} tokens per request\n")
    click.echo("| tp | steps in flight | ready, s |\n|---|---|---|")
    for (ranks, ahead), seconds in ready.items():
        click.echo(f"| {ranks} | {ahead} | {statistics.median(seconds):.2f} |")
    columns = ("tp", "steps in flight", "batch", "step, µs", "model, µs", "overhead, µs", "tokens/s")
    click.echo("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for (ranks, ahead, size), r in report.items():
        rate = size / r["period"] * 1e6
        click.echo(
            f"| {ranks} | {ahead} | {size} | {r['period']:.0f} | {r['model']:.0f} | {r['period'] - r['model']:.0f} "
            f"| {rate:.0f} |"
        )
    shown = [key for key in report if key[1] == settings[0][1]]
    click.echo("\n| hop, µs | " + " | ".join(f"tp {t} batch {b}" for t, _, b in shown) + " |")
    click.echo("|---" * (len(shown) + 1) + "|")
    for hop in (*HOPS, "way"):
        name = "planned to received, whole way" if hop == "way" else hop
        click.echo(f"| {name} | " + " | ".join(f"{report[key][hop]:.0f}" for key in shown) + " |")
    if json_file is not None:
        rows = [{"tp": t, "steps_in_flight": s, "batch": b, **values} for (t, s, b), values in report.items()]
        json.dump({"machine": machine(), "rows": rows}, json_file, indent=1)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
