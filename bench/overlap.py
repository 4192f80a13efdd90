"""Does the worker start step N+1 without waiting for the scheduler? Recordings of a real cluster, with and without
overlap (--steps-in-flight 2 and 1), side by side.

    python -m bench.overlap --out overlap.png

Only steady steps count: full batch, nothing but decodes, and the same in the step after. Of the two ends of a gap,
`tokens ready` of step N and `forward started` of step N+1 are the worker's own stamps; it is waiting until it has sent
the tokens and taken the next plan, the rest is building the batch. When a plan had been sent is the scheduler's next
call after it (its loop sends a plan before it calls again), so it includes encoding and sending.
"""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import click
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from bench.clusters import cluster, machine
from bench.overhead import drive
from scheduler_proc.recording import Recording
from scheduler_proc.timeline import Committed, Planned, Timeline

COLORS = {
    "worker: forward": "#1baf7a",
    "worker: sends tokens, waits for a plan": "#e34948",
    "worker: builds the batch": "#eda100",
    "scheduler: commit and answer": "#4a3aa7",
    "scheduler: plan, encode, send": "#2a78d6",
    "plan sent, not yet run": "#b9d5f5",
}
FORWARD, WAIT, BUILD, COMMIT, PLAN, UNDER_WAY = COLORS


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step's stamps in ns: planned and sent by the scheduler, run by the worker, committed by the scheduler."""

    step: int
    rows: int
    planned: int
    sent: int
    received: int
    started: int
    ready: int
    committed: int
    answered: int


