"""Ask a server what it is doing, again and again: snapshots, processes, health. Used by `top` and `status`."""

import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from client_cli.snapshot import Snapshot, from_metrics, from_stats
from client_cli.target import Target

if TYPE_CHECKING:
    import psutil

    from client_cli.http_loop import HttpLoop


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

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}

    def look(self, pids: dict[str, int]) -> list[ProcessRow]:
        import psutil

        rows = []
        for name, pid in pids.items():
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
    """Snapshots of a target, once it is there as far as it says to wait. Raises ConnectionLost when it cannot be
    asked."""

    def __init__(self, target: Target):
        from common.connection import Connection

        self._target = replace(target, wait_s=0.0)  # later looks show at once that it is gone
        self.info: dict[str, Any] = {}
        self._connection: Connection | None = None
        self._http: HttpLoop[None] | None = None
        if target.url is None:
            if target.address is None:
                self.info = target.cluster()
            self._connection = Connection(target.frontend())
        else:
            from client_cli import http_loop

            self._http = http_loop.HttpLoop(target.server())
            if target.wait_s:
                self._await_http(target.wait_s)
        self.processes = Processes()

    def _await_http(self, wait_s: float) -> None:
        """The first look says what is wrong, if nobody has come."""
        from client_cli.http_models import find_model
        from common.connection import ConnectionLost

        assert self._http is not None
        with contextlib.suppress(ConnectionLost):
            find_model(self._http, "", wait_s)

    def look(self) -> list[ProcessRow]:
        """The processes as they are; restarted ones have other pids than before."""
        from client_cli.errors import NoClusterError

        if self._target.url is None and self._target.address is None:
            with contextlib.suppress(NoClusterError):
                self.info = self._target.cluster()
        return self.processes.look(self.info.get("pids", {}))

    def snapshot(self, timeout_s: float = 10.0) -> Snapshot:
        """Raises ConnectionLost; the next call tries a new connection."""
        from common.connection import Connection, ConnectionLost

        if self._http is not None:
            return from_metrics(self.page("/metrics", timeout_s), time.monotonic())
        if self._connection is None:
            self._connection = Connection(self._target.frontend())
        try:
            return from_stats(self._connection.stats(timeout_s), time.monotonic())
        except ConnectionLost:
            self._connection.close()
            self._connection = None
            raise

    def page(self, path: str, timeout_s: float = 10.0) -> str:
        """A page of the HTTP server. Raises Unreachable or ConnectionLost."""
        import aiohttp

        from client_cli.http_loop import failure_text
        from common.connection import ConnectionLost, Unreachable

        assert self._http is not None
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
        if self._http is not None:
            self._http.close()
