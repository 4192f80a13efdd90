"""What a benchmark says at its end: a table, a JSON file, a picture."""

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from client_cli.bench_metrics import METRICS, PERCENTILES, Record

WORDS = {"ttft": "time to first token", "tpot": "time per output token", "itl": "inter-token latency", "e2e": "whole"}


def show(config: dict[str, Any], summary: dict[str, Any]) -> None:
    """Print the tables."""
    from rich.table import Table

    from client_cli.display import console

    out = console()
    counts = Table(title=title(config), title_justify="left", show_header=False)
    counts.add_column()
    counts.add_column(justify="right")
    for words, value in _rows(summary):
        counts.add_row(words, value)
    out.print(counts)
    columns = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    times = Table("ms", *columns)
    for column in times.columns[1:]:
        column.justify = "right"
    for name in METRICS:
        found = summary[f"{name}_ms"]
        values = [f"{found[column]:,.1f}" for column in columns] if found else ["-"] * len(columns)
        times.add_row(f"{name.upper()}  {WORDS[name]}", *values)
    out.print(times)
    for error, count in summary["errors"].items():
        out.print(f"{count} x {error}", markup=False)


def title(config: dict[str, Any]) -> str:
    rate, concurrency = config["request_rate"], config["concurrency"]
    times = "times of the trace" if config["dataset"] == "trace" else f"{rate:g} requests/s" if rate else ""
    load = [times, f"concurrency {concurrency}" if concurrency else ""]
    how = ", ".join(part for part in load if part) or "all at once"
    return f"{config['dataset']}, {how}, seed {config['seed']}, {config['server']}"


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    late = summary["late_sends_ms"]
    rows = [
        ("requests completed", f"{summary['completed']:,}"),
        ("requests failed", f"{summary['failed']:,}"),
        ("duration, s", f"{summary['duration_s']:.2f}"),
        ("prompt tokens (cached)", f"{summary['prompt_tokens']:,} ({summary['cached_tokens']:,})"),
        ("output tokens", f"{summary['output_tokens']:,}"),
        ("requests/s", f"{summary['requests_per_s']:.2f}"),
        ("output tokens/s", f"{summary['output_tokens_per_s']:,.1f}"),
        ("total tokens/s", f"{summary['total_tokens_per_s']:,.1f}"),
    ]
    if "slo_ms" in summary:
        names = ", ".join(f"{name} {limit:g} ms" for name, limit in summary["slo_ms"].items())
        rows.append((f"goodput, requests/s ({names})", f"{summary['goodput_requests_per_s']:.2f}"))
    if summary["not_sent"]:
        rows.append(("not sent, their conversation had failed", f"{summary['not_sent']:,}"))
    if summary["short_answers"]:
        rows.append(("answers of another length than asked", f"{summary['short_answers']:,}"))
    if late:
        rows.append(("sent late by, ms (p99)", f"{late['p99']:.1f}"))
    rows.append(("this client's share of a core", f"{summary['client_cpu_share']:.0%}"))
    return rows


def as_json(config: dict[str, Any], summary: dict[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    """Everything, JSON-ready; times of requests in ms, `sent` since the first of them."""
    origin = min((r.sent_ns for r in records), default=0)
    each = [
        {
            "sent": (r.sent_ns - origin) / 1e6, "ttft": r.ttft, "tpot": r.tpot, "itl": r.itl, "e2e": r.e2e,
            "prompt_tokens": r.prompt_tokens, "cached_tokens": r.cached_tokens, "output_tokens": r.output_tokens,
            "error": r.error,
        }
        for r in records
    ]  # fmt: skip
    now = datetime.now(UTC).isoformat(timespec="seconds")
    where = {"python": platform.python_version(), "machine": platform.machine(), "at": now}
    return {"config": config, "client": where, "summary": summary, "requests": each}


def draw(config: dict[str, Any], summary: dict[str, Any], records: Sequence[Record], path: Path) -> None:
    """Distributions of the four metrics, with the objectives, as one image."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    good = [r for r in records if r.error is None]
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.4), layout="constrained")
    for ax, name in zip(axes, METRICS, strict=True):
        if name == "itl":
            values = sorted(gap / 1e6 for r in good for gap in r.gaps_ns)
        else:
            values = sorted(v for r in good if (v := getattr(r, name)) is not None)
        if values:
            shares = [(i + 1) / len(values) for i in range(len(values))]
            ax.plot([values[0], *values], [0, *shares], drawstyle="steps-post", color="#2a78d6", linewidth=2)
        limit = summary.get("slo_ms", {}).get(name)
        if limit is not None:
            ax.axvline(limit, color="#e34948", linewidth=1.5)
        ax.set_xlabel(f"{name.upper()}, ms")
        ax.set_ylim(0, 1.02)
        ax.set_xlim(left=0)
        ax.grid(color="#e1e0d9")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("share of requests")
    axes[METRICS.index("itl")].set_ylabel("share of gaps")
    throughput = f"{summary['output_tokens_per_s']:,.0f} output tokens/s"
    figure.suptitle(f"{title(config)}: {throughput}", x=0.01, ha="left", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)
