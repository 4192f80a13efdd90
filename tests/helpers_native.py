"""Native draws and scores on two threads."""

from collections.abc import Iterator

from worker_proc.cpu.features import Level
from worker_proc.cpu.library import load_library
from worker_proc.cpu.sampling import NativeDraws


def native_draws(level: Level) -> Iterator[NativeDraws]:
    """For a fixture: of one level, until the tests that use it are done."""
    library = load_library(level)
    library.set_threads(2)
    yield NativeDraws(library)
    library.set_threads(1)
