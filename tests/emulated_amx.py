"""The kernels for AMX and AVX512 on processors without them: `pytest --emulate-amx`, see `native/emulated_amx.h` and
`native/emulated_avx512.h`."""

import hashlib
from pathlib import Path

import pytest

from worker_proc.cpu import features

HEADERS = Path(__file__).parent / "native"
AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
AVX512 = frozenset(features._NEEDS["amx"]) - AMX
NEEDS = frozenset({"avx2", "fma", "f16c"})  # emulate what else there is


def emulate_amx() -> None:
    """From here on this process's CPU has AMX, and AVX512 for it. Before anything else asks for its features."""
    real = features.cpu_features()
    if not real.flags >= NEEDS:
        raise pytest.UsageError(f"--emulate-amx: the processor lacks {', '.join(sorted(NEEDS - real.flags))}")
    options = {
        "amx_tile": _include("emulated_amx.h"),
        "amx_bf16": _name("RHIZOME_EMULATED_AMX", "emulated_amx.h"),
        "amx_int8": "-DRHIZOME_EMULATED_AMX_INT8",
    }
    if not real.flags >= AVX512:
        options |= {
            "avx512f": _include("emulated_avx512.h"),
            "avx512bw": _name("RHIZOME_EMULATED_AVX512", "emulated_avx512.h"),
            "avx512dq": "-Wno-psabi",  # vectors that no register holds are passed in memory
            "avx512vl": "-Wno-psabi",
            "avx512_vnni": "-DRHIZOME_EMULATED_VNNI",
            "avx512_bf16": "-DRHIZOME_EMULATED_BF16",
            "avx512_vbmi2": "-DRHIZOME_EMULATED_VBMI2",
        }
    emulated = features.CpuFeatures(real.machine, real.flags | AVX512 | AMX | {"avx512_vnni"})
    features._OPTIONS.update(options)
    features.cpu_features = lambda: emulated


def _include(header: str) -> str:
    return f"-include{HEADERS / header}"


def _name(macro: str, header: str) -> str:
    """Defined as a hash of the header: another one makes another library."""
    return f"-D{macro}=0x{hashlib.sha256((HEADERS / header).read_bytes()).hexdigest()[:8]}"
