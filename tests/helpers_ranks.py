"""Runs tensor-parallel ranks of tests as processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.cluster import ROOT


def run_ranks(module: str, size: int, directory: Path, *arguments: str, timeout: float) -> list[dict[str, Any]]:
    """Run `size` ranks, `python -m module RANK SIZE STORE OUT *arguments` each, to their end, within `timeout` seconds
    each; returns their reports, which they write to OUT as JSON."""
    outs = [directory / f"rank{rank}.json" for rank in range(size)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(size), str(directory / "store"), str(out), *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            cwd=ROOT,
        )
        for rank, out in enumerate(outs)
    ]
    try:
        assert [rank.wait(timeout) for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads(out.read_text()) for out in outs]
