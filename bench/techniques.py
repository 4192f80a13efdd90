"""The tables that the field teaches with, measured on real clusters: python -m bench.techniques

1. sequential, static batches, continuous batching, and the prefix cache on top
2. contiguous against paged KV memory
3. short requests behind long prompts, with and without chunked prefill
4. prefix cache hit rates and speed-ups by kind of workload
5. a pool that is far too small: everything completes, by preemption

Every time is a median over the repeats, whose settings take turns.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from bench.clusters import cluster, machine
from common.answer import Answer
from common.connection import Connection
from common.messages import Finish
from common.rows import Row
from common.sampling_params import SamplingParams

Prompt = list[int]
POOL_TOKENS = 8192  # of the memory table
VOCAB = 2000  # token ids below this exist in the demo model


@dataclass(slots=True)
class Outcome:
    """What a run of requests took."""

    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    steps: int = 0
    computed: int = 0  # tokens that went through the model
    stats: dict[str, int] = field(default_factory=dict)

    def ttft_ms(self, answers: Sequence[Answer] | None = None) -> list[float]:
        chosen = self.answers if answers is None else answers
        return sorted((a.first_ns - a.sent_ns) / 1e6 for a in chosen)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)


def drive(connection: Connection, waves: Sequence[Sequence[tuple[Prompt, int]]], most: int = 10**9) -> Outcome:
    """Submit the waves one after another, each when the one before has ended, at most `most` requests at once."""
    before = connection.stats()
    outcome = Outcome()
    started = time.monotonic()
    for wave in waves:
        queue = list(wave)
        live: dict[int, Answer] = {}
        while queue or live:
            while queue and len(live) < most:
                prompt, tokens = queue.pop(0)
                answer = Answer()
                live[connection.submit(prompt, greedy(tokens))] = answer
                outcome.answers.append(answer)
            for row in connection.poll(10):
                if not isinstance(row, Row):
                    raise SystemExit(f"refused: {row.problem}")
                live[row.rid].add(row)
                if row.finish is not Finish.NONE:
                    del live[row.rid]
    outcome.seconds = time.monotonic() - started
    outcome.stats = connection.stats()

    def grown(name: str) -> int:
        return outcome.stats[f"scheduler.{name}"] - before[f"scheduler.{name}"]

    outcome.steps = grown("steps")
    outcome.computed = grown("prompt_tokens") - grown("cached_tokens") + grown("output_tokens")
    return outcome


def repeated(
    settings: dict[str, tuple[list[str], Callable[[Connection], Outcome]]], repeats: int
) -> dict[str, Outcome]:
    """The outcome with the median time of each setting; a fresh cluster for every run, settings in turn."""
    runs: dict[str, list[Outcome]] = {name: [] for name in settings}
    for _ in range(repeats):
        for name, (flags, work) in settings.items():
            with cluster(*flags) as (connection, _):
                drive(connection, [[([9, 9, 9], 8)]])  # warm-up
                runs[name].append(work(connection))
    return {name: sorted(results, key=lambda r: r.seconds)[len(results) // 2] for name, results in runs.items()}


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    click.echo(f"\n### {title}\n")
    click.echo("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in rows:
        click.echo("| " + " | ".join(str(cell) for cell in row) + " |")


def tokens(rng: random.Random, count: int) -> Prompt:
    return [rng.randrange(10, VOCAB) for _ in range(count)]


# ---- 1 ------------------------------------------------------------------------------------------------------------


def batching(repeats: int, base: list[str]) -> None:
    rng = random.Random(1)
    system = tokens(rng, 200)
    work = [([*system, *tokens(rng, rng.randrange(5, 60))], rng.choice([8, 16, 32, 128])) for _ in range(48)]
    groups = [work[i : i + 16] for i in range(0, len(work), 16)]
    off = [*base, "--no-prefix-cache"]
    results = repeated(
        {
            "sequential": (off, lambda c: drive(c, [work], most=1)),
            "static batches of 16": (off, lambda c: drive(c, groups)),
            "continuous, at most 16": ([*off, "--max-running", "16"], lambda c: drive(c, [work])),
            "continuous + prefix cache": ([*base, "--max-running", "16"], lambda c: drive(c, [work])),
        },
        repeats,
    )
    first = results["sequential"].seconds
    rows = [
        (name, r.steps, f"{r.computed / r.steps:.1f}", f"{r.seconds:.2f}", f"{first / r.seconds:.1f}x")
        for name, r in results.items()
    ]
    table(
        "Batching: 48 requests, 200 common tokens, answers of 8 to 128",
        ("", "steps", "tokens per step", "s", "speed-up"),
        rows,
    )


# ---- 2 ------------------------------------------------------------------------------------------------------------


def memory(repeats: int, base: list[str]) -> None:
    """A page as long as the context window is a contiguous reservation per request."""
    rng = random.Random(2)
    work = [(tokens(rng, rng.randrange(20, 200)), rng.choice([20, 60, 150])) for _ in range(96)]
    common = [*base, "--kv-tokens", str(POOL_TOKENS), "--no-prefix-cache", "--max-running", "128"]
    needed = statistics.mean(len(p) + n for p, n in work)
    settings = {}
    for name, size in (("contiguous (1024 per request)", 1024), ("pages of 16", 16), ("pages of 1", 1)):
        settings[name] = ([*common, "--page-size", str(size)], lambda c: watched(c, work))
    rows = []
    for name, r in repeated(settings, repeats).items():
        used, held, running = r.stats["used_tokens"], r.stats["held_tokens"], r.stats["most_running"]
        rows.append((name, running, f"{100 * (1 - used / held):.0f} %", f"{r.seconds:.2f}"))
    title = f"KV memory of {POOL_TOKENS} tokens, requests of {needed:.0f} tokens on average"
    table(title, ("", "most requests at once", "held but unused", "s"), rows)


def watched(connection: Connection, work: Sequence[tuple[Prompt, int]]) -> Outcome:
    """Drive all requests and, beside them, note how many tokens the pool holds and how many are in use."""
    live: dict[int, tuple[int, Answer]] = {}
    started = time.monotonic()
    outcome = Outcome()
    for prompt, count in work:
        live[connection.submit(prompt, greedy(count))] = (len(prompt), Answer())
    used = held = most = 0
    while live:
        for row in connection.poll(10):
            if not isinstance(row, Row):
                raise SystemExit(f"refused: {row.problem}")
            _, answer = live[row.rid]
            answer.add(row)
            if row.finish is not Finish.NONE:
                del live[row.rid]
        stats = connection.stats()
        pages = stats["scheduler.total_pages"]
        in_use = sum(length + len(a.token_ids) for length, a in live.values() if a.token_ids)
        holding = (pages - stats["scheduler.free_pages"]) * (POOL_TOKENS // pages)
        if stats["scheduler.waiting"] and in_use:  # while the pool is what limits
            used, held = used + in_use, held + holding
            most = max(most, stats["scheduler.running"])
    outcome.seconds = time.monotonic() - started
    outcome.stats = {"used_tokens": used, "held_tokens": max(1, held), "most_running": most}
    return outcome


# ---- 3 ------------------------------------------------------------------------------------------------------------


def chunking(repeats: int, base: list[str]) -> None:
    """Four requests decode while long and short prompts arrive."""
    rng = random.Random(3)
    long = [tokens(rng, 900) for _ in range(12)]
    short = [tokens(rng, 20) for _ in range(24)]
    settings = {
        "whole prompts": ([*base, "--chunk-tokens", "2048"], lambda c: mixed(c, long, short)),
        "chunks of 128": ([*base, "--chunk-tokens", "128"], lambda c: mixed(c, long, short)),
        "chunks of 128, round-robin": (
            [*base, "--chunk-tokens", "128", "--policy", "round-robin"],
            lambda c: mixed(c, long, short),
        ),
    }
    rows = []
    for name, r in repeated({k: (f, w) for k, (f, w) in settings.items()}, repeats).items():
        s = r.stats
        rows.append(
            (name, s["short_p50"], s["short_p99"], s["long_p50"], s["itl_p50"], s["itl_p99"], f"{r.seconds:.2f}")
        )
    columns = ("", "short TTFT p50, ms", "p99 TTFT", "long TTFT p50", "ITL p50 of running", "p99 ITL", "s in all")
    table("24 short prompts (20 tokens) behind 12 long ones (900), 4 requests decoding", columns, rows)


def mixed(connection: Connection, long: list[Prompt], short: list[Prompt]) -> Outcome:
    started = time.monotonic()
    running = {connection.submit([7, 8, i + 10], greedy(300)): Answer() for i in range(4)}
    live = dict(running)
    gaps: list[float] = []
    last: dict[int, int] = {}
    while not all(a.token_ids for a in running.values()):
        for row in connection.poll(10):
            assert isinstance(row, Row), row
            live[row.rid].add(row)
    kinds: dict[str, list[Answer]] = {"long": [], "short": []}
    for i, prompt in enumerate(long):
        for kind, own in (("long", prompt), *(("short", p) for p in short[2 * i : 2 * i + 2])):
            answer = Answer()
            kinds[kind].append(answer)
            live[connection.submit(own, greedy(4))] = answer
    while live:
        for row in connection.poll(10):
            assert isinstance(row, Row), row
            live[row.rid].add(row)
            if row.rid in running:
                if row.rid in last:
                    gaps.append((row.received_ns - last[row.rid]) / 1e6)
                last[row.rid] = row.received_ns
            if row.finish is not Finish.NONE:
                del live[row.rid]
    outcome = Outcome(time.monotonic() - started)
    gaps.sort()
    ttft = {kind: outcome.ttft_ms(answers) for kind, answers in kinds.items()}
    outcome.stats = {
        "short_p50": round(quantile(ttft["short"], 0.5)),
        "short_p99": round(quantile(ttft["short"], 0.99)),
        "long_p50": round(quantile(ttft["long"], 0.5)),
        "itl_p50": round(quantile(gaps, 0.5)),
        "itl_p99": round(quantile(gaps, 0.99)),
    }
    return outcome


def quantile(values: Sequence[float], q: float) -> float:
    return values[min(len(values) - 1, int(q * len(values)))]


# ---- 4 ------------------------------------------------------------------------------------------------------------


def sharing(repeats: int, base: list[str]) -> None:
    rows = []
    for name, waves in sharing_workloads().items():
        results = repeated(
            {
                "off": ([*base, "--no-prefix-cache"], lambda c, w=waves: drive(c, w)),  # type: ignore[misc]
                "on": (base, lambda c, w=waves: drive(c, w)),  # type: ignore[misc]
            },
            repeats,
        )
        on, off = results["on"], results["off"]
        prompt = sum(a.prompt_tokens for a in on.answers)
        hits = sum(a.cached_tokens for a in on.answers) / prompt
        ttft = (statistics.median(off.ttft_ms()), statistics.median(on.ttft_ms()))
        rows.append(
            (name, f"{100 * hits:.0f} %", f"{off.seconds:.2f}", f"{on.seconds:.2f}", f"{off.seconds / on.seconds:.2f}x",
             f"{ttft[0]:.0f} -> {ttft[1]:.0f}")
        )  # fmt: skip
    columns = ("workload", "hit rate", "s without", "s with", "speed-up", "median TTFT, ms")
    table("The prefix cache by workload", columns, rows)


def sharing_workloads() -> dict[str, list[list[tuple[Prompt, int]]]]:
    rng = random.Random(4)
    system = tokens(rng, 300)
    examples = tokens(rng, 600)
    documents = [tokens(rng, 700) for _ in range(4)]
    turns: list[list[tuple[Prompt, int]]] = []
    history = [tokens(rng, 60) for _ in range(8)]
    for _ in range(5):  # the answers of a random-id prompt are not known here: a turn repeats the questions so far
        turns.append([(list(h), 24) for h in history])
        history = [[*h, *tokens(rng, 120)] for h in history]
    return {
        "chatbot (one system prompt)": [[([*system, *tokens(rng, 40)], 24) for _ in range(40)]],
        "few-shot (600 common)": [[([*examples, *tokens(rng, 30)], 8) for _ in range(40)]],
        "multi-turn (8 users, 5 turns)": turns,
        "document QA (4 documents)": [[([*documents[i % 4], *tokens(rng, 30)], 12) for i in range(32)]],
        "no sharing": [[(tokens(rng, 330), 24) for _ in range(40)]],
    }


# ---- 5 ------------------------------------------------------------------------------------------------------------


def pressure(repeats: int, base: list[str]) -> None:
    rng = random.Random(5)
    work = [(tokens(rng, rng.randrange(20, 100)), 150) for _ in range(64)]
    rows = []
    expected: list[list[int]] | None = None
    for name, flags in (
        ("roomy", ["--kv-tokens", "65536"]),
        ("tight, ratio", ["--kv-tokens", "2048", "--admission", "ratio"]),
        ("tight, peak", ["--kv-tokens", "2048", "--admission", "peak"]),
        ("tight, reserve", ["--kv-tokens", "2048", "--admission", "reserve"]),
    ):
        result = repeated({name: ([*base, *flags, "--dtype", "float32"], lambda c: drive(c, [work]))}, repeats)[name]
        outputs = [a.token_ids for a in result.answers]
        expected = expected or outputs
        same = sum(a == b for a, b in zip(outputs, expected, strict=True))
        preempted = result.stats["scheduler.preempted"]
        rows.append((name, f"{len(outputs)} of 64", f"{same} of 64", preempted, result.steps, f"{result.seconds:.2f}"))
    columns = ("pool", "completed", "same tokens as roomy", "preemptions", "steps", "s")
    table("64 requests of up to 250 tokens, float32", columns, rows)


PARTS = {"batching": batching, "memory": memory, "chunking": chunking, "sharing": sharing, "pressure": pressure}


@click.command()
@click.option("--repeats", default=3)
@click.option("--parts", default=",".join(PARTS), help="Which tables.")
@click.option("--model", type=click.Path(path_type=Path), default=None, help="Checkpoint.  [default: the demo model]")
def main(repeats: int, parts: str, model: Path | None) -> None:
    """Print the tables as markdown."""
    base = ["--model", str(model)] if model is not None else []
    click.echo(f"{machine()}; medians of {repeats} runs")
    for part in parts.split(","):
        PARTS[part](repeats, base)


if __name__ == "__main__":
    main()
