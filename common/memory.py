"""Memory that glibc keeps although nobody uses it."""

import ctypes


def return_freed_memory() -> None:
    """Have glibc hand back what is free, also between blocks in use and in the heaps of other threads, where it would
    stay: after loading, of which much is freed again. Elsewhere this does nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
