"""Every Triton kernel compiles to Hopper's machine code, which takes no GPU; the interpreter would not tell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "bench.gpu.compile_kernels", "--dtype", "bf16"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 34
    assert all("wgmma" in line for line in lines if "prefill" in line), done.stdout
    assert [line for line in lines if "weights of logits" in line and "approx" not in line], done.stdout
    assert all("approx" in line for line in lines if "decode" in line or "prefill" in line), done.stdout
    assert all("wgmma" in line for line in lines if "linear int" in line), done.stdout
    assert all("mma" in line for line in lines if "decode" in line or "shared group" in line), done.stdout


def test_no_step_needs_a_kernel_that_others_did_not(tmp_path: Path) -> None:
    """Compiling takes a second or more, while requests wait."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.helpers_launches"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 20
