"""Every Triton kernel compiles to Hopper's machine code, which takes no GPU; the interpreter would not tell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def compiled(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What Triton has compiled in earlier runs of the tests. It finds a kernel by a hash of all that it is made from:
    its source and that of what it calls, constants, options, target, and the versions of Triton and ptxas."""
    cache = getattr(request.config, "cache", None)  # pytest's own directory, `pytest --cache-clear` removes it
    return tmp_path if cache is None else Path(cache.mkdir("triton"))


def test_kernels_compile_for_hopper(compiled: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(compiled)}
    command = [sys.executable, "-m", "bench.gpu.compile_kernels", "--dtype", "bf16"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 52
    assert all("wgmma" in line for line in lines if "prefill" in line), done.stdout
    assert [line for line in lines if "weights of logits" in line and "approx" not in line], done.stdout
    assert all("approx" in line for line in lines if "decode" in line or "prefill" in line), done.stdout
    assert all(" turn" in line for line in lines if not re.search("linear|widen", line)), done.stdout
    assert not any("EARLY" in line for line in lines), done.stdout
    assert all("wgmma" in line for line in lines if re.search("linear (int|fp)", line)), done.stdout
    assert all("mma" in line for line in lines if "decode" in line or "shared group" in line), done.stdout


def test_attention_fits_in_the_shared_memory_of_smaller_gpus(compiled: Path) -> None:
    """Of compute capabilities 8.6, 8.9 and 12.0."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(compiled)}
    command = [sys.executable, "-m", "bench.gpu.compile_kernels", "--smaller", "--dtype", "bf16", "--dtype", "fp32"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 24


def launches(tmp_path: Path, *what: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.helpers_launches", *what]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)


def test_no_step_needs_a_kernel_that_others_did_not(tmp_path: Path) -> None:
    """Compiling takes a second or more, while requests wait."""
    done = launches(tmp_path, "kernels")
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 20


def test_serving_launches_no_kernel_that_the_start_has_not(tmp_path: Path) -> None:
    """Of none of the configurations, whose requests between them launch every kernel there is."""
    done = launches(tmp_path, "workers")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    kernels = {word for line in lines if " steps with " in line for word in line.split() if word.endswith("_kernel")}
    written = {name for file in (ROOT / "worker_proc" / "cuda").glob("*.py") for name in defined(file.read_text())}
    assert kernels == written and len(written) == 15
    assert sum("0 more" in line for line in lines) == sum("steps with" in line for line in lines) == 8


def test_without_a_warm_up_serving_launches_others(tmp_path: Path) -> None:
    done = launches(tmp_path, "workers", "--cold")
    assert done.returncode == 1, done.stdout + done.stderr
    assert {"draw_kernel", "weights_kernel", "prefill_kernel"} <= set(done.stdout.split())


def defined(text: str) -> list[str]:
    """The kernels of a source file that are launched, not called by others."""
    return re.findall(r"^@triton\.jit.*?\ndef (\w+_kernel)\(", text, re.M)
