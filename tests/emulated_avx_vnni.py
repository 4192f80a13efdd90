"""The generic kernels with AVX-VNNI on processors without it: see `native/emulated_avx_vnni.h`."""

import hashlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

from worker_proc.cpu import features
from worker_proc.cpu.library import NativeLibrary, load_library

_HEADER = Path(__file__).parent / "native" / "emulated_avx_vnni.h"


@cache
def with_avx_vnni() -> NativeLibrary:
    """The generic level, with AVX-VNNI wherever there is AVX2."""
    real = features.cpu_features()
    if not real.flags >= {"avx2", "fma"} or "avx_vnni" in real.flags:
        return load_library("generic")
    header = f"header {hashlib.sha256(_HEADER.read_bytes()).hexdigest()}"  # another one makes another library
    with mock.patch.dict(features._OPTIONS, {"avx_vnni": f"-include{_HEADER}"}):
        return NativeLibrary("generic", replace(real, flags=real.flags | {"avx_vnni", header}))


@cache
def without_avx_vnni() -> NativeLibrary:
    """The generic level of a processor without AVX-VNNI."""
    real = features.cpu_features()
    return NativeLibrary("generic", replace(real, flags=real.flags - {"avx_vnni"}))
