"""Draw what bench.compare wrote: python -m bench.compare_plot compare.json --out docs/compare.png

A group of bars for each case: each system's rate as a share of the floor, the median of all repeats, with the least and
the most. Needs matplotlib (`pip install -e .[bench]`).
"""

import json
import statistics
from pathlib import Path
from typing import Any, TextIO

import click

COLOURS = ("#4477aa", "#ee6677", "#ccbb44", "#66ccee", "#aa3377", "#228833", "#bbbbbb")


def shares(report: dict[str, Any], system: str, case: str) -> list[float]:
    """Percent of the floor in each repeat."""
    rate, floor = report["rates"][case], report["floors"][case]
    return [100 * figures[rate] / floor for figures in report["results"][system][case]]


@click.command()
@click.argument("report_file", type=click.File())
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(report_file: TextIO, out: Path) -> None:
    """One picture of all systems and cases."""
    import matplotlib.pyplot as plt

    report = json.load(report_file)
    systems, cases = list(report["results"]), list(report["floors"])
    figure, axes = plt.subplots(figsize=(11, 4.5), layout="constrained")
    width = 0.8 / len(systems)
    for index, system in enumerate(systems):
        found = [shares(report, system, case) for case in cases]
        middle = [statistics.median(values) for values in found]
        spread = [
            [m - min(values) for m, values in zip(middle, found, strict=True)],
            [max(values) - m for m, values in zip(middle, found, strict=True)],
        ]
        places = [case + (index - (len(systems) - 1) / 2) * width for case in range(len(cases))]
        colour = COLOURS[index % len(COLOURS)]
        drawn = axes.bar(places, middle, width, yerr=spread, label=system, color=colour, error_kw={"lw": 0.8})
        axes.bar_label(drawn, fmt="%.0f", padding=2, fontsize=7)
    axes.set_xticks(range(len(cases)), [case.replace(", ", "\n") for case in cases], fontsize=8)
    axes.set_ylabel("% of the floor")
    axes.set_ylim(0, max(100, axes.get_ylim()[1]))  # more than the floor where weights are read in 12 bits
    axes.legend(fontsize=8)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
