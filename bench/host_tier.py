"""What a host tier is worth to conversations that take turns on a cache that holds one of them:

    python -m bench.host_tier --model DIRECTORY

Three clusters in each round serve the same conversations: one whose device holds them all, one that forgets what it
evicts, and one with a host tier. All must say the same; the exit code is 1 when they do not. Times are the client's, of
turns after the first one.
"""

import statistics
import sys
import time
from dataclasses import dataclass, field
from random import Random

import click

from bench.clusters import cluster, machine
from common.answer import Answer
from common.connection import Connection
from common.messages import Finish, RequestError
from common.sampling_params import SamplingParams

TURN_TOKENS = 16  # of a question
DEADLINE_S = 120.0


@dataclass(slots=True)
class Run:
    """What was said, and of turns after the first one: seconds to the first token, cached and all prompt tokens."""

    said: list[list[int]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    cached: int = 0
    prompt: int = 0
    moved: tuple[int, int] = (0, 0)


def ask(connection: Connection, prompt: list[int], tokens: int) -> Answer:
    sent = time.monotonic_ns()
    connection.submit(prompt, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    answer = Answer(sent)
    while answer.finish is Finish.NONE:
        if time.monotonic_ns() - sent > DEADLINE_S * 1e9:
            raise click.ClickException(f"no answer within {DEADLINE_S:g} s")
        for row in connection.poll(1):
            if isinstance(row, RequestError):
                raise click.ClickException(row.problem)
            answer.add(row)
    return answer


def converse(connection: Connection, speakers: int, prompt: int, turns: int, tokens: int) -> Run:
    """Everybody in turn, `turns` times."""
    random, run = Random(1), Run()
    histories = [[random.randrange(10, 250) for _ in range(prompt)] for _ in range(speakers)]
    for turn in range(turns):
        for history in histories:
            answer = ask(connection, history, tokens)
            if turn:
                run.ttft_s.append((answer.first_ns - answer.sent_ns) / 1e9)
                run.cached += answer.cached_tokens
                run.prompt += len(history)
            history += [*answer.token_ids, *(random.randrange(10, 250) for _ in range(TURN_TOKENS))]
    stats = connection.stats()
    run.said, run.moved = histories, (stats["scheduler.offloaded_pages"], stats["scheduler.loaded_pages"])
    return run


@click.command(context_settings={"show_default": True})
@click.option("--repeat", default=3, help="Rounds.")
@click.option("--speakers", default=4, help="Conversations.")
@click.option("--prompt", default=384, help="Tokens with which each begins.")
@click.option("--turns", type=click.IntRange(2), default=3, help="Questions in each.")
@click.option("--tokens", default=16, help="Of each answer.")
@click.argument("flags", nargs=-1)
def main(repeat: int, speakers: int, prompt: int, turns: int, tokens: int, flags: tuple[str, ...]) -> None:
    """FLAGS go to launch.py, after a `--`."""
    longest = prompt + turns * (tokens + TURN_TOKENS)
    device = ("--kv-tokens", str(-(-longest * 5 // 4 // 16) * 16))  # one conversation and a quarter
    kinds = {
        "all on the device": ("--kv-tokens", str(2 * speakers * longest)),
        "evicted is forgotten": device,
        "with a host tier": (*device, "--host-kv-memory", "1GiB"),
    }
    runs: dict[str, list[Run]] = {kind: [] for kind in kinds}
    for _ in range(repeat):
        for kind, options in kinds.items():
            with cluster("--log-level", "error", *options, *flags) as (connection, _):
                runs[kind].append(converse(connection, speakers, prompt, turns, tokens))
    wrong = sum(run.said != runs["all on the device"][0].said for found in runs.values() for run in found)
    click.echo(
        f"{machine()}\n{speakers} conversations of {prompt} to {longest} tokens, {turns} turns, {repeat} rounds\n"
    )
    click.echo("| | hit rate | TTFT, median | of that without a tier | pages down, up |\n|---|---:|---:|---:|---:|")
    forgotten = median(runs["evicted is forgotten"])
    for kind, found in runs.items():
        rate = sum(run.cached for run in found) / sum(run.prompt for run in found)
        share, moved = median(found) / forgotten, ", ".join(map(str, found[0].moved))
        click.echo(f"| {kind} | {rate:.1%} | {median(found) * 1e3:.1f} ms | {share:.2f} | {moved} |")
    click.echo(f"\nruns with other tokens: {wrong}")
    sys.exit(1 if wrong else 0)


def median(found: list[Run]) -> float:
    return statistics.median(seconds for run in found for seconds in run.ttft_s)


if __name__ == "__main__":
    main()
