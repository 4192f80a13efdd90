"""Which process uses the CPU while a cluster serves: what is left of the cores for the model.

    python -m bench.processes --model DIR --concurrency 1,8,32

A closed loop over HTTP, as in bench/compare.py. Times are of the processes' own clocks (user and system), switches are
those that the system made against their will: another process took the core.
"""

import os
import subprocess
import sys
import time
from typing import Any

import click
import psutil

from bench.clusters import ROOT, machine, started


def usage(processes: dict[str, psutil.Process]) -> dict[str, tuple[float, int]]:
    """CPU seconds and involuntary context switches of each process so far."""
    found = {}
    for name, process in processes.items():
        times = process.cpu_times()
        found[name] = (times.user + times.system, process.num_ctx_switches().involuntary)
    return found


def load(url: str, concurrency: int, requests: int, input_len: int, output_len: int) -> tuple[float, float]:
    """Seconds that a closed loop took, and the CPU seconds of the client."""
    command = [
        sys.executable, str(ROOT / "client.py"), "bench", "--url", url, "--requests", str(requests),
        "--input-len", str(input_len), "--output-len", str(output_len), "--concurrency", str(concurrency),
        "--prompts", "ids", "--vocab-size", "1000", "--warm-up", "0",
    ]  # fmt: skip
    before, begin = os.times(), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    after = os.times()
    if done.returncode:
        raise click.ClickException(done.stderr or done.stdout)
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - begin, spent


@click.command(context_settings={"show_default": True})
@click.option("--model", default=None, help="Checkpoint directory.  [default: the demo model]")
@click.option("--concurrency", "sizes", default="1,8,32")
@click.option("--input-len", default=128)
@click.option("--output-len", default=128)
@click.option("--flag", "flags", multiple=True, help="A further argument of launch.py.")
def main(model: str | None, sizes: str, input_len: int, output_len: int, flags: tuple[str, ...]) -> None:
    """Print a table for each concurrency."""
    chosen = ["--model", model] if model is not None else []
    with started(*chosen, "--port", "0", *flags) as info:
        pids: dict[str, Any] = info["pids"]
        processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        url = info["addresses"]["http"]
        load(url, 2, 4, input_len, 8)
        click.echo(f"{machine()}; in {input_len} out {output_len}")
        for size in map(int, sizes.split(",")):
            requests = max(3, size)
            before = usage(processes)
            took, client = load(url, size, requests, input_len, output_len)
            after = usage(processes)
            tokens = requests * output_len
            click.echo(f"\nconcurrency {size}: {tokens / took:.0f} output tokens/s with the client's start\n")
            click.echo(
                "| process | CPU ms per output token | share of a core | taken off the core, per s |\n|---|---|---|---|"
            )
            for name in processes:
                spent, taken = (b - a for a, b in zip(before[name], after[name], strict=True))
                click.echo(f"| {name} | {spent * 1e3 / tokens:.3f} | {spent / took:.1%} | {taken / took:.0f} |")
            click.echo(f"| client of the benchmark | {client * 1e3 / tokens:.3f} | {client / took:.1%} | |")


if __name__ == "__main__":
    main()
