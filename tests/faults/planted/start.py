"""`python start.py BUG ...`: launch.py with its options, except that one child runs a module of this folder."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])  # instead of this folder

BUGS = {  # the module of this folder, and the one whose place it takes
    "leaked_page": "scheduler_proc.event_loop",
    "swallowed_abort": "scheduler_proc.event_loop",
    "duplicated_token": "tokenizer_proc.tokenizer",
    "lost_finish": "tokenizer_proc.detokenizer",
}


def main() -> None:
    from launch import main as launch
    from launcher import supervisor

    bug = sys.argv.pop(1)
    table = supervisor.process_table
    names = {BUGS[bug]: f"tests.faults.planted.{bug}"}

    def planted(config):  # type: ignore[no-untyped-def]
        return [
            replace(u, processes=tuple(replace(p, module=names.get(p.module, p.module)) for p in u.processes))
            for u in table(config)
        ]

    supervisor.process_table = planted
    launch()


if __name__ == "__main__":
    main()
