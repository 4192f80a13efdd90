"""The kernels for Arm's products of bfloat16 are held to their tests in an emulation of those instructions."""

import pytest

from tests.helpers_native import check_emulated
from tests.worker.test_cpu_build import needs_compiler
from worker_proc.cpu.features import cpu_features


@needs_compiler
@pytest.mark.skipif(cpu_features().has("armbf16"), reason="the processor's own instructions are tested")
def test_the_kernels_for_arm_pass_their_tests() -> None:
    names = (
        "cpu_compressed",
        "cpu_decoder",
        "cpu_linear",
        "delta_net",
        "hybrid_decoder",
        "quantized_linear",
        "short_conv",
        "state_space",
    )
    check_emulated("--emulate-arm", "armbf16", names)
