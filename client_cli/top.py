"""`top`: a live view of what a server is doing."""

import contextlib
import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from client_cli.errors import NoClusterError
from client_cli.target import Target, target_options

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from client_cli.snapshot import Snapshot
    from client_cli.watch import ProcessRow, Watcher

ONCE_S = 0.5  # between the two looks from which --once computes rates


@click.command("top", context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--interval", type=click.FloatRange(0.1, 60), default=1.0, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Print one view and end.")
@click.option("--json", "as_json", is_flag=True, help="With --once: one JSON object.")
@target_options
def command(interval: float, once: bool, as_json: bool, target: Target) -> None:
    """Watch requests, throughput, KV pages, hit rate and processes. Over --url from the server's /metrics page.

    Where the output is no terminal, one view is printed as with --once.
    """
    if as_json and not once:
        raise click.UsageError("--json belongs to --once.")
    from client_cli.display import console
    from client_cli.watch import Watcher

    once = once or not sys.stdout.isatty() or console().is_dumb_terminal  # there a live view shows nothing
    watcher = Watcher(target)
    try:
        if once:
            _once(watcher, min(interval, ONCE_S), as_json)
        else:
            with contextlib.suppress(KeyboardInterrupt):  # the way to leave it
                _live(watcher, interval)
    finally:
        watcher.close()


def _once(watcher: "Watcher", interval: float, as_json: bool) -> None:
    from client_cli.display import console

    before = watcher.snapshot()
    watcher.look()  # CPU is counted between two looks
    time.sleep(interval)
    now, processes = watcher.snapshot(), watcher.look()
    if as_json:
        values = {name: value for name, value in asdict(now).items() if name != "at_s"}
        rates = {f"{name}_per_s": now.rate(before, name) for name in ("prompt_tokens", "output_tokens", "finished")}
        shown = {**values, **rates, "hit_rate": now.hit_rate, "processes": [asdict(row) for row in processes]}
        click.echo(json.dumps(shown))
    else:
        console().print(view(watcher.info, now, before, processes))


def _live(watcher: "Watcher", interval: float) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from client_cli.display import console
    from common.connection import ConnectionLost

    before, now = None, watcher.snapshot()
    first = view(watcher.info, now, before, watcher.look())
    with Live(first, console=console(), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval)
            try:
                before, now = now, watcher.snapshot()
                shown: RenderableType = view(watcher.info, now, before, watcher.look())
            except (ConnectionLost, NoClusterError) as error:  # it may be restarting
                shown = Group(Text(str(error), style="red"), view(watcher.info, now, None, watcher.look()))
            live.update(shown, refresh=True)


def view(info: dict[str, Any], now: "Snapshot", before: "Snapshot | None", processes: "list[ProcessRow]") -> "Group":
    """What is shown of two snapshots."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from client_cli.display import console

    model = info.get("model", {})
    title = f"{model['path']}  tp {model['tp']}  {model['dtype']}  {model['device']}" if "path" in model else ""
    parts: list[Any] = [Text(title, style="bold", overflow="ellipsis", no_wrap=True)] if title else []
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("requests", f"{_n(now.running)} running", f"{_n(now.waiting)} waiting",
                  f"{_rate(now, before, 'finished', 1)} ended/s", f"{_n(now.preempted)} preemptions")  # fmt: skip
    generated, prompt = _rate(now, before, "output_tokens"), _rate(now, before, "prompt_tokens")
    table.add_row("tokens/s", f"{generated} generated", f"{prompt} prompt", f"hit rate {_percent(now.hit_rate)}", "")
    table.add_row("KV cache", f"{_percent(now.kv_usage)} in use", "", "", "")
    if now.pages is not None:
        pages = now.pages
        cached = f"{pages['evictable']:,} evictable"
        table.add_row("pages", f"{pages['held']:,} held", f"{pages['locked']:,} locked", cached,
                      f"{pages['free']:,} free of {pages['total']:,}")  # fmt: skip
    parts += [table, *([Text(_bar(now, min(64, console().width)))] if now.kv_usage is not None else [])]
    if processes:
        rows = Table("process", "pid", "CPU %", "RSS MiB", "threads", box=None, padding=(0, 2, 0, 0))
        for column in rows.columns[1:]:
            column.justify = "right"
        for row in processes:
            if row.cpu is None or row.rss is None:
                rows.add_row(row.name, str(row.pid), "gone", "", "", style="red")
            else:
                rows.add_row(row.name, str(row.pid), f"{row.cpu:.0f}", f"{row.rss / 2**20:,.0f}", str(row.threads))
        parts += ["", rows]
    return Group(*parts)


def _n(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _rate(now: "Snapshot", before: "Snapshot | None", name: str, digits: int = 0) -> str:
    value = now.rate(before, name)
    return "-" if value is None else f"{value:,.{digits}f}"


def _bar(now: "Snapshot", width: int) -> str:
    """The KV cache as a bar: in use, cached, free."""
    used = round(min(1.0, now.kv_usage or 0.0) * width)
    cached = 0
    if now.pages is not None and now.pages["total"]:
        cached = round(now.pages["evictable"] / now.pages["total"] * width)
    marks = "█▒·" if (sys.stdout.encoding or "").lower().startswith("utf") else "#=."
    return marks[0] * used + marks[1] * min(cached, width - used) + marks[2] * max(0, width - used - cached)
