"""`launch.py --model FILE.gguf`: a model directory for a GGUF file, see worker_proc/gguf/directory.py."""

import subprocess
import sys
from pathlib import Path

_SUFFIX = ".gguf"
_TIMEOUT_S = 120


class GgufError(Exception):
    """A GGUF file that cannot be served, and why."""


def is_gguf(name: str) -> bool:
    """Whether a file's name is that of a GGUF file."""
    return Path(name).suffix.lower() == _SUFFIX


def directory_for(file: Path) -> Path:
    """The model directory, which is made at the first start. Raises GgufError."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "worker_proc.gguf", str(file.absolute())],
            capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL,
            cwd=Path(__file__).resolve().parent.parent,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise GgufError(f"reading its header and tokenizer took more than {_TIMEOUT_S} s") from None
    if done.returncode:
        problem = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise GgufError(problem[:1000])
    return Path(done.stdout.splitlines()[-1])
