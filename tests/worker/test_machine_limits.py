"""The yardstick of the benchmarks: what the machine can do, by loops of the kernels' own instructions."""

from typing import cast

import pytest

from bench.limits import limits
from tests.emulated_avx_vnni import with_avx_vnni
from tests.worker.test_cpu_build import needs_compiler
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.linear import Format
from worker_proc.cpu.matrices import MatrixForm
from worker_proc.cpu.memory import HugePages
from worker_proc.quantization.scheme import W8A8, Scheme

pytestmark = needs_compiler


@pytest.mark.parametrize("kernels", [*cpu_features().levels(), "avx_vnni"])
def test_operations_are_counted(kernels: str) -> None:
    """By all threads; bytes twice as many, where they are multiplied as such."""
    native = with_avx_vnni() if kernels == "avx_vnni" else load_library(cast(Level, kernels))
    for threads in (1, 2):
        native.set_threads(threads)
        in_float = native.functions.rhizome_multiply(3)
        assert in_float == 3 * threads * 2 * 32 * 32 * 256
        in_bytes = native.functions.rhizome_multiply_bytes(3)
        assert in_bytes == (2 * in_float if native.knows(Format.INT4_SEGMENTS) or kernels == "amx" else 0)
    native.set_threads(1)


def test_a_line_is_handed_over_there_and_back() -> None:
    assert load_library(cpu_features().levels()[0]).functions.rhizome_hand_over(7) == 14


def test_the_floor_of_a_product_is_that_of_its_bytes_or_its_numbers() -> None:
    native = load_library(cpu_features().levels()[0])
    most = limits(native)
    assert most.bandwidth > 0 and most.operations > 0
    assert f"cores {most.hand_over * 1e9:.0f} ns apart" in str(most)
    for scheme in (None, Scheme(8), W8A8, Scheme(4, 32)):
        form = MatrixForm(64, 1024, scheme)
        matrix = form.make(native, HugePages(form.room()))
        assert most.product(matrix, 1e-9) == matrix.nbytes / most.bandwidth
        operations = 2 * 64 * 1024 * 1e9 / most.product(matrix, 1e9)
        rate = most.operations
        if scheme == W8A8 and native.exact(Format.INT8_BOTH):
            rate = most.with_bytes
        elif scheme == Scheme(8) and native.exact(Format.INT8_CHANNEL):
            rate = most.with_bytes / 2
        assert operations == pytest.approx(rate)
