"""Which instruction sets the kernels may use on this CPU."""

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

Level = Literal["amx", "avx512bf16", "armbf16", "avx512", "generic"]
LEVELS: tuple[Level, ...] = get_args(Level)  # best first

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
_NEEDS: dict[Level, tuple[str, ...]] = {
    "amx": (*_AVX512, "avx512_bf16", "avx512_vbmi2", "amx_tile", "amx_bf16", "amx_int8"),
    "avx512bf16": (*_AVX512, "avx512_bf16"),
    "armbf16": ("bf16",),
    "avx512": _AVX512,
    "generic": (),
}
# the kernel's names for CPU features (/proc/cpuinfo) and the compilers' options for them, in the order of levels
_OPTIONS = {
    "avx2": "-mavx2",
    "fma": "-mfma",
    "f16c": "-mf16c",
    "avx_vnni": "-mavxvnni",
    "avx512f": "-mavx512f",
    "avx512bw": "-mavx512bw",
    "avx512dq": "-mavx512dq",
    "avx512vl": "-mavx512vl",
    "avx512_vnni": "-mavx512vnni",
    "avx512_bf16": "-mavx512bf16",
    "avx512vbmi": "-mavx512vbmi",
    "avx512_vbmi2": "-mavx512vbmi2",
    "amx_tile": "-mamx-tile",
    "amx_bf16": "-mamx-bf16",
    "amx_int8": "-mamx-int8",
    "bf16": "-march=armv8.2-a+bf16",  # Arm's name
}


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """`machine` as in `uname -m`, and the features that Linux reports, empty where they are not known."""

    machine: str
    flags: frozenset[str]

    def has(self, level: Level) -> bool:
        """Whether the CPU can run kernels of this level. Every CPU runs "generic"."""
        return self.flags.issuperset(_NEEDS[level])

    def levels(self) -> tuple[Level, ...]:
        """The levels that this CPU can run, best first."""
        return tuple(level for level in LEVELS if self.has(level))

    def options(self, level: Level) -> tuple[str, ...]:
        """Compiler options for `level`: nothing above it, so that a forced level is what a lesser CPU would run."""
        names = tuple(_OPTIONS)
        first_above = {"generic": "avx512f", "avx512": "avx512_bf16", "avx512bf16": "amx_tile"}.get(level)
        wanted = names[: names.index(first_above)] if first_above is not None else names
        return tuple(_OPTIONS[flag] for flag in wanted if flag in self.flags)


@cache
def cpu_features() -> CpuFeatures:
    return CpuFeatures(platform.machine().lower(), _flags(Path("/proc/cpuinfo")))


def _flags(cpuinfo: Path) -> frozenset[str]:
    try:
        text = cpuinfo.read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(values.split())
    return frozenset()
