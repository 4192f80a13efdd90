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
from typing import Any

from common.connection import Connection
from common.run_dir import RunDirError, find_cluster

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def started(*flags: str, deadline_s: float = 120.0) -> Iterator[dict[str, Any]]:
    """A fresh cluster, ready: what its cluster.json says."""
    with tempfile.TemporaryDirectory(prefix="rhz-") as home:
        run_dir = Path(home) / "run"
        deadline = time.monotonic() + deadline_s
        command = [sys.executable, str(ROOT / "launch.py"), "--run-dir", str(run_dir), *flags]
        launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while True:
                try:
                    info = find_cluster(run_dir)
                    break
                except RunDirError:
                    if launcher.poll() is not None or time.monotonic() > deadline:
                        raise
                time.sleep(0.01)
            yield info
        finally:
            launcher.terminate()
            launcher.wait(30)


@contextmanager
def cluster(*flags: str, deadline_s: float = 120.0) -> Iterator[tuple[Connection, float]]:
    """A connection to a fresh cluster without HTTP, and the seconds from its process start until it was ready."""
    begin = time.monotonic()
    with started("--no-http", *flags, deadline_s=deadline_s) as info:
        ready_s = time.monotonic() - begin
        with Connection(info["addresses"]["frontend"]) as connection:
            yield connection, ready_s


def machine() -> str:
    """Processor, cores, versions and date, in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "pyzmq", "msgpack", "uvloop"))
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, {packages}, {date.today()}"
