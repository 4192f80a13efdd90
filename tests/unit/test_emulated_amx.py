"""Where there is no AMX, its kernels are held to their own tests in an emulation with the same bits."""

import pytest

from tests.emulated_amx import AVX512
from tests.helpers_native import check_emulated
from worker_proc.cpu.features import cpu_features

FILES = (
    "cpu_attention", "cpu_compressed", "cpu_decoder", "cpu_linear", "native_draws", "native_logprobs",
    "quantized_linear", "quantized_models",
)  # fmt: skip

pytestmark = [
    pytest.mark.skipif(cpu_features().has("amx"), reason="the processor's own AMX is tested"),
    pytest.mark.skipif(not cpu_features().flags >= AVX512, reason="to emulate AVX512 too takes too long"),
]


def test_the_kernels_for_amx_pass_their_tests() -> None:
    check_emulated("--emulate-amx", "amx", FILES)
