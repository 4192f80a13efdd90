"""A run of many rounds: stretch by stretch, until its time is over or something is wrong."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.faults.catalog import CONTEXT
from tests.faults.driver import Solos, Stretch
from tests.faults.plan import STRETCH, end_of, plan_round, shape_of
from tests.faults.report import Report
from tests.helpers_models import make_checkpoint


def make_model(home: Path) -> Path:
    """The checkpoint that all clusters of the suite serve: tiny, with a long context."""
    return make_checkpoint("llama", home / "llama", max_position_embeddings=CONTEXT)


def run(
    seed: int,
    *,
    rounds: int | None = None,
    seconds: float | None = None,
    begin: int = 0,
    tell: Callable[[str], None] = print,
    log: Path | None = None,
) -> Report:
    """Play rounds from number `begin` on, so many or for so long, and stop at the first that finds something. The log
    of its cluster goes to `log`."""
    report = Report(seed)
    with tempfile.TemporaryDirectory(prefix="rhz-m") as home:
        asyncio.run(_run(make_model(Path(home)), report, rounds, seconds, begin, tell, log))
    return report


async def _run(
    model: Path,
    report: Report,
    rounds: int | None,
    seconds: float | None,
    begin: int,
    tell: Callable[[str], None],
    log: Path | None,
) -> None:
    began = time.monotonic()
    solos: dict[int, Solos] = {}  # by number of ranks, on which the last bits depend
    number = begin

    def over() -> bool:
        report.seconds = time.monotonic() - began
        enough = rounds is not None and report.rounds >= rounds
        return enough or not report.ok or (seconds is not None and report.seconds >= seconds)

    while not over():
        stretch = number // STRETCH
        shape = shape_of(report.seed, number)
        async with Stretch(model, shape, report) as cluster:
            if shape.tp not in solos:
                solos[shape.tp] = await cluster.solos()
            while number // STRETCH == stretch and not over():
                findings = await cluster.play(plan_round(report.seed, number), solos[shape.tp])
                tell(f"{time.monotonic() - began:7.1f} s  round {number} on {shape.name}: {_words(findings)}")
                number += 1
            if report.ok:
                await cluster.end(end_of(report.seed, stretch), solos[shape.tp], number - 1)
            if not report.ok and log is not None:
                log.write_text(cluster.cluster.log)
    over()


def _words(findings: Sequence[object]) -> str:
    return "ok" if not findings else f"{len(findings)} findings"
