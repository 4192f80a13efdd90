"""What a process does about its memory once it has loaded."""

import ctypes
import gc

COLLECT_AFTER = 20_000  # new objects: with Python's 700, looking for cycles took a sixth of the gateway's time


def settle_memory() -> None:
    """After loading, of which much is freed again: have glibc hand back what is free, also between blocks in use and in
    the heaps of other threads, where it would stay (elsewhere this does nothing). What is left stays: the garbage
    collector does not look at it again, and looks at what requests leave behind, in which cycles are rare, less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
