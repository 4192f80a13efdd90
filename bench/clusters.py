"""Start a real cluster for a benchmark, and say on what it runs."""

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path

from common.connection import Connection
from common.run_dir import RunDirError, find_cluster

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def cluster(*flags: str, deadline_s: float = 120.0) -> Iterator[tuple[Connection, float]]:
    """A connection to a fresh cluster, and the seconds from its process start until it was ready."""
    with tempfile.TemporaryDirectory(prefix="rhz-") as home:
        run_dir = Path(home) / "run"
        started = time.monotonic()
        command = [sys.executable, str(ROOT / "launch.py"), "--run-dir", str(run_dir), "--no-http", *flags]
        launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while True:
                try:
                    info = find_cluster(run_dir)
                    break
                except RunDirError:
                    if launcher.poll() is not None or time.monotonic() > started + deadline_s:
                        raise
                time.sleep(0.01)
            ready_s = time.monotonic() - started
            with Connection(info["addresses"]["frontend"]) as connection:
                yield connection, ready_s
        finally:
            launcher.terminate()
            launcher.wait(30)


def machine() -> str:
    """Processor, cores, versions and date, in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "pyzmq", "msgpack", "uvloop"))
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, {packages}, {date.today()}"
