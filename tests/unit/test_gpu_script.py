"""bench/gpu.sh on a machine without a GPU, with commands that only say what they were asked for: parts fail alone."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAYS = '[ "$1" = -c ] && exit 0  # FlashInfer is there\necho "asked: $*"'


def run(folder: Path, python: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script with these lines as its Python."""
    for name, lines in (("nvidia-smi", "echo a GPU"), ("python", python), ("compute-sanitizer", 'shift 2\n"$@"')):
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "OUT": str(folder / "out")} | environment
    command = ["sh", str(ROOT / "bench" / "gpu.sh"), str(folder / "python")]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_all_parts_run(tmp_path: Path) -> None:
    done = run(tmp_path, SAYS)
    assert done.returncode == 0, done.stdout
    asked = [line for line in done.stdout.splitlines() if line.startswith("asked")]
    assert len(asked) == 14 and done.stdout.splitlines()[-1].endswith("failed: none")
    named = [word for line in asked for word in line.split() if word.startswith(("bench.", "tests/"))]
    for name in named:
        path = ROOT / name if "/" in name else ROOT / (name.replace(".", "/") + ".py")
        assert path.is_file(), name


def test_a_part_that_fails_is_named_and_stops_no_other(tmp_path: Path) -> None:
    done = run(tmp_path, SAYS + '\ncase "$*" in *"bench.gpu.sampling") exit 3;; esac')
    assert done.returncode == 1
    assert done.stdout.count("asked") == 14
    assert done.stdout.splitlines()[-1].endswith("failed: sampling (3)")


def test_no_part_begins_when_the_time_is_over(tmp_path: Path) -> None:
    done = run(tmp_path, SAYS, BUDGET="0")
    assert done.returncode == 1
    assert done.stdout.count("NOT RUN") == 14 and "asked" not in done.stdout


def test_flashinfer_that_is_missing_is_no_failure(tmp_path: Path) -> None:
    done = run(tmp_path, SAYS.replace("exit 0", "exit 1"))
    assert done.returncode == 0 and "FlashInfer is not installed" in done.stdout and done.stdout.count("asked") == 13