def steady_pairs(file: Path, batch: int) -> list[tuple[DecodeStep, DecodeStep]]:
    """Neighbouring steps of a recording in which exactly `batch` requests decoded and nothing else was computed."""
    planned: dict[int, tuple[int, int, int]] = {}
    steps: list[DecodeStep] = []
    for entry in Timeline(Recording.open(file)):
        match entry.what:
            case Planned(step=int(step), chunks=(), decodes=decodes) if len(decodes) == batch:
                planned[step] = (len(decodes), entry.now, entry.until)
            case Committed(step=step, times=(received, started, ready)) if step in planned:
                steps.append(DecodeStep(step, *planned.pop(step), received, started, ready, entry.now, entry.until))
    pairs = [(a, b) for a, b in pairwise(steps) if b.step == a.step + 1]
    return pairs[5:-5]


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians in microseconds over steady steps, and the share of plans that were sent before the worker was free."""

    gap: float
    wait: float
    ahead: float
    period: float
    forward: float
    steps: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[DecodeStep, DecodeStep]]) -> "Measured":
        def median(values: list[float]) -> float:
            return statistics.median(values) / 1e3

        return cls(
            gap=median([b.started - a.ready for a, b in pairs]),
            wait=median([max(0, b.received - a.ready) for a, b in pairs]),
            ahead=statistics.mean(b.sent < a.ready for a, b in pairs),
            period=median([b.started - a.started for a, b in pairs]),
            forward=median([a.ready - a.started for a, _ in pairs]),
            steps=len(pairs),
        )


def typical(pairs: Sequence[tuple[DecodeStep, DecodeStep]], count: int) -> list[DecodeStep]:
    """`count` steps in a row, all of a length near the median: a stretch that shows the ordinary case."""
    middle = statistics.median(b.started - a.started for a, b in pairs)
    runs = [pairs[i : i + count] for i in range(len(pairs) - count)]
    runs = [run for run in runs if run[-1][0].step - run[0][0].step == count - 1]
    best = min(runs, key=lambda run: max(abs(b.started - a.started - middle) for a, b in run))
    return [a for a, _ in best]


def draw(stretches: dict[int, tuple[list[DecodeStep], Measured]], batch: int, out: Path) -> None:
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 150}):
        figure, axes = plt.subplots(
            len(stretches), 1, figsize=(13, 1.2 + 2.1 * len(stretches)), sharex=True, squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for ax, (ahead, (steps, measured)) in zip(axes[:, 0], stretches.items(), strict=True):
            _draw_stretch(ax, steps)
            ax.set_title(
                f"{ahead} step{'s' if ahead > 1 else ''} in flight, batch {batch}: median gap between forwards "
                f"{measured.gap:.0f} µs (waiting {measured.wait:.0f}), step {measured.period:.0f} µs, "
                f"{measured.ahead:.0%} of plans sent ahead",
                loc="left", fontsize=10,
            )  # fmt: skip
        axes[-1, 0].set_xlabel("time, ms")
        axes[-1, 0].set_xlim(0, max((s[-1].answered - s[0].started) / 1e6 for s, _ in stretches.values()))
        handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
        figure.legend(handles=handles, loc="outside upper left", ncols=6, frameon=False, fontsize=8.5)
        figure.savefig(out)
        plt.close(figure)


def _draw_stretch(ax: Axes, steps: Sequence[DecodeStep]) -> None:
    origin = steps[0].started

    def bar(row: float, begin: int, end: int, what: str, *, thick: float = 0.7, text: str = "") -> None:
        start, length = (begin - origin) / 1e6, max(0, end - begin) / 1e6
        ax.barh(row, length, thick, start, color=COLORS[what])
        if text:
            ax.text(start + length / 2, row, text, ha="center", va="center", fontsize=7.5, color="white")

    for step, following in pairwise([*steps, None]):
        assert step is not None
        bar(0, step.started, step.ready, FORWARD, text=f"step {step.step}")
        if following is not None:
            bar(0, step.ready, following.received, WAIT)
            bar(0, max(step.ready, following.received), following.started, BUILD)
        if step.planned >= origin:
            bar(2, step.planned, step.sent, PLAN)
        bar(2, step.committed, step.answered, COMMIT)
        row = 1 + 0.2 * (step.step % 2 - 0.5)  # two plans can be under way
        bar(row, max(step.sent, origin), step.started, UNDER_WAY, thick=0.2)
    ax.set_yticks([2, 1, 0], ["scheduler", "plan under way", "worker"])
    ax.tick_params(axis="y", length=0)


@click.command(context_settings={"show_default": True})
@click.option("--batches", default="1,8,32", help="Requests that decode at once.")
@click.option("--tokens", default=150, help="Tokens per request.")
@click.option("--repeats", default=2, help="Clusters started for each setting, in turns.")
@click.option("--model", default=None, help="Checkpoint directory.  [default: the demo model]")
@click.option("--threads", default=None, type=int, help="Threads of the worker.  [default: launch.py's]")
@click.option("--drawn", default=8, help="Which batch size is drawn.")
@click.option("--stretch", default=6, help="How many steps are drawn.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Where the image goes.")
def main(
    batches: str, tokens: int, repeats: int, model: str | None, threads: int | None, drawn: int, stretch: int,
    out: Path | None,
) -> None:  # fmt: skip
    """Print a table of both modes and draw a stretch of each."""
    sizes = [int(b) for b in batches.split(",")]
    pairs: dict[tuple[int, int], list[tuple[DecodeStep, DecodeStep]]] = {}
    with tempfile.TemporaryDirectory(prefix="rhz-rec-") as home:
        for repeat in range(repeats):  # the modes take turns, so that a drifting machine hits both
            for ahead in (1, 2):
                file = Path(home) / f"{repeat}-{ahead}.rec"
                flags = ["--steps-in-flight", str(ahead), "--record", str(file)]
                flags += ["--model", model] if model else []
                flags += ["--threads", str(threads)] if threads else []
                with cluster(*flags) as (connection, _):
                    for size in sizes:
                        drive(connection, size, tokens)
                for size in sizes:
                    pairs.setdefault((size, ahead), []).extend(steady_pairs(file, size))
    click.echo(f"{machine()}\nmedians over steady decode steps of {repeats} runs, {tokens} tokens per request\n")
    columns = ("batch", "steps in flight", "gap between forwards, µs", "of it waiting, µs",
               "plan sent before the worker was free", "forward, µs", "step, µs", "tokens/s", "steps")  # fmt: skip
    click.echo("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    measured = {key: Measured.of(found) for key, found in sorted(pairs.items())}
    for (size, ahead), m in measured.items():
        click.echo(
            f"| {size} | {ahead} | {m.gap:.0f} | {m.wait:.0f} | {m.ahead:.1%} | {m.forward:.0f} | {m.period:.0f} "
            f"| {size / m.period * 1e6:.0f} | {m.steps} |"
        )
    if out is not None:
        shown = drawn if drawn in sizes else sizes[-1]
        draw({a: (typical(pairs[shown, a], stretch), measured[shown, a]) for a in (1, 2)}, shown, out)
        click.echo(f"\n{out}")


if __name__ == "__main__":
    main()
