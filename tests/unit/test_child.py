"""What every child process does alike."""

import os
import subprocess
import sys
from pathlib import Path

from common.config import ClusterConfig, ModelConfig

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


def test_a_launcher_that_hears_nothing_for_long_ends_nobody(short_dir: Path) -> None:
    """It was stopped, and forgives what it did not hear: so do those that speak to it."""
    ClusterConfig(str(short_dir), ModelConfig("model")).save()
    life_out, life_in = os.pipe()
    command = [sys.executable, "-c", PULSES, str(short_dir), str(life_out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, pass_fds=[life_out], cwd=ROOT)
    os.close(life_out)
    os.close(life_in)
    assert done.stdout == "alive\n", done.stderr
