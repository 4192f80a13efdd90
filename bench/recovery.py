"""How long streams stand still when a process dies or freezes: `python -m bench.recovery --repeat 5`.

Each round starts a cluster, runs streams, hurts one process after the other, and measures the longest time in which no
token came, from the signal on. Every stream must end with the tokens that it has undisturbed; the exit code is 1 when
one does not. A round restarts every process once, so that no restart is delayed by an earlier one.
"""

import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from bench.clusters import cluster, machine
from common.connection import Connection, ConnectionLost
from common.messages import Finish, RequestError
from common.run_dir import find_cluster
from common.sampling_params import SamplingParams

VICTIMS = ("worker-1", "scheduler", "detokenizer")
DEADLINE_S = 120.0


def play(
    connection: Connection, streams: int, tokens: int, disturb: Callable[[], None] | None = None
) -> tuple[list[list[int]], float]:
    """All outputs, and the longest pause after `disturb()` was called in the middle (seconds)."""
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.9, seed=i, max_tokens=tokens, ignore_eos=True)
        for i in range(streams)
    ]
    outputs: dict[int, list[int]] = {connection.submit([5 + i, 6, 7], p): [] for i, p in enumerate(params)}
    left, last, pause = set(outputs), 0.0, 0.0
    deadline = time.monotonic() + DEADLINE_S
    while left:
        rows = connection.poll(1)
        now = time.monotonic()
        if rows and last:
            pause, last = max(pause, now - last), now
        for row in rows:
            if isinstance(row, RequestError):
                raise click.ClickException(f"request {row.rid} was lost: {row.problem}")
            outputs[row.rid] += row.token_ids
            if row.finish is not Finish.NONE:
                left.remove(row.rid)
        if disturb is not None and sum(map(len, outputs.values())) > streams * tokens // 3:
            disturb()
            disturb, last = None, time.monotonic()
        if now > deadline:
            raise click.ClickException(f"{len(left)} streams stand still")
    return list(outputs.values()), pause


def hurt(address: str, victim: str | None, number: signal.Signals) -> None:
    """Send a process of the cluster a signal, or nobody."""
    if victim is not None:
        run_dir = Path(address.removeprefix("ipc://")).parent
        os.kill(find_cluster(run_dir)["pids"][victim], number)


def until_served(address: str) -> float:
    """Seconds until a new client of the cluster is answered."""
    began = time.monotonic()
    while True:
        try:
            with Connection(address) as connection:
                connection.stats()
                return time.monotonic() - began
        except ConnectionLost:
            if time.monotonic() > began + DEADLINE_S:
                raise
            time.sleep(0.01)


@click.command(context_settings={"show_default": True})
@click.option("--repeat", default=3, help="Rounds for each signal.")
@click.option("--streams", default=32, help="Requests that run at once.")
@click.option("--tokens", default=200, help="Tokens of each.")
@click.option("--freeze-timeout", default=3.0, help="As of launch.py.")
@click.argument("flags", nargs=-1)
def main(repeat: int, streams: int, tokens: int, freeze_timeout: float, flags: tuple[str, ...]) -> None:
    """FLAGS go to launch.py, after a `--`."""
    pauses: dict[tuple[str, str], list[float]] = {}
    wrong = 0
    options = ("--tp", "2", "--dtype", "float32", "--log-level", "error", "--freeze-timeout", str(freeze_timeout))
    for _ in range(repeat):
        for number in (signal.SIGKILL, signal.SIGSTOP):
            with cluster(*options, *flags) as (connection, ready_s):
                address = connection.address
                expected, _ = play(connection, streams, tokens)
                for victim in (None, *VICTIMS):
                    got, pause = play(connection, streams, tokens, partial(hurt, address, victim, number))
                    wrong += sum(a != b for a, b in zip(got, expected, strict=True))
                    key = (victim, number.name) if victim else ("none", "")
                    pauses.setdefault(key, []).append(pause)
                hurt(address, "tokenizer", number)
                pauses.setdefault(("tokenizer (new clients)", number.name), []).append(until_served(address))
            pauses.setdefault(("start of the cluster", ""), []).append(ready_s)
    click.echo(f"{machine()}\n{streams} streams of {tokens} tokens, freeze timeout {freeze_timeout:g} s\n")
    click.echo(f"| {'process':<24} | {'signal':<8} | median s | max s | of |")
    click.echo(f"|{'-' * 26}|{'-' * 10}|---------:|------:|---:|")
    for (name, signal_name), values in pauses.items():
        middle = statistics.median(values)
        click.echo(f"| {name:<24} | {signal_name:<8} | {middle:8.2f} | {max(values):5.2f} | {len(values):2} |")
    click.echo(f"\nstreams with other tokens than undisturbed: {wrong}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
