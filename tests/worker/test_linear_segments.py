"""Products of codes in groups with rows rounded to int8 (`native/linear_task_segments.h`) against numpy."""

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.emulated_avx_vnni import with_avx_vnni, without_avx_vnni
from tests.helpers_codes import Q4_0, Q4_K, Q8_0, ROWS, SIZES, packed, random, random_rows, rounded_format
from tests.worker.test_cpu_build import needs_compiler
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import NativeLibrary, load_library
from worker_proc.cpu.linear import Finish, Format
from worker_proc.cpu.quantized import QuantizedMatrix
from worker_proc.quantization.rows import QuantizedRows, floating_numbers
from worker_proc.quantization.scheme import MXFP4, Scheme

pytestmark = needs_compiler
LEVELS = cpu_features().levels()
SCHEMES = [
    Scheme(bits, size, symmetric, ordered=ordered, dynamic=True)
    for bits, size, symmetric, ordered in (
        (4, 32, True, False),
        (4, 64, False, False),
        (4, 128, True, False),
        (4, 128, False, False),
        (4, 128, True, True),
        (4, 256, True, False),
        (4, 512, False, False),
        (4, None, True, False),
        (8, 32, True, False),
        (8, 128, False, True),
        (8, None, False, False),
    )
] + [
    replace(Q4_0, dynamic=True),
    replace(Q8_0, dynamic=True),
    replace(Q4_K, dynamic=True),
    replace(MXFP4, dynamic=True),
    Scheme(4, 128, floating=True, dynamic=True),
]
OTHER_SEGMENTS = Scheme(4, 96, dynamic=True)  # groups that 256 inputs cut


# Sets that multiply bytes; of AVX2's, one with dot products of them and one without.
ROUNDING = [level for level in LEVELS if level not in ("amx", "armbf16", "generic")] + ["avx_vnni", "avx2"]


def library(kernels: str) -> NativeLibrary:
    """Instructions of AVX-VNNI are emulated where the processor lacks them."""
    if kernels == "avx_vnni":
        native = with_avx_vnni()
    else:
        native = without_avx_vnni() if kernels == "avx2" else load_library(cast(Level, kernels))
    if not native.knows(Format.INT4_SEGMENTS):
        pytest.skip("the CPU has no such instructions")
    return native


def known(native: NativeLibrary) -> st.SearchStrategy[Scheme]:
    return st.sampled_from([scheme for scheme in SCHEMES if native.knows(rounded_format(scheme))])


def matrix_of(native: NativeLibrary, rows: QuantizedRows) -> QuantizedMatrix:
    return packed(LEVELS[0], rows, native=native)


def product(matrix: QuantizedMatrix, x: Tensor) -> Tensor:
    return matrix.linear(x, Finish.STORE_FLOAT, torch.full((len(x), matrix.outputs), torch.nan))


