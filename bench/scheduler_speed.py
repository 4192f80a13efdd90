"""What the scheduler itself costs, without any model: python -m bench.scheduler_speed

Each figure is the median of the repeats; the promise that it has to keep stands beside it.
"""

import random
import resource
import statistics
import time
from array import array
from collections.abc import Callable

import click

from bench.clusters import machine
from common.codec import decode, encode
from common.config import POLICIES, SchedulerConfig
from common.messages import AddRequest, StepPlan, StepResult, ints
from common.sampling_params import DrawParams
from scheduler_proc.kv_manager import KVManager
from scheduler_proc.scheduler import Scheduler

PAGE = 16


def timed(call: Callable[[], object], repeats: int) -> float:
    """Median milliseconds."""
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples)


def add(scheduler: Scheduler, rid: int, prompt: list[int], max_tokens: int = 4000) -> None:
    answers = scheduler.handle(AddRequest(rid, ints(*prompt), max_tokens, ints(), DrawParams()), rid)
    assert not answers, answers


def step(scheduler: Scheduler) -> int:
    """Plan, encode, decode as a worker would, answer, encode, decode, commit. Returns the plan's bytes."""
    plan = scheduler.plan(0)
    assert plan is not None
    frame = encode(plan)
    decode(frame, {StepPlan})
    rows = len(scheduler.in_flight[-1].sampled)
    result = StepResult(plan.step_id, 0, "0", ints(*[7] * rows), array("q", (1, 2, 3)))
    for answer in scheduler.commit(decode(encode(result), {StepResult}), 0):
        encode(answer)
    return len(frame)


def steady_decode(policy: str, waiting: int) -> tuple[float, float]:
    """(milliseconds, bytes) of a step that decodes 256 requests while `waiting` others wait."""
    config = SchedulerConfig(
        max_running=256, max_batch_tokens=8192, steps_in_flight=1, policy=policy, max_waiting=100_000
    )
    scheduler = Scheduler(config, KVManager(70_000, PAGE), 8192)
    for rid in range(256):
        add(scheduler, rid, [rid, *range(rid % PAGE + 100)])
    for rid in range(256, 256 + waiting):
        add(scheduler, rid, [rid, *range(100)])
    while sum(request is not None and request.extend_len == 1 for request in scheduler.slots) < 256:
        step(scheduler)
    sizes: list[int] = []
    milliseconds = timed(lambda: sizes.append(step(scheduler)), 300)
    return milliseconds, statistics.mean(sizes)


def million_tokens(rng: random.Random) -> tuple[KVManager, list[int]]:
    """A million cached tokens in a few thousand conversations, and a prompt of 32k tokens, half of them known."""
    kv = KVManager(1_100_000 // PAGE, PAGE)
    long = [rng.randrange(150_000) for _ in range(32_768)]
    conversations = [long[:16_384]]
    size = 16_384
    while size < 1_000_000:
        parent = rng.choice(conversations)
        shared = parent[: rng.randrange(0, len(parent) + 1)]
        own = [rng.randrange(150_000) for _ in range(rng.randrange(100, 600))]
        conversations.append((shared + own)[:20_000])
        size += len(own)
    for tokens in conversations:
        raw = array("i", tokens).tobytes()
        known = len(kv.tree.match(raw, len(tokens)).pages)
        fresh = kv.pool.allocate(kv.pages_for(len(tokens)) - known)
        kv.tree.insert(raw, [*kv.tree.match(raw, len(tokens)).pages, *fresh])
        kv.pool.release(fresh)
    return kv, long


@click.command()
@click.option("--repeats", default=20)
def main(repeats: int) -> None:
    """Print a table of measured figures and promises."""
    rows: list[tuple[str, str, str]] = []
    milliseconds, size = steady_decode("fcfs", 0)
    rows.append(("plan + commit + codec, 256 decodes", f"{milliseconds:.2f} ms", "1 ms"))
    rows.append(("plan descriptor, 256 decodes", f"{size:.0f} bytes", "1024 bytes"))
    for policy in POLICIES:
        busy, _ = steady_decode(policy, 10_000)
        rows.append((f"the same with 10,000 waiting, {policy}", f"{busy:.2f} ms", f"{milliseconds:.2f} ms"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kv, long = million_tokens(random.Random(1))
    raw = array("i", long).tobytes()
    rows.append(
        (
            "match of a 32k prompt in a million tokens",
            f"{timed(lambda: kv.tree.match(raw, 32_767), repeats):.2f} ms",
            "2 ms",
        )
    )
    rows.append(
        (
            "tree of a million tokens, resident",
            f"{(_rss()) / 1024:.0f} MB of the process ({before / 1024:.0f} without it)",
            "100 MB",
        )
    )
    rows.append(("evict 10,000 pages", f"{timed(lambda: kv.tree.evict(10_000), 5):.2f} ms", "10 ms"))
    click.echo(f"{machine()}\n\n| what | measured | promise |\n|---|---|---|")
    for row in rows:
        click.echo("| " + " | ".join(row) + " |")


def _rss() -> float:
    """Resident memory now, in KiB."""
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * resource.getpagesize() / 1024


if __name__ == "__main__":
    main()
