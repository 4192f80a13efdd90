"""Whether scheduler, codec and sockets hide behind the model: steps of a real cluster beside a bare loop in one process
that executes the very plans which the cluster's scheduler made.

    python -m bench.hidden --model DIR --batch 64

A period is the median time from one step in which all requests decode to the next. Both run in turn, `repeats` times.
"""

import gc
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import click

from bench.clusters import ROOT, cluster, machine
from bench.overhead import drive
from common.config import CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig
from common.messages import StepPlan
from scheduler_proc.recording import Recording


def cluster_period(model: Path, batch: int, tokens: int, kv_tokens: int, record: Path) -> float:
    """Seconds, of a cluster that leaves its recording at `record`."""
    flags = ["--model", str(model), "--kv-tokens", str(kv_tokens), "--max-running", str(batch), "--record", str(record)]
    with cluster(*flags) as (connection, _):
        drive(connection, batch, 20)  # warm-up
        stamps = drive(connection, batch, tokens)
    return statistics.median((b[0] - a[0]) / 1e9 for a, b in itertools.pairwise(stamps))


def bare_period(model: Path, batch: int, kv_tokens: int, record: Path, home: Path) -> float:
    """Seconds, of the recorded plans in this process."""
    from worker_proc.startup import load_worker

    plans = [r.message for r in Recording.open(record).records() if isinstance(r.message, StepPlan)]
    config = ClusterConfig(
        str(home), ModelConfig(str(model)), CacheConfig(kv_tokens=kv_tokens), SchedulerConfig(max_running=batch)
    )
    runner = load_worker(config, 0, plans[0].group, home / "store").runner
    ends: list[tuple[bool, float]] = []
    for plan in plans:
        runner.execute(plan)
        decodes = sum(octet.bit_count() for octet in plan.decode)
        ends.append((decodes == batch and not plan.chunk_slots, time.perf_counter()))
    del runner
    gc.collect()
    return statistics.median(b[1] - a[1] for a, b in itertools.pairwise(ends) if a[0] and b[0])


@click.command()
@click.option("--model", type=click.Path(exists=True, path_type=Path), default=ROOT / "demo_model")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 32), show_default=True)
@click.option("--tokens", default=200, help="Tokens per request.")
@click.option("--repeats", default=3)
def main(model: Path, batches: tuple[int, ...], tokens: int, repeats: int) -> None:
    """Print a line per batch size."""
    click.echo(machine())
    for batch in batches:
        kv_tokens = batch * (tokens + 64)
        pairs = []
        for _ in range(repeats):
            with tempfile.TemporaryDirectory(prefix="rhz-") as home:
                record = Path(home) / "record"
                served = cluster_period(model, batch, tokens, kv_tokens, record)
                pairs.append((served, bare_period(model, batch, kv_tokens, record, Path(home))))
        served, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        click.echo(
            f"batch {batch:>4}: cluster {served * 1e3:8.3f} ms, bare loop {bare * 1e3:8.3f} ms, {ratio - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
