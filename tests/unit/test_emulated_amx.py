"""Where there is no AMX, its kernels are held to their own tests in an emulation with the same bits."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulated_amx import AVX512
from worker_proc.cpu.features import cpu_features

ROOT = Path(__file__).parents[2]
FILES = (
    "cpu_attention", "cpu_compressed", "cpu_decoder", "cpu_linear", "native_draws", "native_logprobs",
    "quantized_linear", "quantized_models",
)  # fmt: skip

pytestmark = [
    pytest.mark.skipif(cpu_features().has("amx"), reason="the processor's own AMX is tested"),
    pytest.mark.skipif(not cpu_features().flags >= AVX512, reason="to emulate AVX512 too takes too long"),
]


def test_the_kernels_for_amx_pass_their_tests() -> None:
    files = (f"tests/unit/test_{name}.py" for name in FILES)
    command = [sys.executable, "-m", "pytest", "-q", "--emulate-amx", "-p", "no:cacheprovider", "-k", "amx", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed is not None, done.stdout[-5000:] + done.stderr[-1000:]
    assert int(passed[1]) >= 100  # of all files: nobody has renamed what -k looks for