def wanted(rows: QuantizedRows, x: Tensor) -> Tensor:
    """Segment by segment: whole numbers, exact, times a scale, added with one rounding: in long double, whose 64 bits
    hold products of float32."""
    numbers, x = rows.codes.long(), x if rows.order is None else x[:, rows.order]
    scales, middle = rows.scales, np.float32(rows.scheme.middle)
    if rows.scheme.floating:  # of FP4: whole numbers are twice as large
        numbers, scales = (2 * floating_numbers(rows.scheme, rows.codes)).long(), scales / 2
    codes, size = numbers.numpy(), rows.scheme.group_size or x.shape[1]
    step = min(size, 256)
    total = np.zeros((len(x), len(codes)), np.float32)
    for begin in range(0, x.shape[1], step):
        part = x[:, begin : begin + step].float().numpy()
        largest = np.abs(part).max(axis=1, keepdims=True)
        counts = largest >= np.float32(1e-30)
        factor = np.where(counts, np.float32(127) / np.where(counts, largest, 1), 0).astype(np.float32)
        unit = np.where(counts, largest / np.float32(127), 0).astype(np.float32)
        fixed = np.rint(part * factor).astype(np.int64)
        # whole numbers far below 2**53: exact in float64, whose products are not a loop
        sums = (fixed.astype(float) @ codes[:, begin : begin + step].T.astype(float)).astype(np.longdouble)
        zeros = middle if rows.zeros is None else rows.zeros[:, begin // size].numpy()
        scale = scales[:, begin // size].numpy()
        if rows.factors is not None:  # and what is to be subtracted, not a zero
            scale, least = (of[:, begin // size].numpy() for of in rows.factors.products())
            sums, scale, zeros = (sums.astype(np.float32) * scale).astype(np.longdouble), np.float32(1), -least
        sums = (sums - fixed.sum(axis=1, keepdims=True) * np.longdouble(1) * zeros).astype(np.float32)
        scale = scale * unit
        total = (sums.astype(np.longdouble) * scale + total).astype(np.float32)
    return torch.from_numpy(total)


@pytest.mark.parametrize("kernels", ROUNDING)
@settings(max_examples=80, deadline=None)
@given(data=st.data(), rows=ROWS, outputs=SIZES, inputs=SIZES, threads=st.integers(1, 3), seed=st.integers(0, 99))
def test_sums_are_what_is_promised_to_the_last_bit(
    kernels: str, data: st.DataObject, rows: int, outputs: int, inputs: int, threads: int, seed: int
) -> None:
    native = library(kernels)
    scheme = data.draw(known(native))
    native.set_threads(threads)
    weights, x = random_rows(outputs, inputs, scheme, seed), random(rows, inputs, seed=seed + 1)
    matrix = matrix_of(native, weights)
    assert matrix.struct.format == rounded_format(scheme)
    got = product(matrix, x)
    assert torch.equal(got, wanted(weights, x))
    numbers = weights.dequantize(torch.float32).double()
    most = x.double().abs().amax(dim=1, keepdim=True) / 253 * numbers.abs().sum(dim=1)  # half of a step for each number
    assert bool(((got - x.double() @ numbers.t()).abs() <= most).all())
    before = random(rows, outputs, seed=seed + 3).float()
    assert torch.equal(matrix.linear(x, Finish.ADD, before.clone()), got + before)
    outputs_of = torch.tensor([outputs - 1, 0, outputs // 2])
    assert torch.equal(matrix.unpack(outputs_of), weights.dequantize(torch.bfloat16)[outputs_of])
    native.set_threads(1)


@pytest.mark.parametrize("kernels", ROUNDING)
@given(data=st.data(), counts=st.lists(st.integers(1, 45), min_size=2, max_size=4), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_row_has_the_same_bits_in_any_batch(kernels: str, data: st.DataObject, counts: list[int], seed: int) -> None:
    """However many rows a pass takes, and whether codes are widened before."""
    native = library(kernels)
    x = random(sum(counts), 1344, seed=seed)
    matrix = matrix_of(native, random_rows(70, 1344, data.draw(known(native)), seed))
    whole = product(matrix, x)
    assert torch.equal(torch.cat([product(matrix, part) for part in x.split(counts)]), whole)


@pytest.mark.parametrize("kernels", ROUNDING)
def test_a_large_number_costs_its_own_segment_precision(kernels: str) -> None:
    """As in models whose activations have outliers: per row, everything else would become 0."""
    scheme, x = Scheme(4, 128, dynamic=True), random(5, 512, seed=1)
    weights = random_rows(64, 512, scheme, 2)
    weights.codes[:, 7] = 8  # what the large number is multiplied with: nothing
    x[:, 7] = 3000.0
    exact = x.double() @ weights.dequantize(torch.float32).double().t()
    got = product(matrix_of(library(kernels), weights), x)
    assert float((got - exact).norm() / exact.norm()) < 0.55
    others = torch.arange(512) >= 128
    x[:, ~others] = 0
    exact = x.double() @ weights.dequantize(torch.float32).double().t()
    got = product(matrix_of(library(kernels), weights), x)
    assert float((got - exact).norm() / exact.norm()) < 0.01


@pytest.mark.parametrize("kernels", ROUNDING)
@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=str)
def test_what_is_not_finite_stays_in_its_row(kernels: str, scheme: Scheme) -> None:
    matrix, x = matrix_of(library(kernels), random_rows(40, 320, scheme, 1)), random(9, 320, seed=2)
    want = product(matrix, x)
    x[2, 300], x[5, 3], x[8] = torch.inf, torch.nan, 0
    got = product(matrix, x)
    assert not bool(got[[2, 5]].isfinite().any()) and torch.equal(got[8], torch.zeros(40))
    others = [0, 1, 3, 4, 6, 7]
    assert torch.equal(got[others], want[others])


@pytest.mark.parametrize("kernels", ROUNDING)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_largest_sums_are_exact(kernels: str, scheme: Scheme) -> None:
    """All codes and all numbers of x at the ends of their ranges."""
    native = library(kernels)
    if not native.knows(rounded_format(scheme)):
        pytest.skip("these kernels do not round activations for such codes")
    weights, x = random_rows(64, 512, scheme, 3), torch.ones(4, 512, dtype=torch.bfloat16)
    weights.codes[:] = torch.tensor([7, 15] if scheme.floating else [0, 2**scheme.bits - 1]).repeat_interleave(32)[
        :, None
    ]
    x[1] = -1
    x[2, ::2] = -1
    x[3, ::4] = x[3, 1::4] = -1
    assert torch.equal(product(matrix_of(native, weights), x), wanted(weights, x))


@pytest.mark.parametrize("kernels", ROUNDING)
def test_numbers_of_any_size_stand_beside_each_other(kernels: str) -> None:
    """The smallest that count and the largest of bfloat16, in segments and rows of their own."""
    scheme = Scheme(4, 64, dynamic=True)
    weights, x = random_rows(33, 256, scheme, 3), random(4, 256, seed=4)
    for segment, size in enumerate((1e-38, 1e-29, 1.0, 1e30)):
        x[:, 64 * segment : 64 * segment + 64] *= size
    x[1] = torch.where(x[1].abs() > 1, 0, x[1])
    assert torch.equal(product(matrix_of(library(kernels), weights), x), wanted(weights, x))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scheme", [SCHEMES[1], SCHEMES[2], SCHEMES[8], SCHEMES[-2], OTHER_SEGMENTS], ids=str)
def test_elsewhere_activations_are_not_rounded(level: Level, scheme: Scheme) -> None:
    """Where the kernels have no products of bytes, or groups no whole segments, results are those of int4 or int8."""
    weights, x = random_rows(70, 300, scheme, 5), random(21, 300, seed=6)
    matrix = packed(level, weights)
    rounds = load_library(level).knows(rounded_format(scheme)) and scheme is not OTHER_SEGMENTS
    otherwise = Format.FLOAT4 if scheme.floating else Format.INT4 if scheme.bits == 4 else Format.INT8
    assert matrix.struct.format == (rounded_format(scheme) if rounds else otherwise)
    plain = packed(level, replace(weights, scheme=replace(scheme, dynamic=False)))
    assert torch.equal(product(matrix, x), product(plain, x)) != rounds
