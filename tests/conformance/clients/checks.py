"""What every client script shares: named checks, one line each, and an exit status. Needs the standard library only,
since it runs in environments that have a client and nothing of ours."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """The server under test; `url` ends with /v1."""

    url: str
    key: str
    model: str


Check = Callable[[Target], str | None]


class Suite:
    """The checks of one client in the order in which they were added."""

    def __init__(self, client: str):
        self._client = client
        self._checks: list[tuple[str, Check]] = []

    def check(self, title: str) -> Callable[[Check], Check]:
        """Add a function. It raises when the check fails, and may return a word on what it saw."""

        def add(function: Check) -> Check:
            self._checks.append((title, function))
            return function

        return add

    def main(self) -> None:
        """Run all checks against the server that the command line names, and exit with 1 when one failed."""
        target = Target(*sys.argv[1:4])
        failed = 0
        for title, function in self._checks:
            begin = time.monotonic()
            try:
                note = function(target)
            except Exception as error:
                failed += 1
                told = " ".join(f"{type(error).__name__}: {error}".split())[:400]
                print(f"FAIL  {self._client}  {title}: {told} (line {_line(error, function)})", flush=True)
            else:
                spent = time.monotonic() - begin
                print(f"PASS  {self._client}  {title} ({note + ', ' if note else ''}{spent:.1f} s)", flush=True)
        sys.exit(1 if failed else 0)


def _line(error: BaseException, function: Check) -> int:
    """The line of the check itself at which it failed."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code is function.__code__:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def expect(condition: object, problem: object) -> None:
    """`assert` that no flag of the interpreter switches off, and that says what it saw."""
    if not condition:
        raise AssertionError(str(problem))
