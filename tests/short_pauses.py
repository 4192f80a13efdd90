"""launch.py, but however often a unit dies, it is replaced after two seconds at most, as with the default --restarts.

For tests that kill and freeze by the dozen: `python tests/short_pauses.py --model ... --restarts 1000`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import launch
from launcher.restarts import Restarts

if __name__ == "__main__":
    Restarts.LONGEST_PAUSE_S = 2.0
    launch.main()
