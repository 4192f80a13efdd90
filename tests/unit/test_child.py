"""What every child process does alike."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from common.codec import decode
from common.config import ClusterConfig, ModelConfig
from common.messages import Fatal
from common.sockets import Endpoints, open_socket

ROOT = Path(__file__).parents[2]
PULSES = """
import sys
from pathlib import Path
from common import sockets
sockets.HIGH_WATER_MARK = 4
from common.child import Child
child = Child("scheduler", Path(sys.argv[1]), int(sys.argv[2]))
for _ in range(9):
    child._pulse_due = 0.0
    child.pulse()
print("alive")
"""

CHILD = """
import sys
from pathlib import Path
from common.child import run_child
run_child("scheduler", Path(sys.argv[1]), int(sys.argv[2]), lambda child: {main})
"""


@pytest.mark.parametrize(
    ("main", "problem"),
    [
        (
            "child.ready(pages=2**40)",
            "FieldError: Ready.info.pages: must be between 0 and 2147483647, got 1099511627776",
        ),
        ("child.ready({'dtype': 257 * 'x'})", "FieldError: Ready.labels.dtype: must have 0 to 256 characters, got 257"),
        ("(_ for _ in ()).throw(ValueError(chr(0xDCFF)))", "ValueError: ?"),
    ],
)
def test_a_child_that_cannot_be_started_says_why_at_once(short_dir: Path, main: str, problem: str) -> None:
    """The launcher takes what it says, whatever that is, and need not wait for its time limit."""
    ClusterConfig(str(short_dir), ModelConfig("model")).save()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    control = open_socket(context, zmq.ROUTER, bind=Endpoints(short_dir).control)
    life_out, life_in = os.pipe()
    command = [sys.executable, "-c", CHILD.replace("{main}", main), str(short_dir), str(life_out)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, pass_fds=[life_out], cwd=ROOT)
        assert done.returncode == 1 and control.poll(10_000), done.stderr
        fatal = decode(control.recv_multipart()[1], {Fatal})
        assert fatal == Fatal("scheduler", problem)
    finally:
        os.close(life_out)
        os.close(life_in)
        context.destroy(linger=0)


def test_a_launcher_that_hears_nothing_for_long_ends_nobody(short_dir: Path) -> None:
    """It was stopped, and forgives what it did not hear: so do those that speak to it."""
    ClusterConfig(str(short_dir), ModelConfig("model")).save()
    life_out, life_in = os.pipe()
    command = [sys.executable, "-c", PULSES, str(short_dir), str(life_out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, pass_fds=[life_out], cwd=ROOT)
    os.close(life_out)
    os.close(life_in)
    assert done.stdout == "alive\n", done.stderr
