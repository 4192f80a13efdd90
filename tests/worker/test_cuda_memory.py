"""What a worker keeps free on a GPU for its steps is enough for all of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]


def test_no_step_takes_more_than_was_measured() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers_step_memory"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [(int(a), int(b)) for a, b in re.findall(r"measured (\d+), taken (\d+)", done.stdout)]
    assert len(found) == 10
    assert all(0 < taken <= measured for measured, taken in found), done.stdout
    assert max(taken / measured for measured, taken in found) > 0.5, done.stdout  # and not much more is kept free
