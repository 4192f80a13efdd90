"""Draw a recording: who prefilled which chunk in which slot, who decoded, pages in use, hits and preemptions.

    python launch.py --record run.rec        # use it, then stop it
    python -m bench.timeline run.rec --out run.png --from 0 --to 60

Needs matplotlib (the extra `bench`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from scheduler_proc.recording import Recording, RecordingError
from scheduler_proc.timeline import Chunk, Committed, Diverged, Entered, Entry, Gone, Planned, Reset, Timeline, window

MS = 1e6
PREFILL, DECODE, RED, GREEN, VIOLET, YELLOW = "#2a78d6", "#1baf7a", "#e34948", "#006300", "#4a3aa7", "#eda100"
INK, MUTED, GRID = "#0b0b0b", "#52514e", "#e1e0d9"
PAGES = {"held": "#2a78d6", "locked": "#4a3aa7", "evictable": "#b9d5f5"}
STYLE = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#c3c2b7",
    "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "axes.titlesize": 10,
    "axes.titlelocation": "left", "savefig.dpi": 150, "axes.axisbelow": True, "grid.color": GRID,
}  # fmt: skip
MARKS = {  # what: marker, colour, words
    "preempt": ("X", RED, "preempted"),
    "finish": ("o", INK, "finished"),
    "gone": ("s", YELLOW, "aborted, failed or past its deadline"),
}
CHAR_PT = 4.2  # width of a character of the small labels, in points
WIDTH_IN = 14.0


@dataclass(slots=True)
class Picture:
    """What is drawn, collected from entries; times in ms since `origin` (ns)."""

    origin: int
    bars: list[tuple[int, float, float, Chunk | int]] = field(default_factory=list)  # slot, start, length; or rid
    stays: list[tuple[float, Entered]] = field(default_factory=list)  # since when
    marks: list[tuple[str, int, float]] = field(default_factory=list)  # kind, slot, when
    steps: list[tuple[float, float, int, int]] = field(default_factory=list)  # start, length, prefill, decode
    gauges: list[tuple[float, Any]] = field(default_factory=list)
    _planned: dict[int, Planned] = field(default_factory=dict)
    _slots: dict[int, int] = field(default_factory=dict)  # rid -> slot

    def take(self, entries: Iterable[Entry]) -> "Picture":
        for entry in entries:
            now = (entry.now - self.origin) / MS
            match entry.what:
                case Planned() as plan:
                    self._plan(plan, now)
                case Committed() as step:
                    self._commit(step, now)
                case Gone(rids=rids):
                    for rid in rids:
                        self._mark("gone", rid, now)
                case Reset(condemned=rids):
                    for rid in rids:
                        self._mark("gone", rid, now)
                    self._planned.clear()
            self.gauges.append((now, entry.gauges))
        return self

    def _plan(self, plan: Planned, now: float) -> None:
        for rid in plan.preempted:
            self._mark("preempt", rid, now)
        for entered in plan.entered:
            self._slots[entered.rid] = entered.slot
            self.stays.append((now, entered))
        if plan.step is not None:
            self._planned[plan.step] = plan

    def _commit(self, step: Committed, now: float) -> None:
        plan = self._planned.pop(step.step, None)
        if plan is not None and step.times is not None:
            start, length = (step.times[1] - self.origin) / MS, (step.times[2] - step.times[1]) / MS
            self.bars += [(chunk.slot, start, length, chunk) for chunk in plan.chunks]
            self.bars += [(slot, start, length, rid) for rid, slot in plan.decodes]
            self.steps.append((start, length, plan.tokens - len(plan.decodes), len(plan.decodes)))
        for rid, _ in step.finished:
            self._mark("finish", rid, now)
        for rid in step.failed:
            self._mark("gone", rid, now)

    def _mark(self, kind: str, rid: int, now: float) -> None:
        if rid in self._slots:
            self.marks.append((kind, self._slots[rid], now))


def draw(picture: Picture, total_pages: int, title: str, out: Path) -> None:
    slots = max((bar[0] for bar in picture.bars), default=0) + 1
    height = min(11.0, max(1.6, 0.5 * slots))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            4, 1, figsize=(WIDTH_IN, height + 5.0), sharex=True, layout="constrained",
            height_ratios=[height, 1.3, 1.1, 1.1],
        )  # fmt: skip
        _draw_slots(axes[0], picture, slots, height)
        _draw_tokens(axes[1], picture)
        _draw_pages(axes[2], picture, total_pages)
        _draw_requests(axes[3], picture)
        axes[0].set_title(title, color=INK, pad=30)
        axes[3].set_xlabel("time, ms")
        axes[3].set_xlim(picture.gauges[0][0], picture.gauges[-1][0])
        figure.savefig(out)
        plt.close(figure)


def _draw_slots(ax: Axes, picture: Picture, slots: int, height: float) -> None:
    span = picture.gauges[-1][0] - picture.gauges[0][0]
    points_per_ms = 0.82 * WIDTH_IN * 72 / span
    row_pt = 72 * height / slots
    for slot, start, length, what in picture.bars:
        prefill = isinstance(what, Chunk)
        thick = 0.62 if prefill else 0.28
        ax.barh(slot, length, thick, start, color=PREFILL if prefill else DECODE, edgecolor="white", linewidth=0.4)
        if isinstance(what, Chunk) and row_pt > 20:
            _label_chunk(ax, what, start + length / 2, length * points_per_ms, 0.62 * row_pt)
    for kind, slot, when in picture.marks:
        marker, colour, _ = MARKS[kind]
        size = 16 if kind == "finish" else 44
        ax.scatter(when, slot, s=size, marker=marker, color=colour, zorder=4, linewidth=0.5, edgecolor="white")
    if row_pt > 12:
        for since, entered in picture.stays:
            first = min((x for s, x, *_ in picture.bars if s == entered.slot and x >= since), default=since)
            _label_request(ax, entered, first)
    ax.set_ylim(slots - 0.4, -0.75)
    ax.set_ylabel("slot")
    ax.yaxis.get_major_locator().set_params(integer=True)
    ax.grid(axis="x", linewidth=0.6)
    seen = {kind for kind, *_ in picture.marks}
    handles: list[Any] = [Patch(color=PREFILL, label="prefill chunk [from:to]"), Patch(color=DECODE, label="decode")]
    handles += [
        Line2D([], [], marker=marker, color=colour, linestyle="", markersize=6, label=words)
        for marker, colour, words in (
            ("^", GREEN, "prefix hit, in tokens"), ("D", VIOLET, "copied a page on write"),
            *(mark for kind, mark in MARKS.items() if kind in seen),
        )
    ]  # fmt: skip
    ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=7, frameon=False, fontsize=8.5)


def _label_chunk(ax: Axes, chunk: Chunk, x: float, width_pt: float, height_pt: float) -> None:
    """Its span of tokens inside the bar, lying or standing, if there is room."""
    text = f"{chunk.start}:{chunk.end}"
    if width_pt > CHAR_PT * len(text):
        ax.text(x, chunk.slot, text, ha="center", va="center", color="white", fontsize=6.5)
    elif width_pt > 7 and height_pt > CHAR_PT * len(text):
        ax.text(x, chunk.slot, text, ha="center", va="center", color="white", fontsize=6.5, rotation=90)


def _label_request(ax: Axes, entered: Entered, x: float) -> None:
    """Who, above the first bar; then what it found in the cache, and whether that ended inside a page."""
    parts = [(f"r{entered.rid}", INK)]
    parts += [(f"\u25b2{entered.cached}", GREEN)] if entered.cached else []
    parts += [("\u25c6", VIOLET)] if entered.copied else []
    offset = 0.0
    for text, colour in parts:
        ax.annotate(text, (x, entered.slot - 0.34), (offset, 0), textcoords="offset points", fontsize=7, color=colour)
        offset += CHAR_PT * len(text) + 5


def _draw_tokens(ax: Axes, picture: Picture) -> None:
    for start, length, prefill, decode in picture.steps:
        ax.bar(start, decode, length, align="edge", color=DECODE, edgecolor="white", linewidth=0.4)
        ax.bar(start, prefill, length, decode, align="edge", color=PREFILL, edgecolor="white", linewidth=0.4)
    ax.set_ylabel("tokens\nper step")
    ax.grid(axis="y", linewidth=0.6)


def _draw_pages(ax: Axes, picture: Picture, total: int) -> None:
    times = [when for when, _ in picture.gauges]
    columns = [[getattr(g, name) for _, g in picture.gauges] for name in PAGES]
    words = ("held by requests", "cached, in use", "cached, evictable")
    ax.stackplot(times, columns, colors=list(PAGES.values()), labels=words, step="post")
    used = max(map(sum, zip(*columns, strict=True)))
    top = total if used > 0.4 * total else max(1.0, 1.15 * used)
    ax.set_ylim(0, top)
    if top == total:
        ax.axhline(total, color=INK, linewidth=1)
    ax.set_ylabel(f"pages\n(of {total:,})")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8.5)


def _draw_requests(ax: Axes, picture: Picture) -> None:
    times = [when for when, _ in picture.gauges]
    for name, colour in (("running", DECODE), ("waiting", YELLOW)):
        values = [getattr(g, name) for _, g in picture.gauges]
        ax.step(times, values, where="post", color=colour, linewidth=2, label=name)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("requests")
    ax.yaxis.get_major_locator().set_params(integer=True)
    ax.grid(axis="y", linewidth=0.6)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8.5)


@click.command(context_settings={"show_default": True})
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The image, .png, .svg or .pdf.")
@click.option("--from", "first", type=click.IntRange(0), default=0, help="First step to draw.")
@click.option("--to", "last", type=click.IntRange(0), help="Last step to draw.  [default: 99 after the first]")
def main(file: Path, out: Path, first: int, last: int | None) -> None:
    """Draw the recording FILE."""
    last = first + 99 if last is None else last
    if out.suffix not in (".png", ".svg", ".pdf") or not out.absolute().parent.is_dir():
        raise click.UsageError(f"--out: must end in .png, .svg or .pdf, in a folder that exists, got {str(out)!r}")
    try:
        recording = Recording.open(file)
        timeline = Timeline(recording)
        entries = list(window(timeline, first, last))
    except (RecordingError, Diverged) as error:
        raise click.ClickException(str(error)) from None
    if not any(isinstance(e.what, Committed) for e in entries):
        raise click.ClickException(f"{file} has no steps from {first} to {last}")
    c = recording.config
    title = (
        f"{file.name}, steps {first} to {last}: policy {c.policy}, admission {c.admission}, "
        f"{c.steps_in_flight} in flight, chunks of {c.chunk_tokens}, pages of {recording.page_size}"
    )
    draw(Picture(timeline.origin).take(entries), recording.num_pages, title, out)
    click.echo(out)


if __name__ == "__main__":
    main()
