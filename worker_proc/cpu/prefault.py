"""Has the system hand out the memory of the KV cache before it is written, so that steps need not wait for it.

A first write of a page makes the kernel find and zero it, and in a virtual machine perhaps the host as well: 0.2 s per
GiB on the former alone, some 3 s per GiB where the host joins in, all of it in the middle of steps.
"""

import contextlib
import ctypes
import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from worker_proc.cpu.memory import HUGE_PAGE

log = logging.getLogger(__name__)

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of linux/mman.h, since Linux 5.14
_LEAST_BYTES = 2**30  # of a cache: less is written soon enough
_LOWEST_PRIORITY = 19
_LOOK_S = 0.1

Advise = Callable[[int, int], bool]


def populate(begin: int, nbytes: int) -> bool:
    """Make `nbytes` of this process from address `begin` (a multiple of the page size) resident without changing them;
    whether the system does that."""
    return bool(_libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), _POPULATE_WRITE) == 0)


class Prefault:
    """Threads that go through `tensors` (on the CPU), from the first to the last rows of all at the same time.

    They begin at once. After `step_back` one goes on, at the lowest priority and only while the worker rests: even
    so it takes memory bandwidth that steps need. A cache of less than a GiB is left alone.
    """

    def __init__(self, tensors: Sequence[Tensor], threads: int, advise: Advise = populate) -> None:
        total = sum(tensor.nbytes for tensor in tensors)
        self._slices = _slices(tensors) if total >= _LEAST_BYTES else iter(())
        self._lock = threading.Lock()
        self._advise = advise
        self._resting: Callable[[], bool] | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(number == 0,), name="prefault", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether all is done, after at most so many seconds."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def step_back(self, resting: Callable[[], bool]) -> None:
        """Go on only while `resting()`."""
        self._resting = resting

    def _run(self, first: bool) -> None:
        while self._resting is None:
            if not self._populate_next():
                return
        if not first:
            return
        with contextlib.suppress(OSError, AttributeError):  # elsewhere than on Linux priorities are a process's
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while True:
            while not self._resting():
                time.sleep(_LOOK_S)
            if not self._populate_next():
                return

    def _populate_next(self) -> bool:
        """False at the end."""
        with self._lock:
            piece = next(self._slices, None)
        if piece is None:
            return False
        if not self._advise(*piece):
            log.debug("the system cannot populate memory ahead")
            return False
        return True


def _slices(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Addresses and lengths of all whole huge pages: the first of each tensor, then the second of each."""
    regions = []
    for tensor in tensors:
        begin = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        regions.append(range(begin, tensor.data_ptr() + tensor.nbytes - HUGE_PAGE + 1, HUGE_PAGE))
    for row in itertools.zip_longest(*regions):
        yield from ((begin, HUGE_PAGE) for begin in row if begin is not None)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
