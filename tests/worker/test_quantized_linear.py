"""Products with quantized weights against torch, for every instruction set of this CPU."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.emulated_avx_vnni import with_avx_vnni, without_avx_vnni
from tests.helpers_codes import (
    INTEGERS,
    Q4_0,
    Q4_K,
    Q8_0,
    ROUNDED,
    ROWS,
    SCHEMES,
    SIZES,
    in_integers,
    int8_rows,
    integer_sums,
    multiplied,
    packed,
    random,
    random_rows,
    rounds,
    scaled_sums,
    schemes,
    widened,
    without_nan,
)
from tests.helpers_native import check_bits_in_any_batch
from tests.worker.test_cpu_build import needs_compiler
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import NativeLibrary, load_library
from worker_proc.cpu.linear import Finish
from worker_proc.cpu.memory import HugePages
from worker_proc.cpu.quantized import CodeSizes, NativeQuantizer, QuantizedMatrix, keeps_scales
from worker_proc.errors import ModelError
from worker_proc.quantization.rows import QuantizedRows, QuantizedWeight, quantize_rows
from worker_proc.quantization.scheme import FP8, MXFP4, W8A8, ScaleForm, Scheme

pytestmark = needs_compiler
LEVELS = cpu_features().levels()
CUT = [
    Scheme(4, 96),
    Scheme(4, 96, symmetric=False),
    Scheme(4),
    Q4_K,
    Scheme(8, 96),
    Scheme(8, 96, symmetric=False),
    Scheme(8, 96, floating=True),
    FP8,
]
BYTES = [Scheme(8), Scheme(8, 32), Scheme(8, 128, symmetric=False), FP8, Scheme(8, 128, floating=True)]


def known(level: Level) -> st.SearchStrategy[Scheme]:
    """All schemes, and those whose scales these kernels take in other forms."""
    forms = [one for one in (Q4_0, Q8_0, Q4_K) if keeps_scales(load_library(level), one)]
    return st.sampled_from([*SCHEMES, *forms])


def promised(level: Level, weights: QuantizedRows, x: Tensor) -> Tensor:
    """Those of a matrix of the widened weights, those of numbers times scales, or those in integers."""
    scheme = weights.scheme
    by_group = x if weights.order is None else x[:, weights.order].contiguous()
    plain = replace(weights, order=None)
    if in_integers(level, scheme):
        return integer_sums(level, plain, by_group)
    if not scheme.by_channel and not rounds(level, scheme):
        return scaled_sums(level, plain, by_group)
    units: Tensor | float = 1.0
    if scheme.dynamic:
        by_group, units = (part.float() for part in int8_rows(by_group))
        by_group = by_group.to(torch.bfloat16)
    room = torch.empty(len(x), len(weights.codes))
    want = widened(level, plain).linear(by_group, Finish.STORE_FLOAT, room) * units
    return want * weights.scales[:, 0] if scheme.by_channel else want


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=80, deadline=None)
@given(data=st.data(), rows=ROWS, outputs=SIZES, inputs=SIZES, threads=st.integers(1, 3), seed=st.integers(0, 99))
def test_sums_are_what_is_promised_to_the_last_bit(
    level: Level, data: st.DataObject, rows: int, outputs: int, inputs: int, threads: int, seed: int
) -> None:
    scheme = data.draw(known(level))
    load_library(level).set_threads(threads)
    weights, x = random_rows(outputs, inputs, scheme, seed), random(rows, inputs, seed=seed + 1)
    matrix = packed(level, weights)
    want = promised(level, weights, x)
    got = matrix.linear(x, Finish.STORE_FLOAT, torch.full((rows, outputs), torch.nan))
    assert torch.equal(got, want)
    near = F.linear(multiplied(scheme, x), weights.dequantize(torch.float32).double())
    torch.testing.assert_close(got.double(), near, rtol=0, atol=float(0.02 * near.abs().max() + 1e-6))
    before = random(rows, outputs, seed=seed + 3).float()
    assert torch.equal(matrix.linear(x, Finish.ADD, before.clone()), want + before)
    index, best = matrix.argmax(x)
    assert torch.equal(best, got.max(dim=1).values)
    assert torch.equal(index, (got == best[:, None]).int().argmax(dim=1)), "the first of equal ones"
    wanted = torch.tensor([outputs - 1, 0, outputs // 2])
    assert torch.equal(matrix.unpack(wanted), weights.dequantize(torch.bfloat16)[wanted])
    load_library(level).set_threads(1)


@pytest.mark.parametrize("rows", [1, 11, 45])
@pytest.mark.parametrize("scheme", CUT, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_sums_of_groups_are_cut_alike_however_inputs_are(level: Level, scheme: Scheme, rows: int) -> None:
    """Few rows take pieces of 1,024 inputs, more 256, and many inputs come in parts: groups may be cut by either."""
    scheme = scheme if keeps_scales(load_library(level), scheme) else replace(scheme, scale_form=ScaleForm.FLOAT32)
    weights, x = random_rows(40, 2080, scheme, 1), random(rows, 2080, seed=2)
    got = packed(level, weights).linear(x, Finish.STORE_FLOAT, torch.empty(rows, 40))
    assert torch.equal(got, promised(level, weights, x))


@pytest.mark.parametrize("scheme", [MXFP4, Scheme(4, 64)], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_two_codes_of_a_byte_are_packed_as_two(level: Level, scheme: Scheme) -> None:
    rows = random_rows(70, 160, scheme, 1)
    both = rows.codes[:, ::2] | rows.codes[:, 1::2] << 4
    halved = replace(rows, codes=both, halved=True)
    assert torch.equal(halved.whole().codes, rows.codes)
    assert torch.equal(packed(level, halved).memory, packed(level, rows).memory)
    some, want = (one.select((3, 40), (32, 128)) for one in (halved, rows))
    assert torch.equal(some.dequantize(torch.float32), want.dequantize(torch.float32))


@pytest.mark.parametrize("level", LEVELS)
def test_forms_of_scales_that_no_kernel_takes_are_refused(level: Level) -> None:
    """Factors are of 4 bits, or of segments."""
    native, scheme = load_library(level), Scheme(8, 32, False, scale_form=ScaleForm.FACTORS)
    with pytest.raises(ValueError, match="scales in float32"):
        QuantizedMatrix(native, HugePages(CodeSizes.of(40, 256, scheme).room()), 40, 256, scheme)


@pytest.mark.parametrize("level", LEVELS)
def test_scales_of_fp4_are_powers_of_two(level: Level) -> None:
    """From the least that counts to the largest; a weight is what it stands for."""
    exponents = torch.arange(-127, 128).float()
    scales = torch.ldexp(torch.ones(255), exponents.int())[:, None].clone()
    rows = QuantizedRows(MXFP4, torch.arange(16, dtype=torch.uint8).repeat(255, 2), scales)
    got, want = packed(level, rows).unpack(torch.arange(255)), rows.dequantize(torch.bfloat16)
    assert torch.equal(got[2:], want[2:])
    assert not got[:2].any() and float(want[:2].abs().max()) < 2.0**-122
    for wrong in (3.0, -1.0):
        with pytest.raises(ValueError, match="powers of two"):
            packed(level, replace(rows, scales=scales * wrong))


@pytest.mark.parametrize("scheme", [Scheme(4, 96, symmetric=False), Scheme(8, 32, symmetric=False)], ids=str)
def test_zeros_are_whole_where_sums_would_not_be_exact(scheme: Scheme) -> None:
    rows = random_rows(40, 96, scheme, 1)
    assert rows.zeros is not None
    packed(LEVELS[0], rows)
    with pytest.raises(ValueError, match="whole numbers, except for 4 bits in groups up to 64"):
        packed(LEVELS[0], replace(rows, zeros=rows.zeros + 0.5))


@pytest.mark.skipif("avx2" not in cpu_features().flags, reason="nor can the CPU emulate it")
@pytest.mark.parametrize("scheme", [*INTEGERS, W8A8], ids=str)
def test_products_without_avx_vnni_are_the_same(scheme: Scheme) -> None:
    """As with it, which is emulated where the CPU has no such instruction."""
    without = without_avx_vnni()
    for outputs, inputs, rows in ((70, 640, 1), (33, 256, 5), (64, 320, 40)):
        weights, x = random_rows(outputs, inputs, scheme, outputs), random(rows, inputs, seed=rows)
        memory = HugePages(CodeSizes.of(outputs, inputs, scheme).room())
        matrix = QuantizedMatrix(without, memory, outputs, inputs, scheme)
        matrix.pack_rows(weights, 0)
        got = matrix.linear(x, Finish.STORE_FLOAT, torch.empty(rows, outputs))
        having = packed("generic", weights, native=with_avx_vnni())
        want = having.linear(x, Finish.STORE_FLOAT, torch.empty(rows, outputs))
        assert torch.equal(got, want) or scheme.dynamic
        torch.testing.assert_close(got, want, rtol=0, atol=float(want.abs().max()) * 2**-20)  # summed up otherwise


@pytest.mark.skipif(not cpu_features().flags >= {"avx512_bf16", "avx512vbmi"}, reason="the CPU has one way alone")
@pytest.mark.parametrize("scheme", BYTES, ids=str)
def test_products_without_look_ups_of_bytes_are_the_same(scheme: Scheme) -> None:
    """Processors with dot products of bfloat16 and without AVX512-VBMI (Cooper Lake) convert codes."""
    features = cpu_features()
    without = NativeLibrary("avx512bf16", replace(features, flags=features.flags - {"avx512vbmi"}))
    for outputs, inputs, rows in ((70, 640, 1), (33, 256, 5), (64, 320, 40)):
        weights, x = random_rows(outputs, inputs, scheme, outputs), random(rows, inputs, seed=rows)
        lacking, having = packed("avx512bf16", weights, native=without), packed("avx512bf16", weights)
        want = having.linear(x, Finish.STORE_FLOAT, torch.empty(rows, outputs))
        assert torch.equal(lacking.linear(x, Finish.STORE_FLOAT, torch.empty(rows, outputs)), want)
        assert torch.equal(lacking.memory, having.memory) == (scheme == Scheme(8)), "in another order"


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("scheme", ROUNDED, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_weights_are_rounded_to_the_nearest_even_bfloat16_or_not_at_all(
    level: Level, scheme: Scheme, rows: int
) -> None:
    """Scales whose weights lie halfway between two bfloat16 or next to it, and just below and above powers of two."""
    inputs = 64
    low = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    high = torch.tensor([0, 1, 2, 3, 0x3F, 0x40, 0x55, 0x6D, 0x7E, 0x7F])
    mantissas = (high[:, None] * 2**16 + low).flatten()
    outputs = len(mantissas)
    shape = (outputs, scheme.num_groups(inputs))
    scales = ((1 + mantissas.double() / 2**23) / 64).float()[:, None].expand(shape).clone()
    codes = torch.arange(outputs * inputs).view(outputs, inputs) * 37 % 2**scheme.bits
    codes = without_nan(codes, scheme)
    zeros = None if scheme.symmetric else torch.arange(outputs * shape[1]).view(shape).float() % 2**scheme.bits
    order = torch.arange(inputs).flip(0) if scheme.ordered else None
    weights = QuantizedRows(scheme, codes.to(torch.uint8), scales, zeros, order)
    matrix, found = packed(level, weights), torch.empty(inputs, outputs)
    for first in range(0, inputs, rows):  # rows that each take one input's weights
        x = torch.eye(inputs)[first : first + rows].to(torch.bfloat16)
        found[first : first + rows] = matrix.linear(x, Finish.STORE_FLOAT, torch.empty(len(x), outputs))
    precision = torch.bfloat16 if rounds(level, scheme) else torch.float32
    assert torch.equal(found.t(), weights.dequantize(precision).float())


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=40, deadline=None)
@given(
    scheme=schemes,
    rows=ROWS,
    channels=SIZES,
    inputs=SIZES,
    biased=st.booleans(),
    gelu=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gated_products_and_biases(
    level: Level, scheme: Scheme, rows: int, channels: int, inputs: int, biased: bool, gelu: bool, seed: int
) -> None:
    weights, x = random_rows(2 * channels, inputs, scheme, seed), random(rows, inputs, seed=seed + 1) / 4
    matrix = packed(level, weights, paired=True)
    bias = random(2 * channels, seed=seed + 2) if biased else torch.zeros(2 * channels)
    if biased:
        matrix.set_bias(bias)
    precision = torch.bfloat16 if rounds(level, scheme) else torch.float32
    gate, up = F.linear(multiplied(scheme, x), weights.dequantize(precision).double(), bias.double()).chunk(2, dim=1)
    finish = Finish.GELU_MUL if gelu else Finish.SILU_MUL
    got = matrix.linear(x, finish, torch.empty(rows, channels, dtype=torch.bfloat16))
    want = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    torch.testing.assert_close(got.double(), want, rtol=2**-6, atol=float(5e-3 * (want.abs().max() + 1)))


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=30, deadline=None)
@given(st.data(), SIZES, SIZES)
def test_a_row_has_the_same_bits_in_any_batch(level: Level, data: st.DataObject, outputs: int, inputs: int) -> None:
    scheme = data.draw(known(level))
    rows = data.draw(st.sampled_from([2, 17, 33, 64, 70, 513, 700]))
    matrix, x = packed(level, random_rows(outputs, inputs, scheme, 1)), random(rows, inputs, seed=2)
    check_bits_in_any_batch(level, matrix, x, outputs, data)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=40, deadline=None)
@given(scheme=schemes, rows=ROWS, outputs=SIZES, inputs=SIZES, spread=st.integers(0, 30), seed=st.integers(0, 99))
def test_numbers_of_any_size_stand_beside_each_other(
    level: Level, scheme: Scheme, rows: int, outputs: int, inputs: int, spread: int, seed: int
) -> None:
    """Inputs that differ by powers of two, as those of trained models do: the error is within that of rounding the
    largest ones of a row to bfloat16."""
    weights, x = random_rows(outputs, inputs, scheme, seed), random(rows, inputs, seed=seed + 1)
    generator = torch.Generator().manual_seed(seed + 2)
    x = (x * 2.0 ** torch.randint(-spread, spread + 1, x.shape, generator=generator)).to(torch.bfloat16)
    got = packed(level, weights).linear(x, Finish.STORE_FLOAT, torch.empty(rows, outputs))
    if in_integers(level, scheme):
        assert torch.equal(got, integer_sums(level, weights, x))
    dense = weights.dequantize(torch.float32).double()
    taken = multiplied(scheme, x)
    near, size = taken @ dense.t(), taken.abs() @ dense.abs().t()
    largest = x.double().abs().amax(dim=1, keepdim=True) * dense.abs().sum(dim=1)
    assert bool(((got.double() - near).abs() <= 2**-8 * size + 2**-14 * largest + 1e-30).all())


@pytest.mark.parametrize("scheme", [Scheme(8), W8A8], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_the_longest_sums_do_not_overflow(level: Level, scheme: Scheme) -> None:
    """As many inputs as a matrix may have, all at the ends of the ranges of codes and of fixed point."""
    inputs, ends = 2**16, torch.tensor([0, 1, 255], dtype=torch.uint8)
    weights = QuantizedRows(scheme, ends[:, None].expand(3, inputs).contiguous(), torch.full((3, 1), 2.0**-7))
    x = torch.tensor([1.9921875, -1.9921875, 1.984375, -1.0])[:, None].expand(4, inputs).to(torch.bfloat16).contiguous()
    got = packed(level, weights).linear(x, Finish.STORE_FLOAT, torch.empty(4, 3))
    near = multiplied(scheme, x) @ weights.dequantize(torch.float32).double().t()
    torch.testing.assert_close(got.double(), near, rtol=2**-14, atol=0)
    if in_integers(level, weights.scheme):
        assert torch.equal(got, integer_sums(level, weights, x))
    with pytest.raises(ModelError, match="up to 65536"):
        packed(level, random_rows(3, inputs + 1, scheme, 1))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scheme", [Scheme(8), W8A8, Scheme(4, 32, symmetric=False)], ids=str)
def test_what_is_not_finite_stays_in_its_row(level: Level, scheme: Scheme) -> None:
    weights, x = random_rows(40, 96, scheme, 1), random(9, 96, seed=2)
    matrix = packed(level, weights)
    want = matrix.linear(x, Finish.STORE_FLOAT, torch.empty(9, 40))
    x[2, 50], x[5, 3], x[8] = torch.inf, torch.nan, 0
    got = matrix.linear(x, Finish.STORE_FLOAT, torch.empty(9, 40))
    assert not bool(got[[2, 5]].isfinite().any()) and torch.equal(got[8], torch.zeros(40))
    others = [0, 1, 3, 4, 6, 7]
    assert torch.equal(got[others], want[others])


@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from(
        [
            Scheme(8),
            Scheme(8, 64),
            Scheme(4, 32),
            Scheme(4, 64),
            Scheme(4, 128),
            Scheme(4),
            FP8,
            Scheme(8, 64, floating=True),
        ]
    ),
    outputs=SIZES,
    inputs=SIZES,
    scale=st.sampled_from([1e-6, 0.02, 1.0, 3e4]),
    seed=st.integers(0, 99),
)
def test_codes_are_the_nearest(scheme: Scheme, outputs: int, inputs: int, scale: float, seed: int) -> None:
    rows = random(outputs, inputs, seed=seed) * scale
    rows[0, :] = 0
    quantized = quantize_rows(rows, scheme)
    assert quantized.codes.dtype == torch.uint8 and quantized.codes.shape == rows.shape
    assert quantized.scales.shape == (outputs, scheme.num_groups(inputs))
    back = quantized.dequantize(torch.float32)
    assert torch.equal(back[0], torch.zeros(inputs))
    size = scheme.group_size or inputs
    step = quantized.scales.abs().repeat_interleave(size, 1)[:, :inputs]
    # With 4 bits, the side that has 7 steps may lack up to one of them.
    limit = step * (0.5001 if scheme.bits == 8 else 1.0001)
    if scheme.floating:  # steps double at every power of two from 2**-6 on, where they are 2**-9
        at = rows.float().abs() / step.where(step != 0, 1)
        limit = step * 0.5001 * 2.0 ** (at.clamp(2.0**-6, 448).log2().floor() - 3)
    assert bool(((back - rows.float()).abs() <= limit).all())
    for level in LEVELS:
        for source in (rows, rows.float(), rows.t().contiguous().t()):
            native = NativeQuantizer(load_library(level))(source, scheme)
            assert torch.equal(native.codes, quantized.codes) and torch.equal(native.scales, quantized.scales)
    half = torch.where(quantized.codes == 2**scheme.bits - 1, limit, limit if scheme.floating else step * 0.5001)
    assert bool(((back - rows.float()).abs() <= half).all())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "scheme", [Scheme(8), W8A8, Scheme(8, 32), Scheme(4), Scheme(4, 32), Scheme(4, 32, dynamic=True), FP8], ids=str
)
def test_weights_that_are_not_numbers_show(scheme: Scheme, level: Level) -> None:
    """In sums, and as in torch in what codes and scales stand for: those of their group, at its begin and its end."""
    rows, x = random(5, 70, seed=1), random(9, 70, seed=2)
    rows[1, 3], rows[3, 69] = torch.nan, torch.nan
    for source in (rows, rows.float()):
        native = NativeQuantizer(load_library(level))(source, scheme)
        want = quantize_rows(source, scheme).dequantize(torch.float32)
        torch.testing.assert_close(native.dequantize(torch.float32), want, rtol=0, atol=0, equal_nan=True)
        sums = packed(level, native).linear(x, Finish.STORE_FLOAT, torch.empty(9, 5))
        assert bool(sums[:, [1, 3]].isnan().all()) and bool(sums[:, [0, 2, 4]].isfinite().all())


@pytest.mark.parametrize("level", LEVELS)
def test_fp8_is_rounded_to_nearest_even(level: Level) -> None:
    """Numbers of FP8, those halfway between two, and their neighbours, with a scale of 1."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (numbers[1:] + numbers[:-1]) / 2
    around = [numbers, halfway, halfway.nextafter(torch.tensor(0.0)), halfway.nextafter(torch.tensor(999.0))]
    row = torch.cat([*around, *(-some for some in around)])[None]
    want, got = quantize_rows(row, FP8), NativeQuantizer(load_library(level))(row, FP8)
    assert torch.equal(want.scales, torch.ones(1, 1)) and torch.equal(got.scales, want.scales)
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(got.codes[0, :127], torch.arange(127, dtype=torch.uint8))
    assert torch.equal(got.codes[0, 127:253] % 2, torch.zeros(126, dtype=torch.uint8)), "ties to even"


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_torch_matrix_holds_what_was_put_in(scheme: Scheme) -> None:
    rows = random_rows(10, 77, scheme, 3)
    weight = QuantizedWeight.empty(12, 77, scheme, torch.float32, torch.device("cpu"))
    weight.put(1, rows)
    assert torch.equal(weight.rows()[1:11], rows.dequantize(torch.float32))
    assert torch.equal(weight.rows(torch.tensor([4, 2])), rows.dequantize(torch.float32)[[3, 1]])
    assert torch.equal(weight.rows()[0], torch.zeros(77))


def test_columns_that_cut_a_group_are_refused() -> None:
    Scheme(4, 64).check_columns("w", (64, 100), 100)
    Scheme(4).check_columns("w", (50, 100), 100)
    with pytest.raises(ModelError, match=r"w = \[48, 96\]: .* group of 64"):
        Scheme(4, 64).check_columns("w", (48, 96), 96)
