"""How the clusters of the suite end, and what must be left: nothing."""

import asyncio
import os
import signal
import subprocess
from typing import TYPE_CHECKING

from tests.faults.judge import Allowed, Ending, Finding, Kind, Outcome
from tests.faults.plan import Ask, Conduct, End
from tests.faults.progress import Progress

if TYPE_CHECKING:
    from tests.faults.driver import Solos, Stretch

ENDED_S = 60.0  # within which all requests of an ending cluster have ended
STOPPED_S = 5.0  # after a second SIGTERM; the promise is two seconds on a machine that is not busy
VICTIMS = ("scheduler", "worker-0", "detokenizer")
_EARLY = tuple(Ask(name, False, True, 0, Conduct.READ) for name in ("drawn", "three", "schema", "longer", "regex"))
_LATE = (Ask("tiny", False, True, 0, Conduct.READ),)


async def end_cluster(stretch: "Stretch", how: End, number: int, solos: "Solos") -> list[Finding]:
    """End the cluster of `stretch`, with requests running or without. `number` chooses who is hurt."""
    cluster = stretch.cluster
    cluster.remember()
    findings: list[Finding] = []
    if how is End.DRAIN:
        cluster.process.send_signal(signal.SIGTERM)
    else:
        findings += await _end_busy(stretch, how, VICTIMS[number % len(VICTIMS)], solos)
    timeout_s = STOPPED_S if how is End.STOP else ENDED_S
    try:
        code = await asyncio.to_thread(cluster.process.wait, timeout_s)
    except subprocess.TimeoutExpired:
        return [*findings, Finding(Kind.END, f"{how.value}: it has not ended after {timeout_s:g} s")]
    if code != (-signal.SIGKILL if how is End.KILL else 0):
        findings.append(Finding(Kind.END, f"{how.value}: exit code {code}"))
    try:
        await asyncio.to_thread(cluster.check_gone)
    except AssertionError as left:
        findings.append(Finding(Kind.LEFT, f"{how.value}: {left}"))
    return findings


async def _end_busy(stretch: "Stretch", how: End, victim: str, solos: "Solos") -> list[Finding]:
    """Signal the launcher while requests run. A drain finishes them, also when a process dies, and refuses those that
    come later."""
    from tests.faults.driver import Clients

    process = stretch.cluster.process
    progress = Progress()
    asks = [*_EARLY]
    async with Clients(stretch, progress) as clients:
        playing = [asyncio.create_task(clients.play(ask)) for ask in _EARLY]
        await progress.until(20)
        process.send_signal(signal.SIGKILL if how is End.KILL else signal.SIGTERM)
        if how is End.STOP:
            await asyncio.sleep(0.1)  # else it would be one signal
            process.send_signal(signal.SIGTERM)
        elif how is End.DRAIN_HURT:
            os.kill(stretch.processes.pids[victim], signal.SIGKILL)
        if how in (End.DRAIN_BUSY, End.DRAIN_HURT):
            asks += _LATE
            playing += [asyncio.create_task(clients.play(ask)) for ask in _LATE]
        await asyncio.wait(playing, timeout=ENDED_S)
        clients.give_up()
        outcomes = [await task for task in playing]
    allowed = Allowed(stopping=True, stopped=how is End.STOP, tokenizer_replaced=how is End.KILL or how is End.STOP)
    return [*stretch.judge_all(asks, outcomes, solos, allowed), *_check_drain(how, outcomes)]


def _check_drain(how: End, outcomes: list[Outcome]) -> list[Finding]:
    """What was there before the signal has finished."""
    ends = [outcome.ending for outcome in outcomes[: len(_EARLY)]]
    if how in (End.DRAIN_BUSY, End.DRAIN_HURT) and set(ends) != {Ending.FINISHED}:
        return [Finding(Kind.END, f"{how.value}: {[end.value for end in ends]}")]
    return []
