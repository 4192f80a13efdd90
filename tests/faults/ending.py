"""How the clusters of the suite end, and what must be left: nothing."""

import asyncio
import signal
from typing import TYPE_CHECKING

from tests.faults.judge import Allowed, Ending, Finding, Kind
from tests.faults.plan import Ask, Conduct, End
from tests.faults.progress import Progress

if TYPE_CHECKING:
    from tests.faults.driver import Solos, Stretch

_EARLY = tuple(Ask(name, False, True, 0, Conduct.READ) for name in ("drawn", "three", "schema", "longer"))
_LATE = (Ask("tiny", False, True, 0, Conduct.READ),)


async def end_cluster(stretch: "Stretch", how: End, solos: "Solos") -> list[Finding]:
    """End the cluster of `stretch`, with requests running or without."""
    cluster = stretch.cluster
    cluster.remember()
    findings = []
    number = signal.SIGKILL if how is End.KILL else signal.SIGTERM
    if how is End.DRAIN:
        code = await asyncio.to_thread(cluster.stop, number)
    else:
        found, code = await _end_busy(stretch, number, solos)
        findings += found
    if code != (-signal.SIGKILL if how is End.KILL else 0):
        findings.append(Finding(Kind.END, f"{how.value}: exit code {code}"))
    try:
        await asyncio.to_thread(cluster.check_gone)
    except AssertionError as left:
        findings.append(Finding(Kind.LEFT, f"{how.value}: {left}"))
    return findings


async def _end_busy(stretch: "Stretch", number: signal.Signals, solos: "Solos") -> tuple[list[Finding], int]:
    """Signal the launcher while requests run. A drain finishes them, and refuses those that come later."""
    from tests.faults.driver import Clients

    killed = number == signal.SIGKILL
    progress = Progress()
    async with Clients(stretch, progress) as clients:
        asks = [asyncio.create_task(clients.play(ask)) for ask in _EARLY]
        await progress.until(20)
        stopping = asyncio.create_task(asyncio.to_thread(stretch.cluster.stop, number))
        late = [] if killed else [asyncio.create_task(clients.play(ask)) for ask in _LATE]
        done, pending = await asyncio.wait([*asks, *late], timeout=40)
        clients.give_up()
        outcomes = [await task for task in [*asks, *late]]
        code = await stopping
    allowed = Allowed(stopping=True, tokenizer_replaced=killed)  # killed: connections break
    findings = stretch.judge_all([*_EARLY, *(_LATE if late else ())], outcomes, solos, allowed)
    if not killed and any(o.ending not in (Ending.FINISHED, Ending.STOPPING) for o in outcomes):
        findings.append(Finding(Kind.END, f"drain: {[o.ending.value for o in outcomes]}"))
    return findings, code
