"""What weights in 12 bits gain and cost: whole steps with plain and with compressed weights, in turn in one process.

    python -m bench.compression --model qwen3-0.6b-rand

Steps of both models alternate, so that what else happens on the machine meets them alike.
"""

import statistics
import time
from pathlib import Path

import click

from bench.clusters import machine
from bench.cpu_steps import filled_cache, load_decoder, make_step
from worker_proc.cpu.decoder import CpuDecoder
from worker_proc.cpu.features import LEVELS, Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.machine import num_cpus


def measure(models: list[CpuDecoder], rows: int, new: int, total: int, repeats: int) -> list[float]:
    """Median seconds of a step of `rows` requests that compute `new` of their `total` tokens, by model."""
    batch, pages = make_step(rows, new, total, 0)
    cache = filled_cache(models[0], pages, rows)
    took: list[list[float]] = [[] for _ in models]
    for _ in range(repeats + 1):
        for model, times in zip(models, took, strict=True):
            began = time.perf_counter()
            model.greedy(batch, cache)
            times.append(time.perf_counter() - began)
    return [statistics.median(times[1:]) for times in took]


@click.command(context_settings={"show_default": True})
@click.option("--model", "path", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--level", type=click.Choice(LEVELS), default=cpu_features().levels()[0])
@click.option("--threads", type=int, default=num_cpus())
@click.option("--decodes", default="1,2,4,8,16,32", help="Requests that decode, with 192 tokens each.")
@click.option("--prompts", default="128", help="Lengths of a prompt.")
@click.option("--repeats", default=30, help="Of decodes; a quarter of them for prompts.")
def main(path: Path, level: Level, threads: int, decodes: str, prompts: str, repeats: int) -> None:
    """Print a table."""
    native = load_library(level)
    native.set_threads(threads)
    models = [load_decoder(path, native, compression=compression) for compression in ("off", "on")]
    click.echo(f"{machine()}, {level}, {threads} threads; medians in ms")
    click.echo("\n| step | 16 bits | 12 bits | |\n|---|---|---|---|")
    cases = [(f"decode {rows} x 192", rows, 1, 192, repeats) for rows in map(int, decodes.split(","))]
    cases += [(f"prefill 1 x {new}", 1, new, new, repeats // 4) for new in map(int, prompts.split(","))]
    for name, *case in cases:
        plain, compressed = measure(models, *case)
        click.echo(f"| {name} | {plain * 1e3:.1f} | {compressed * 1e3:.1f} | {compressed / plain - 1:+.0%} |")


if __name__ == "__main__":
    main()
