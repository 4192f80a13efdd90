"""Environments that hold one public client each, below a directory of the caller's."""

import shutil
import subprocess
import sys
from pathlib import Path

INSTALL_S = 900


class Unavailable(Exception):
    """A client cannot be installed here; the text says why."""


def python_environment(directory: Path, *packages: str) -> Path:
    """The newest versions of some packages; returns the directory of the environment's programs. Uses uv where it is
    there, which takes seconds instead of minutes. Raises Unavailable."""
    programs = directory / "bin"
    if (programs / "installed").exists():
        return programs
    _run([sys.executable, "-m", "venv", str(directory)])
    interpreter = str(programs / "python")
    uv = shutil.which("uv")
    if uv:
        _run([uv, "pip", "install", "--quiet", "--python", interpreter, *packages])
    else:
        _run([interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
    (programs / "installed").touch()
    return programs


def node_modules(directory: Path, *packages: str) -> Path:
    """The newest versions of some npm packages; returns their `node_modules`. Raises Unavailable."""
    if not (shutil.which("node") and shutil.which("npm")):
        raise Unavailable("node and npm are not installed")
    modules = directory / "node_modules"
    if not (directory / "installed").exists():
        directory.mkdir(parents=True, exist_ok=True)
        _run(["npm", "install", "--prefix", str(directory), "--no-audit", "--no-fund", "--ignore-scripts", *packages])
        (directory / "installed").touch()
    return modules


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode:
        raise Unavailable(f"{' '.join(command[:4])} ... failed: {done.stderr.strip()[-400:]}")
