"""Some rounds of the chaos suite on real clusters: without bugs they find nothing, with each planted bug they do."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.driver import Solos, Stretch
from tests.faults.judge import Kind, Served
from tests.faults.plan import SHAPES, End, Shape, plan_round
from tests.faults.report import Report
from tests.faults.run import make_model

SEED = 1
SCHEDULER_DIES = 85  # rounds in which that happens, and many requests are aborted
WORKER_DIES = 203
START = str(Path(__file__).parent / "planted" / "start.py")
BY_NAME = {shape.name: shape for shape in SHAPES}
PLAIN = BY_NAME["tp1"]


@dataclass(frozen=True)
class Ground:
    """The checkpoint, and what its requests get alone, by number of ranks."""

    model: Path
    solos: dict[int, Solos]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    yield Ground(make_model(tmp_path_factory.mktemp("m")), {})


def play(ground: Ground, shape: Shape, numbers: list[int], end: End, *program: str) -> Report:
    """Rounds on one cluster, until one finds something."""
    report = Report(SEED)

    async def go() -> None:
        options = {"program": program} if program else {}
        async with Stretch(ground.model, shape, report, **options) as stretch:
            if shape.tp not in ground.solos:
                assert not program, "alone means without a bug"
                ground.solos[shape.tp] = await stretch.solos()
            for number in numbers:
                if await stretch.play(plan_round(SEED, number, shape), ground.solos[shape.tp]):
                    return
            await stretch.end(end, ground.solos[shape.tp], numbers[-1])

    asyncio.run(go())
    print(report.text())
    return report


@pytest.mark.parametrize(
    ("name", "numbers", "end"),
    [
        ("tp1", [SCHEDULER_DIES, WORKER_DIES], End.KILL),
        ("tp1-http", [4, 5], End.DRAIN_HURT),
        ("tp2-pressure-http", [5, 16], End.STOP),
    ],
)
def test_nothing_is_lost(ground: Ground, name: str, numbers: list[int], end: End) -> None:
    report = play(ground, BY_NAME[name], numbers, end)
    assert report.ok, report.text()
    assert report.rounds == len(numbers)
    assert report.served[Served.SERVED] >= 10 * len(numbers), report.text()


@pytest.mark.parametrize(
    ("bug", "number", "kinds"),
    [
        ("leaked_page", WORKER_DIES, {Kind.PAGES}),
        # it goes on while its client looks, or, where that was while the worker was away, when all others have ended
        ("swallowed_abort", WORKER_DIES, {Kind.ABORT, Kind.IDLE}),
        ("duplicated_token", SCHEDULER_DIES, {Kind.DUPLICATED}),
        ("lost_finish", WORKER_DIES, {Kind.LOST}),
    ],
)
def test_a_planted_bug_is_found(ground: Ground, bug: str, number: int, kinds: set[Kind]) -> None:
    """In a round that finds nothing without it."""
    if PLAIN.tp not in ground.solos:  # this test alone was chosen
        assert play(ground, PLAIN, [number], End.DRAIN).ok
    report = play(ground, PLAIN, [number], End.DRAIN, START, bug)
    assert any(map(report.of_kind, kinds)), report.text()
