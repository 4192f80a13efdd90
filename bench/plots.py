"""Draw the tables that bench.techniques prints: python -m bench.plots TABLES.md --out docs/techniques.png

Needs matplotlib (`pip install -e .[bench]`).
"""

from pathlib import Path
from typing import Any

import click

Table = dict[str, dict[str, str]]


def read_tables(text: str) -> dict[str, Table]:
    """Markdown tables by the heading before them; rows by their first cell, cells by their column's name."""
    tables: dict[str, Table] = {}
    title, columns = "", list[str]()
    for line in text.splitlines():
        if line.startswith("### "):
            title, columns = line[4:], []
        elif line.startswith("|") and not line.startswith("|---"):
            cells = [cell.strip() for cell in line.strip("|\n ").split("|")]
            if line.startswith("|  |") and len(cells) < line.count("|") - 1:
                cells = ["", *cells]
            if not columns:
                columns = cells
                tables[title] = {}
            else:
                tables[title][cells[0]] = dict(zip(columns[1:], cells[1:], strict=True))
    return tables


def number(cell: str) -> float:
    return float(cell.split()[0].rstrip("x%"))


def bars(axes: Any, table: Table, column: str, title: str, unit: str) -> None:
    names = list(table)
    values = [number(table[name][column]) for name in names]
    drawn = axes.barh(names[::-1], values[::-1], color="#4477aa")
    axes.bar_label(drawn, fmt="%g", padding=3, fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(unit, fontsize=8)
    axes.margins(x=0.15)


@click.command()
@click.argument("tables", type=click.Path(exists=True, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(tables: Path, out: Path) -> None:
    """One picture with a panel for each table."""
    import matplotlib.pyplot as plt

    found = {title.split()[0]: table for title, table in read_tables(tables.read_text()).items()}
    figure, grid = plt.subplots(3, 2, figsize=(11, 9), layout="constrained")
    bars(grid[0, 0], found["Batching:"], "speed-up", "Batching: speed-up over one at a time", "times")
    bars(grid[0, 1], found["KV"], "held but unused", "KV memory that is held and not used", "%")
    bars(grid[1, 0], found["24"], "short TTFT p50, ms", "Short prompts behind long ones: TTFT p50", "ms")
    bars(grid[1, 1], found["24"], "p99 ITL", "What running requests feel: ITL p99", "ms")
    bars(grid[2, 0], found["The"], "hit rate", "Prefix cache: hit rate", "%")
    bars(grid[2, 1], found["The"], "speed-up", "Prefix cache: speed-up", "times")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
