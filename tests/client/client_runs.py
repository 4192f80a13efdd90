"""client.py as its users run it: a real process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

from tests.unit.fake_frontend import TIMEOUT_S

ROOT = Path(__file__).parents[2]
CLIENT = [sys.executable, str(ROOT / "client.py")]
Ended = subprocess.CompletedProcess[str]


def run(*args: str, stdin: str = "", **env: str) -> Ended:
    """Run the client to its end."""
    return subprocess.run(
        [*CLIENT, *args], input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, **env}
    )


def run_unread(*args: str, stdin: str = "") -> Ended:
    """Run the client with nobody at the other end of its stdout."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread:
        return _run_into(unread, *args, stdin=stdin)


def run_full(*args: str, stdin: str = "") -> Ended:
    """Run the client with a stdout that is a file on a full disk."""
    with Path("/dev/full").open("w") as full:
        return _run_into(full, *args, stdin=stdin)


def _run_into(stdout: IO[str], *args: str, stdin: str) -> Ended:
    return subprocess.run(
        [*CLIENT, *args], input=stdin, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S
    )


def start(*args: str) -> "subprocess.Popen[str]":
    """Start the client for tests that interrupt it."""
    pipe = subprocess.PIPE
    return subprocess.Popen([*CLIENT, *args], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
