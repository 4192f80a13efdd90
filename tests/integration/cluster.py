"""A real cluster for tests: launch.py in a private run directory, with deadlines, and a check that nothing is left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import psutil

from common.connection import Connection
from launcher.control import has_terminal

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch.py"
START_S = 120.0
STOP_S = 30.0


class Cluster:
    """A running `launch.py`, or another `program` that takes its options; `log` holds everything that it and its
    children printed."""

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        home: Path | None = None,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = (str(LAUNCH),),
    ):
        self.home = home or Path(tempfile.mkdtemp(prefix="rhz-"))  # short: the paths of Unix sockets are limited
        self.run_dir = self.home / "run"
        self._log = (self.home / "log").open("wb")
        if "--port" not in flags:  # tests of other things need no gateway, and clusters side by side no common port
            flags = (*flags, "--no-http")
        self.shared_memory = set(Path("/dev/shm").iterdir())
        # Without one, it stays in the session of the tests: systems that schedule by sessions would else have the test,
        # which shares its own with others, wait for a processor while the cluster goes on for a second.
        own_session = has_terminal()
        self.process = subprocess.Popen(
            [sys.executable, *program, "--model", str(model), "--run-dir", str(self.run_dir), *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=self.home,
            env=os.environ | dict(env or {}),
            start_new_session=own_session,  # as a service: no terminal of a developer's decides what SIGHUP means
            process_group=None if own_session else 0,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nor nohup
        )
        self.seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    @property
    def log(self) -> str:
        return (self.home / "log").read_text(errors="replace")

    @property
    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = json.loads((self.run_dir / "cluster.json").read_text())
        return info

    def pid(self, name: str) -> int:
        return int(self.info["pids"][name])

    def wait_ready(self) -> "Cluster":
        wait_until(lambda: self._is_up() or self.process.poll() is not None, START_S, lambda: self.log)
        assert self.process.poll() is None, f"the cluster did not start:\n{self.log}"
        self.remember()
        return self

    def _is_up(self) -> bool:
        return (self.run_dir / "cluster.json").exists() and self.info["launcher_pid"] == self.process.pid

    def remember(self) -> None:
        """Note the processes of the cluster, to see later that they are gone."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.seen[child.pid] = child

    @contextmanager
    def frozen(self, name: str = "worker-0") -> Iterator[None]:
        """Stops a process, so that what happens meanwhile does not depend on time."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):  # the launcher has ended it
                os.kill(pid, signal.SIGCONT)

    def connect(self) -> Connection:
        return Connection(self.info["addresses"]["frontend"])

    def client(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run client.py to its end."""
        command = [sys.executable, str(ROOT / "client.py"), *arguments, "--run-dir", str(self.run_dir)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)

    def stats(self) -> dict[str, int]:
        with self.connect() as connection:
            return connection.stats()

    def check_idle(self) -> dict[str, int]:
        """No request or step is left and every page is free or cached."""
        with self.connect() as connection:
            values: dict[str, int] = {}

            def idle() -> bool:
                values.update(connection.stats())
                return not any(values[f"scheduler.{name}"] for name in ("running", "waiting", "in_flight"))

            wait_until(idle, 10, lambda: str(values))
        free, cached = values["scheduler.free_pages"], values["scheduler.evictable_pages"]
        assert free + cached == values["scheduler.total_pages"], values
        assert values["tokenizer.live_requests"] == 0 and values["detokenizer.streams"] == 0, values
        return values

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal the launcher and wait for its end."""
        self.process.send_signal(number)
        return self.process.wait(STOP_S)

    def check_gone(self) -> None:
        """No process, socket or shared memory of the cluster is left."""
        _, alive = psutil.wait_procs(self.seen.values(), timeout=10)
        assert not alive, f"still alive: {alive}\n{self.log}"
        assert not left_in_shared_memory(self.shared_memory)
        if self.process.returncode != -signal.SIGKILL:
            left = [p.name for p in self.run_dir.iterdir()] if self.run_dir.exists() else []
            assert left == [], f"left in the run directory: {left}"

    def destroy(self) -> None:
        """Whatever happened before, leave nothing behind."""
        if self.process.poll() is None:
            self.remember()
            self.process.kill()
            self.process.wait()
        for process in self.seen.values():
            try:
                process.kill()
                process.wait(5)
            except psutil.NoSuchProcess:
                pass
        self._log.close()
        shutil.rmtree(self.home, ignore_errors=True)


@contextmanager
def running(
    model: Path | str, *flags: str, env: Mapping[str, str] | None = None, program: Sequence[str] = (str(LAUNCH),)
) -> Iterator[Cluster]:
    """A ready cluster that must end idle, cleanly and completely. `program` takes the place of launch.py."""
    with Cluster(model, *flags, env=env, program=program) as cluster:
        try:
            yield cluster.wait_ready()
            cluster.check_idle()
            cluster.remember()
            assert cluster.stop() == 0, cluster.log
            cluster.check_gone()
        except BaseException:
            print(cluster.log)  # pytest shows it with the failure
            raise


def left_in_shared_memory(before: set[Path]) -> set[Path]:
    """What has come since `before` and no living process uses: tests run side by side."""
    left = set(Path("/dev/shm").iterdir()) - before
    for process in psutil.process_iter() if left else ():
        with suppress(psutil.Error):
            left -= {Path(file.path) for file in (*process.open_files(), *process.memory_maps())}
    return left


def wait_until(condition: Callable[[], bool], timeout_s: float, tell: Callable[[], str] = str) -> None:
    """Poll a condition that has no event to wait for; fail with `tell()` when it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s\n{tell()}"
        time.sleep(0.02)
