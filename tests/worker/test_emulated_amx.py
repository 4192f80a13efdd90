"""Where there is no AMX, its kernels are held to their own tests in an emulation with the same bits."""

import re

import pytest

from tests.emulated_amx import AVX512, HEADERS
from tests.helpers_native import check_emulated
from worker_proc.cpu.build import SOURCES
from worker_proc.cpu.features import cpu_features

FILES = (
    "cpu_attention", "cpu_attention_not_finite", "cpu_compressed", "cpu_decoder", "cpu_linear", "native_draws",
    "delta_net", "state_space", "native_logprobs", "quantized_linear", "quantized_models", "head_screen",
    "filtered_logits", "hybrid_decoder",
)  # fmt: skip


@pytest.mark.skipif(cpu_features().has("amx"), reason="the processor's own AMX is tested")
@pytest.mark.skipif(not cpu_features().flags >= AVX512, reason="to emulate AVX512 too takes too long")
def test_the_kernels_for_amx_pass_their_tests() -> None:
    check_emulated("--emulate-amx", "amx", FILES)


def test_what_the_kernels_use_of_avx512_is_emulated() -> None:
    """Those who write kernels on processors with AVX512 would not notice."""
    used = {name for file in SOURCES.iterdir() for name in re.findall(r"\b_mm512_\w+", file.read_text())}
    emulated = set(re.findall(r"#define (_mm512_\w+)", (HEADERS / "emulated_avx512.h").read_text()))
    assert len(used) > 50 and not used - emulated
