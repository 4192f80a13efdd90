"""Plays rounds against real clusters, and checks after each of them."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.faults import checks
from tests.faults.catalog import CATALOG, KNOWN_TOKENS
from tests.faults.ending import end_cluster
from tests.faults.http_client import HttpClient
from tests.faults.ipc_client import IpcClient
from tests.faults.judge import Allowed, Choice, Ending, Finding, Kind, Outcome, Served, judge
from tests.faults.plan import Ask, Conduct, End, Fault, Round, Shape
from tests.faults.processes import Processes
from tests.faults.progress import Progress
from tests.faults.report import Report
from tests.integration.cluster import LAUNCH, Cluster

ROUND_S = 120.0  # within which every request has ended
SETTLE_S = 90.0  # within which every process is back
IDLE_S = 10.0  # within which nothing is left of a round
FDS_S = 5.0  # within which closed connections are gone
QUIET_S = 2.0  # without a token before the cluster is asked whether it has anything to do
PROBES = 4  # answers in a row that it has not
PROBE_S = 0.7
TICK_S = 0.05
NO_KERNELS = "native CPU kernels are not available"  # as a worker says

Solos = dict[str, list[Choice]]


class Stretch:
    """Rounds on one cluster. Use it in `async with`: it starts the cluster, and whatever happens leaves nothing."""

    def __init__(self, model: Path, shape: Shape, report: Report, *, program: Sequence[str] = (str(LAUNCH),)):
        self.shape = shape
        self.cluster = Cluster(model, *shape.flags, program=program)
        self.processes = Processes(self.cluster, shape)
        self._report = report
        self._growth = checks.Growth()
        self._log_lines = 0
        self._totals: dict[str, int] = {}

    async def __aenter__(self) -> "Stretch":
        try:
            self.cluster.wait_ready()
            if NO_KERNELS in self.cluster.log:
                raise RuntimeError("outputs depend on the batch without native kernels, and cannot be compared")
        except BaseException:
            self.cluster.destroy()
            raise
        self._report.clusters += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cluster.destroy()

    @property
    def addresses(self) -> tuple[str, str]:
        """The cluster's own and that of HTTP (empty where there is none)."""
        found = self.cluster.info["addresses"]
        return found["frontend"], found["http"] or ""

    async def solos(self) -> Solos:
        """What each request of the catalog gets, one after the other on a quiet cluster."""
        outputs: Solos = {}
        async with IpcClient(self.addresses[0], Progress()) as client:
            for name, request in CATALOG.items():
                rid, live = client.submit(request)
                if request.endless:
                    while len(live.outcome.choices[0].tokens) < KNOWN_TOKENS and not live.ended.is_set():
                        await asyncio.sleep(TICK_S)
                    client.abort(rid)
                await live.ended.wait()
                assert live.outcome.ending is Ending.FINISHED, f"{name} alone: {live.outcome}"
                outputs[name] = live.outcome.choices
        return outputs

    async def play(self, plan: Round, solos: Solos) -> list[Finding]:
        """One round and its checks; what is wrong. The report counts."""
        before = self.processes.restarts
        progress = Progress()
        async with Clients(self, progress) as clients:
            asks = [asyncio.create_task(clients.play(ask), name=ask.request) for ask in plan.asks]
            faults = asyncio.create_task(self._inject(plan, progress, asks))
            await self._until_ended(asks, faults, clients, progress)
            await faults
            outcomes = [await task for task in asks]
            strays = clients.strays
        self._report.tokens += progress.count
        findings = await self._settle()
        after = self.processes.restarts
        allowed = Allowed(
            tokenizer_replaced=after["tokenizer"] > before["tokenizer"],
            gateway_replaced=after.get("gateway", 0) > before.get("gateway", 0),
            burst=plan.has_burst,
            condemned=after["workers"] > 1,
            paused=any(fault.hold_ms for fault in plan.faults),
        )
        findings += self.judge_all(plan.asks, outcomes, solos, allowed)
        if strays:
            findings.append(Finding(Kind.DUPLICATED, f"{strays} rows for requests that nobody has"))
        findings += checks.check_restarts(plan, before, after)
        if not any(finding.kind in (Kind.DEATH, Kind.ABORT) for finding in findings):  # it would be waited for in vain
            findings += await self._check_idle()
        findings += self._check_log()
        self._report.add_round(plan)
        self._report.findings += [(plan.number, finding) for finding in findings]
        return findings

    def judge_all(
        self, asks: Sequence[Ask], outcomes: Sequence[Outcome], solos: Solos, allowed: Allowed
    ) -> list[Finding]:
        """Judge and count what became of requests."""
        found = []
        for ask, outcome in zip(asks, outcomes, strict=True):
            verdict = judge(ask, outcome, solos[ask.request], allowed)
            if isinstance(verdict, Finding):
                found.append(verdict)
                continue
            self._report.served[verdict] += 1
            if verdict is Served.REFUSED:
                self._report.refusals[outcome.ending.value] += 1
        return found

    async def end(self, how: End, solos: Solos, number: int) -> list[Finding]:
        """End the cluster, and see that nothing is left."""
        findings = await end_cluster(self, how, number, solos)
        self._report.faults[f"end: {how.value}"] += 1
        self._report.findings += [(number, finding) for finding in findings]
        for name, count in self._totals.items():
            self._report.pressure[name] += count
        self._report.add_growth(self._growth.worst)
        return findings

    # ---- during a round -------------------------------------------------------------------------------------------

    async def _inject(self, plan: Round, progress: Progress, asks: list["asyncio.Task[Outcome]"]) -> None:
        """Each fault when its part of the tokens has come, or at the end."""
        for fault in plan.faults:
            reached = asyncio.create_task(progress.until(int(fault.at * plan.expected_tokens)))
            await asyncio.wait([reached, _all_of(asks)], return_when=asyncio.FIRST_COMPLETED)
            reached.cancel()
            await _until(lambda fault=fault: self.processes.can_be(fault), SETTLE_S)  # type: ignore[misc]
            if self.processes.can_be(fault):
                await self._do(fault)

    async def _do(self, fault: Fault) -> None:
        stopped = self.processes.hurt(fault)
        if stopped:
            await asyncio.sleep(fault.hold_ms / 1e3)
            self.processes.go_on(stopped)

    async def _until_ended(
        self, asks: list["asyncio.Task[Outcome]"], faults: "asyncio.Task[None]", clients: "Clients", progress: Progress
    ) -> None:
        """Wait for all requests, but not for those of which the cluster itself knows nothing any more."""
        deadline = time.monotonic() + ROUND_S
        idle = 0
        while not all(task.done() for task in asks) and time.monotonic() < deadline and idle < PROBES:
            await asyncio.wait(asks, timeout=PROBE_S)
            quiet = faults.done() and progress.silent_s() > QUIET_S and self.processes.whole()
            stats = await clients.probe.stats(2) if quiet else None
            busy = stats is None or stats["scheduler.running"] or stats["scheduler.waiting"]
            idle = 0 if busy else idle + 1
        clients.give_up()
        for task in asks:
            task.cancel()
        await asyncio.wait(asks)

    # ---- after it -------------------------------------------------------------------------------------------------

    async def _settle(self) -> list[Finding]:
        """Every process is there again and serves."""
        async with Clients(self, Progress()) as clients:

            async def serves() -> bool:
                if not self.processes.whole() or await clients.probe.stats(2) is None:
                    return False
                return clients.http is None or await clients.http.healthy()

            deadline = time.monotonic() + SETTLE_S
            while not await serves():
                if time.monotonic() > deadline:
                    return [Finding(Kind.DEATH, f"not whole after {SETTLE_S:g} s: {self.processes.pids}")]
                await asyncio.sleep(TICK_S)
        self.cluster.remember()
        return []

    async def _check_idle(self) -> list[Finding]:
        """Nothing is left of the requests, in no process."""
        async with IpcClient(self.addresses[0], Progress()) as client:
            deadline = time.monotonic() + IDLE_S
            while (stats := await client.stats(5)) is None or checks.unfinished(stats):
                if time.monotonic() > deadline:
                    return [Finding(Kind.IDLE, f"after {IDLE_S:g} s: {stats and checks.unfinished(stats)}")]
                await asyncio.sleep(TICK_S)
        for name in ("evicted_pages", "preempted", "aborted"):
            self._totals[name] = max(self._totals.get(name, 0), stats[f"scheduler.{name}"])
        self._totals["handed in again"] = max(
            self._totals.get("handed in again", 0), stats.get("tokenizer.resubmitted", 0)
        )
        return [*checks.check_pages(stats), *checks.check_frames(stats), *await self._check_growth()]

    async def _check_growth(self) -> list[Finding]:
        def findings() -> list[Finding]:
            found = self.processes.measure().items()
            return [f for name, (pid, size) in found for f in self._growth.too_much(name, pid, size)]

        await _until(lambda: not findings(), FDS_S)
        return [f for name, (pid, size) in self.processes.measure().items() for f in self._growth.take(name, pid, size)]

    def _check_log(self) -> list[Finding]:
        lines = self.cluster.log.splitlines()
        new, self._log_lines = lines[self._log_lines :], len(lines)
        return checks.check_log(new)


