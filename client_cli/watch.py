"""Ask a server what it is doing, again and again: snapshots, processes, health. Used by `top` and `status`."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from client_cli.snapshot import Snapshot, from_metrics, from_stats
from client_cli.target import Target

if TYPE_CHECKING:
    import psutil


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """A process of the cluster: `cpu` in percent of a core since the look before, `rss` in bytes; None: it is gone."""

    name: str
    pid: int
    cpu: float | None
    rss: int | None
    threads: int | None


class Processes:
    """The processes that cluster.json names."""

    def __init__(self, pids: dict[str, int]):
        self._pids = pids
        self._known: dict[int, psutil.Process] = {}

    def look(self) -> list[ProcessRow]:
        import psutil

        rows = []
        for name, pid in self._pids.items():
            try:
                process = self._known.get(pid) or psutil.Process(pid)
                self._known[pid] = process
                with process.oneshot():
                    if process.status() == psutil.STATUS_ZOMBIE:
                        raise psutil.NoSuchProcess(pid)
                    cpu, rss = process.cpu_percent(), process.memory_info().rss
                    rows.append(ProcessRow(name, pid, cpu, rss, process.num_threads()))
            except psutil.Error:
                rows.append(ProcessRow(name, pid, None, None, None))
        return rows


class Watcher:
    """Snapshots of a target. Raises ConnectionLost when it cannot be asked."""

    def __init__(self, target: Target):
        from common.connection import Connection

        self.info: dict[str, Any] = {}
        self._connection: Connection | None = None
        if target.url is None:
            if target.address is None:
                self.info = target.cluster()
            self._connection = Connection(target.frontend())
        else:
            from client_cli.http_loop import HttpLoop

            self._http: HttpLoop[None] = HttpLoop(target.server())
        self.processes = Processes(self.info.get("pids", {}))

    def snapshot(self, timeout_s: float = 10.0) -> Snapshot:
        if self._connection is not None:
            return from_stats(self._connection.stats(timeout_s), time.monotonic())
        return from_metrics(self.page("/metrics", timeout_s), time.monotonic())

    def page(self, path: str, timeout_s: float = 10.0) -> str:
        """A page of the HTTP server. Raises Unreachable or ConnectionLost."""
        import aiohttp

        from client_cli.http_loop import failure_text
        from common.connection import ConnectionLost, Unreachable

        url = self._http.server.root + path
        try:
            status, text = self._http.get(path, timeout_s)
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(f"no answer at {url}: {error}") from None
        except TimeoutError:
            raise ConnectionLost(f"no answer at {url} within {timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise ConnectionLost(f"{url}: {failure_text(error)}") from None
        if status != 200:
            raise ConnectionLost(f"{url} answered with HTTP {status}: {text.strip()[:200]}")
        return text

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        else:
            self._http.close()
