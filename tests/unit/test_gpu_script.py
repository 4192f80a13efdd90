"""bench/gpu.sh on a machine without a GPU, with commands that only say what they were asked for: parts fail alone. And
what its parts do on a bare one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "gpu.sh"
SAYS = '[ "$1" = -c ] && exit 0  # FlashInfer is there, and nothing is missing\necho "asked: $*"'
NOT_THERE = ("fastapi", "flashinfer", "httptools", "llguidance", "uvicorn", "zmq")  # where there is torch alone


def run(folder: Path, python: str, *wheels: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script with these lines as its Python."""
    for name, lines in (("nvidia-smi", "echo a GPU"), ("python", python), ("compute-sanitizer", 'shift 4\n"$@"')):
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "OUT": str(folder / "out")} | environment
    command = ["sh", str(SCRIPT), str(folder / "python"), *wheels]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_all_parts_run(tmp_path: Path) -> None:
    done = run(tmp_path, SAYS)
    assert done.returncode == 0, done.stdout
    asked = [line for line in done.stdout.splitlines() if line.startswith("asked")]
    assert len(asked) == 15 and done.stdout.splitlines()[-1].endswith("failed: none")
    named = [word for line in asked for word in line.split() if word.startswith(("bench.", "tests/"))]
    for name in named:
        path = ROOT / name if "/" in name else ROOT / (name.replace(".", "/") + ".py")
        assert path.is_file(), name


def test_a_part_that_fails_is_named_and_stops_no_other(tmp_path: Path) -> None:
    done = run(tmp_path, SAYS + '\ncase "$*" in *"bench.gpu.sampling") exit 3;; esac')
    assert done.returncode == 1
    assert done.stdout.count("asked") == 15
    assert done.stdout.splitlines()[-1].endswith("failed: sampling (3)")


def test_no_part_begins_when_the_time_is_over(tmp_path: Path) -> None:
    done = run(tmp_path, SAYS, BUDGET="0")
    assert done.returncode == 1
    assert done.stdout.count("NOT RUN") == 15 and "asked" not in done.stdout


def test_flashinfer_that_is_missing_is_no_failure(tmp_path: Path) -> None:
    done = run(tmp_path, SAYS.replace("exit 0", "exit 1"))
    assert done.returncode == 0 and "FlashInfer is not installed" in done.stdout and done.stdout.count("asked") == 14


def test_all_parts_have_time_to_reach_their_limits() -> None:
    text = SCRIPT.read_text()
    parts = re.findall(r'^ *part (\d+) "(.*?)"', text, re.M)
    limits = [int(limit) for limit, name in parts if "FlashInfer" not in name]
    budget = re.search(r"BUDGET:-(\d+)", text)
    assert budget is not None and len(limits) == 14 and sum(limits) <= int(budget[1])


def test_what_is_missing_is_said_first(tmp_path: Path) -> None:
    """With a Python that lacks one module of each kind."""
    lacking = '[ "$1" = -c ] && { shift 3; echo "$*"; exit 0; }\nexit 0'
    lines = run(tmp_path, lacking).stdout.splitlines()
    said = [line for line in lines if "missing" in line]
    assert lines[1 : 1 + len(said)] == said and len(said) == 4
    assert "needed by every part: torch triton" in said[0] and "clusters: zmq llguidance" in said[3]


def test_memory_of_tensors_is_checked_one_by_one_where_nothing_is_captured(tmp_path: Path) -> None:
    done = run(tmp_path, SAYS + '\necho "own memory: ${PYTORCH_NO_CUDA_MEMORY_CACHING:-0} $*"')
    own = [line.split("own memory: ")[1] for line in done.stdout.splitlines() if "own memory" in line]
    assert [line.split()[2] for line in own if line.startswith("1")] == [
        "bench.gpu.attention", "bench.gpu.sampling", "bench.gpu.quantized"
    ]  # fmt: skip
    assert all("--small" in line for line in own if line.startswith("1"))


def test_wheels_come_before_what_the_caller_has(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "a.whl").touch()
    for before, wanted in (("/mine", f"{tmp_path}/out/site:/mine"), ("", f"{tmp_path}/out/site")):
        done = run(tmp_path, SAYS + '\necho "path: $PYTHONPATH"', str(wheels), PYTHONPATH=before)
        paths = [line for line in done.stdout.splitlines() if line.startswith("path: ")]
        assert paths[0] == f"path: {before}" and set(paths[1:]) == {f"path: {wanted}"}


@pytest.mark.soak
def test_most_parts_need_little_beside_torch() -> None:
    """All but profiles of the worker and clusters. Tests of kernels, too."""
    pytest.importorskip("triton")
    modules = ["attention", "checkpoint", "compile_kernels", "parity", "quantized", "sampling", "worker"]
    tests = re.findall(r"tests/worker/(test_\w+)\.py", SCRIPT.read_text())
    assert len(tests) == 8
    names = [f"bench.gpu.{name}" for name in modules] + [f"tests.worker.{name}" for name in tests]
    code = f"import sys; sys.modules.update(dict.fromkeys({NOT_THERE})); import {', '.join(names)}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.soak
def test_a_backend_that_cannot_be_had_is_a_failure() -> None:
    pytest.importorskip("triton")
    code = 'import sys; sys.modules["flashinfer"] = None; from bench.gpu.attention import main; main()'
    command = [sys.executable, "-c", code, "--backend", "flashinfer"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout.startswith("FAILED: gpu-attention flashinfer: it cannot be imported")