class Clients:
    """The connections of a round: shared ones, and one of its own for each client that breaks or neglects it."""

    def __init__(self, stretch: Stretch, progress: Progress):
        self._ipc_address, http_address = stretch.addresses
        self._progress = progress
        self._shared: dict[int, IpcClient] = {}
        self._all: list[IpcClient] = []
        self._stack = contextlib.AsyncExitStack()
        self.http = HttpClient(http_address, progress) if http_address else None
        self.probe = IpcClient(self._ipc_address, Progress())

    async def __aenter__(self) -> "Clients":
        await self._stack.enter_async_context(self.probe)
        if self.http is not None:
            await self._stack.enter_async_context(self.http)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def play(self, ask: Ask) -> Outcome:
        await asyncio.sleep(ask.begin_ms / 1e3)
        if ask.http:
            assert self.http is not None
            return await self.http.play(ask)
        if ask.conduct in (Conduct.DISCONNECT, Conduct.SLOW):
            return await (await self._new()).play(ask)
        if ask.client not in self._shared:
            self._shared[ask.client] = await self._new()
        return await self._shared[ask.client].play(ask)

    async def _new(self) -> IpcClient:
        client = IpcClient(self._ipc_address, self._progress)
        self._all.append(client)
        return await self._stack.enter_async_context(client)

    def give_up(self) -> None:
        for client in self._all:
            client.give_up()

    @property
    def strays(self) -> int:
        return sum(client.strays + client.refused for client in self._all)


def _all_of(asks: list["asyncio.Task[Outcome]"]) -> "asyncio.Task[None]":
    async def wait() -> None:
        await asyncio.wait(asks)

    return asyncio.create_task(wait())


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Poll what has no event to wait for; gives up silently, the caller looks again."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(TICK_S)
