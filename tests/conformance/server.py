"""What all suites share: the server under test, one line for each check, and a client's program with a time limit."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RUN_S = 300
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class Server:
    """The gateway under test and a directory for environments and files. `url` has no path; `key_file` holds `key`."""

    url: str
    key: str
    key_file: Path
    model: Path
    home: Path

    @property
    def name(self) -> str:
        return self.model.name


def report(passed: bool, client: str, title: str, note: str = "") -> bool:
    print(f"{'PASS' if passed else 'FAIL'}  {client}  {title}{': ' if note and not passed else ' ' * bool(note)}{note}")
    sys.stdout.flush()
    return passed


def run(command: list[Any], *, offline: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a client's program with what it finds in the environment, and with `offline` no way to a model hub."""
    environment = os.environ | (OFFLINE if offline else {}) | more
    arguments = [str(part) for part in command]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=RUN_S, env=environment, cwd=HERE)


def version_of(programs: Path, package: str) -> str:
    """`package` and its version in an environment."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return f"{package} {run([programs / 'python', '-c', code]).stdout.strip()}"
