"""Replay a recording and show it: `python -m scheduler_proc.replay FILE --step`.

Every plan must come out as it was recorded, byte for byte; the exit code is 1 and the first difference is shown when
one does not.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from scheduler_proc.chrome_trace import write_trace
from scheduler_proc.invariants import InvariantViolation, check
from scheduler_proc.recording import Recording, RecordingError
from scheduler_proc.show_tree import show_tree
from scheduler_proc.timeline import Arrived, Committed, Diverged, Ended, Entry, Gone, Planned, Reset, Timeline, window

SHOWN_DECODES = 12


def describe(entry: Entry, origin: int) -> str:
    """One line: time since `origin`, what happened, and the requests and pages after it."""
    match entry.what:
        case Arrived(rid=rid, prompt=prompt, cached=cached, max_tokens=most, refusal=refusal):
            text = f"arrive  r{rid} prompt {prompt} (cached {cached}), max {most}"
            text += f", refused: {refusal}" if refusal else ""
        case Gone(rids=rids, why=why):
            text = f"{why:<7} {_rids(rids)}"
        case Planned():
            text = _plan(entry.what)
        case Committed(step=step, tokens=tokens, discarded=discarded, finished=finished, times=times, failed=failed):
            parts = [f"commit  {step}", f"tokens {tokens}"]
            parts += [f"discarded {discarded}"] if discarded else []
            parts += [f"finish {' '.join(f'r{rid}:{why.name.lower()}' for rid, why in finished)}"] if finished else []
            parts += [f"fail {_rids(failed)}"] if failed else []
            parts += [f"forward {(times[2] - times[1]) / 1e6:.3f} ms"] if times else []
            text = "  ".join(parts)
        case Reset(epoch=epoch, condemned=condemned):
            text = f"reset   the workers lost everything, epoch {epoch} begins"
            text += f"  condemn {_rids(condemned)}" if condemned else ""
        case Ended(why=why):
            text = f"end     {why}"
    g = entry.gauges
    return (
        f"{(entry.now - origin) / 1e6:>12.3f} ms  {text}  | waiting {g.waiting} running {g.running}, "
        f"pages free {g.free} evictable {g.evictable} locked {g.locked} held {g.held}"
    )


def _plan(plan: Planned) -> str:
    parts = [f"plan    {'-' if plan.step is None else plan.step}"]
    parts += [f"preempt {_rids(plan.preempted)}"] if plan.preempted else []
    parts += [f"leave {' '.join(f's{slot}' for slot in plan.left)}"] if plan.left else []
    parts += (
        [f"enter {' '.join(f'r{e.rid}>s{e.slot}' + (f'(hit {e.cached})' if e.cached else '') for e in plan.entered)}"]
        if plan.entered
        else []
    )
    prompts = [c for c in plan.chunks if not c.guesses]
    chunks = " ".join(f"r{c.rid}[{c.start}:{c.end}]{'*' if c.samples else ''}" for c in prompts)
    parts += [f"prefill {chunks}"] if chunks else []
    guesses = " ".join(f"r{c.rid}+{c.guesses}" for c in plan.chunks if c.guesses)
    parts += [f"guess {guesses}"] if guesses else []
    if plan.decodes:
        rids = tuple(rid for rid, _ in plan.decodes)
        more = " ..." if len(rids) > SHOWN_DECODES else ""
        parts.append(f"decode {len(rids)} ({_rids(rids[:SHOWN_DECODES])}{more})")
    parts += [f"pages +{plan.pages}"] if plan.pages else []
    parts += [f"copy {' '.join(f'{a}>{b}' for a, b in plan.copies)}"] if plan.copies else []
    parts += [f"evict {plan.evicted}"] if plan.evicted else []
    parts += [f"offload {plan.offloaded}"] if plan.offloaded else []
    parts += [f"load {plan.loaded}"] if plan.loaded else []
    parts += [f"snapshot {' '.join(f'r{rid}@{tokens}' for rid, tokens in plan.saves)}"] if plan.saves else []
    return "  ".join(parts)


def _rids(rids: Iterable[int]) -> str:
    return " ".join(f"r{rid}" for rid in rids)


def _steps(timeline: Timeline, entries: Iterable[Entry]) -> Iterator[Entry]:
    for entry in entries:
        click.echo(describe(entry, timeline.origin))
        yield entry


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--check", "checked", is_flag=True, help="Check every invariant after every event.")
@click.option("--step", is_flag=True, help="Show a line per event.")
@click.option("--from", "first", type=click.IntRange(0), help="Show from this step on.")
@click.option("--to", "last", type=click.IntRange(0), help="Stop when this step is committed.")
@click.option("--tree", is_flag=True, help="Show the radix tree at the end, or at --to.")
@click.option("--depth", type=click.IntRange(1), default=12, help="How deep the tree is shown.")
@click.option("--most", type=click.IntRange(1), default=60, help="How many nodes of the tree are shown.")
@click.option("--chrome", type=click.Path(path_type=Path), help="Write a trace for Perfetto to this file.")
def main(
    file: Path, checked: bool, step: bool, first: int | None, last: int | None, tree: bool, depth: int, most: int,
    chrome: Path | None,
) -> None:  # fmt: skip
    """Replay the recording FILE of a scheduler and check that it plans the same again."""
    try:
        timeline = Timeline(Recording.open(file), check if checked else None)
        entries = window(timeline, first, last)
        if step:
            entries = _steps(timeline, entries)
        if chrome is not None:
            with chrome.open("w") as out:
                count = write_trace(out, entries, timeline.recording.config.steps_in_flight)
            click.echo(f"{chrome}: {count} trace events")
        for _ in entries:
            pass
    except (RecordingError, Diverged, InvariantViolation, OSError) as error:
        raise click.ClickException(str(error)) from None
    if tree:
        for line in show_tree(timeline.scheduler.kv.tree, depth=depth, most=most):
            click.echo(line)
    end = f"; {timeline.why}" if timeline.why else ""
    click.echo(f"{file}: {timeline.records} events, {timeline.plans} plans, all identical{end}")


if __name__ == "__main__":
    main()
