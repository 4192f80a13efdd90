"""A worker that some prompts kill and others hang, as a bug in a kernel would, for tests/integration/test_poison.py.

As a program it is launch.py with such workers, `python tests/mortal_worker.py --model ...`.
"""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KILLS = [250, 3, 250]
HANGS = [251, 3, 251]


def contains(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[at : at + len(part)] == part for at in range(len(tokens)))


def work() -> None:
    """The worker process."""
    from worker_proc import main
    from worker_proc.model_runner import ModelRunner

    launch = ModelRunner.launch

    def launch_or_die(self: ModelRunner, plan: Any) -> Any:
        tokens = list(plan.chunk_tokens)
        if contains(tokens, KILLS):
            os.kill(os.getpid(), signal.SIGKILL)
        while contains(tokens, HANGS):
            signal.pause()
        return launch(self, plan)

    ModelRunner.launch = launch_or_die  # type: ignore[method-assign]
    main.main()


def launch_with_mortal_workers() -> None:
    sys.path.insert(0, str(ROOT))
    import launch
    from launcher import supervisor, table

    def process_table(config: Any) -> list[table.UnitSpec]:
        units = table.process_table(config)
        return [
            replace(unit, processes=tuple(replace(p, module="tests.mortal_worker") for p in unit.processes))
            if unit.name == table.WORKERS
            else unit
            for unit in units
        ]

    supervisor.process_table = process_table
    launch.main()


if __name__ == "__main__":
    work() if "--life-fd" in sys.argv else launch_with_mortal_workers()
