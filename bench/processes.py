"""Which process uses the CPU while a cluster serves: what is left of the cores for the model.

    python -m bench.processes --model DIR --concurrency 1,8,32

First while nobody asks for anything, then in a closed loop over HTTP, as in bench/compare.py. Times are of the
processes' own clocks (user and system). A process that waits wakes up again; one that is taken off the core, by another
process, did not wait.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from bench.clusters import ROOT, machine, started


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has used so far: CPU seconds, and how often its threads waited or were taken off a core."""

    cpu_s: float
    waits: Counter[str]  # by thread
    taken: Counter[str]

    @staticmethod
    def of(process: psutil.Process) -> "Usage":
        times = process.cpu_times()
        used = Usage(times.user + times.system, Counter(), Counter())
        for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
            with contextlib.suppress(OSError):  # the thread has ended
                text = status.read_text()
                for kind, counts in (("voluntary", used.waits), ("nonvoluntary", used.taken)):
                    counts[status.parent.name] = int(text.split(f"\n{kind}_ctxt_switches:")[1].split()[0])
        return used

    def since(self, before: "Usage") -> tuple[float, int, int]:
        """CPU seconds, waits and times taken, of threads that are still there."""
        return (
            self.cpu_s - before.cpu_s,
            sum(count - before.waits[thread] for thread, count in self.waits.items()),
            sum(count - before.taken[thread] for thread, count in self.taken.items()),
        )


def usage(processes: dict[str, psutil.Process]) -> dict[str, Usage]:
    return {name: Usage.of(process) for name, process in processes.items()}


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
@click.option("--idle-s", default=20.0, help="How long nobody asks for anything.")
@click.option("--flag", "flags", multiple=True, help="A further argument of launch.py.")
def main(model: str | None, sizes: str, input_len: int, output_len: int, idle_s: float, flags: tuple[str, ...]) -> None:
    """Print a table of the idle cluster and one for each concurrency."""
    chosen = ["--model", model] if model is not None else []
    with started(*chosen, "--port", "0", *flags) as info:
        pids: dict[str, Any] = info["pids"]
        processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        url = info["addresses"]["http"]
        load(url, 2, 4, input_len, 8)
        click.echo(f"{machine()}; in {input_len} out {output_len}")
        before, began = usage(processes), time.monotonic()
        time.sleep(idle_s)
        took, after = time.monotonic() - began, usage(processes)
        click.echo("\nidle\n\n| process | share of a core | wake-ups, per s |\n|---|---|---|")
        for name in processes:
            spent, waits, _ = after[name].since(before[name])
            click.echo(f"| {name} | {spent / took:.1%} | {waits / took:.0f} |")
        for size in map(int, sizes.split(",")):
            requests = max(3, size)
            before = usage(processes)
            took, client = load(url, size, requests, input_len, output_len)
            after = usage(processes)
            tokens = requests * output_len
            click.echo(f"\nconcurrency {size}: {tokens / took:.0f} output tokens/s with the client's start\n")
            click.echo("| process | CPU ms per output token | share of a core | wake-ups, per s | taken off, per s |")
            click.echo("|---|---|---|---|---|")
            for name in processes:
                spent, waits, taken = after[name].since(before[name])
                each = f"{spent * 1e3 / tokens:.3f} | {spent / took:.1%}"
                click.echo(f"| {name} | {each} | {waits / took:.0f} | {taken / took:.0f} |")
            click.echo(f"| client of the benchmark | {client * 1e3 / tokens:.3f} | {client / took:.1%} | | |")


if __name__ == "__main__":
    main()
