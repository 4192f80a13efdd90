"""The kernels for Arm's products of bfloat16 are held to their tests in an emulation of those instructions."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from worker_proc.cpu.build import BuildError, find_compiler
from worker_proc.cpu.features import cpu_features

ROOT = Path(__file__).parents[2]
FILES = ("cpu_compressed", "cpu_decoder", "cpu_linear", "quantized_linear")


def has_compiler() -> bool:
    try:
        find_compiler()
    except BuildError:
        return False
    return True


@pytest.mark.skipif(cpu_features().has("armbf16"), reason="the processor's own instructions are tested")
@pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
def test_the_kernels_for_arm_pass_their_tests() -> None:
    files = (f"tests/unit/test_{name}.py" for name in FILES)
    command = [sys.executable, "-m", "pytest", "-q", "--emulate-arm", "-p", "no:cacheprovider", "-k", "armbf16", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed is not None, done.stdout[-5000:] + done.stderr[-1000:]
    assert int(passed[1]) >= 100  # of all files: nobody has renamed what -k looks for
