"""The kernels for AMX on processors without it: `pytest --emulate-amx`, see `native/emulated_amx.h`."""

import hashlib
from pathlib import Path

import pytest

from worker_proc.cpu import features

HEADER = Path(__file__).parent / "native" / "emulated_amx.h"
AMX = frozenset({"amx_tile", "amx_bf16"})
NEEDS = frozenset(features._NEEDS["amx"]) - AMX


def emulate_amx() -> None:
    """From here on this process's CPU has AMX. To be called before anything else asks for its features."""
    real = features.cpu_features()
    if not real.flags >= NEEDS:
        lacking = ", ".join(sorted(NEEDS - real.flags))
        raise pytest.UsageError(f"--emulate-amx: the processor lacks {lacking}")
    emulated = features.CpuFeatures(real.machine, real.flags | AMX)
    digest = hashlib.sha256(HEADER.read_bytes()).hexdigest()  # so that another header makes another library
    options = {"amx_tile": f"-include{HEADER}", "amx_bf16": f"-DRHIZOME_EMULATED_AMX=0x{digest[:8]}"}
    features._OPTIONS.update(options)
    features.cpu_features = lambda: emulated
