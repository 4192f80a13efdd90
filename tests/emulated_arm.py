"""The kernels for Arm's products of bfloat16 on any processor: `pytest --emulate-arm`, see `native/arm/arm_neon.h`.

Everything is compiled for vectors of four numbers, as on Arm, by the compiler's own means.
"""

import hashlib
from pathlib import Path

from worker_proc.cpu import features

HEADERS = Path(__file__).parent / "native" / "arm"


def emulate_arm() -> None:
    """From here on this process's CPU has Arm's products of bfloat16, and nothing else. Before anything else asks for
    its features."""
    # defined as a hash of the header: another one makes another library
    digest = hashlib.sha256((HEADERS / "arm_neon.h").read_bytes()).hexdigest()[:8]
    features._OPTIONS["bf16"] = "-D__ARM_FEATURE_BF16_VECTOR_ARITHMETIC=1"
    emulated = features.CpuFeatures(features.cpu_features().machine, frozenset({"bf16"}))
    options = features.CpuFeatures.options

    def with_header(self: features.CpuFeatures, level: features.Level) -> tuple[str, ...]:
        return (*options(self, level), f"-I{HEADERS}", f"-D__ARM_NEON=0x{digest}")

    features.CpuFeatures.options = with_header  # type: ignore[method-assign]
    features.cpu_features = lambda: emulated
