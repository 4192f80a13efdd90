"""Environments that hold one public client each, below a directory of the caller's."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

INSTALL_S = 900
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


class Unavailable(Exception):
    """A client cannot be installed here; the text says why."""


def python_environment(directory: Path, *packages: str, alone: str = "", torch: bool = False) -> Path:
    """The newest versions of some packages; returns the directory of the environment's programs. Uses uv where it is
    there, which takes seconds instead of minutes. `alone` is installed without what it depends on. `torch` installs
    this project's version first, by pip, which is what people configure for builds without CUDA. Raises Unavailable."""
    programs = directory / "bin"
    if (programs / "installed").exists():
        return programs
    _run([sys.executable, "-m", "venv", str(directory)])
    interpreter = str(programs / "python")
    pip = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    uv = shutil.which("uv")
    install = [uv, "pip", "install", "--quiet", "--python", interpreter] if uv else pip
    if torch:
        pinned = _pinned("torch")
        _run([*pip, pinned])
        packages = (*packages, pinned)
    if alone:
        _run([*install, "--no-deps", alone])
    _run([*install, *packages])
    (programs / "installed").touch()
    return programs


def _pinned(package: str) -> str:
    found = re.search(rf"^{package}==\S+", CONSTRAINTS.read_text(), re.MULTILINE)
    return found.group() if found else package


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
