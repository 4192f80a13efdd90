"""Matrices in random codes, and what products with them are, in torch: for tests of the native kernels."""

import itertools
from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests import helpers_native
from worker_proc.cpu.features import Level
from worker_proc.cpu.library import NativeLibrary, load_library
from worker_proc.cpu.linear import Finish, Format, PackedMatrix, Pairing
from worker_proc.cpu.memory import HugePages
from worker_proc.cpu.quantized import CodeSizes, QuantizedMatrix
from worker_proc.quantization.rows import FACTOR_GROUPS, QuantizedRows, ScaleFactors, floating_numbers, steps_of
from worker_proc.quantization.scheme import FP8, MXFP4, W8A8, ScaleForm, Scheme

SIZES = st.one_of(st.integers(1, 70), st.sampled_from([96, 127, 128, 129, 256, 300, 640]))
ROWS = st.one_of(st.integers(1, 70), st.sampled_from([96, 127, 128, 129, 200]))
Q4_0 = Scheme(4, 32, scale_form=ScaleForm.FLOAT16)
Q8_0 = Scheme(8, 32, scale_form=ScaleForm.FLOAT16)
Q4_K = Scheme(4, 32, False, scale_form=ScaleForm.FACTORS)
SCHEMES = [
    Scheme(8),
    W8A8,
    Scheme(8, 32),
    Scheme(8, None, symmetric=False),
    Scheme(4),
    Scheme(4, 32),
    Scheme(4, 64),
    Scheme(4, 128),
    Scheme(4, 32, symmetric=False),
    Scheme(4, 128, symmetric=False),
    Scheme(4, 96, symmetric=False),
    FP8,
    Scheme(8, 32, floating=True),
    Scheme(8, 128, floating=True),
    Scheme(4, 32, ordered=True),
    Scheme(4, 128, symmetric=False, ordered=True),
    Scheme(8, 64, ordered=True),
    MXFP4,
    Scheme(4, None, floating=True),
    Scheme(4, 128, floating=True),
]
# those whose weights may need more bits than bfloat16 has
ROUNDED = [one for one in SCHEMES if not one.by_channel and not (one.floating and one.bits == 4)]
schemes = st.sampled_from(SCHEMES)

INTEGERS = [Scheme(8), Scheme(8, 64, symmetric=False), Scheme(4, 32), Scheme(4, 128), MXFP4]


def without_nan(codes: Tensor, scheme: Scheme) -> Tensor:
    """Codes, of FP8 with others for 0x7f and 0xff."""
    return torch.where((codes & 127) == 127, codes - 60, codes) if scheme.floating and scheme.bits == 8 else codes


def random_rows(outputs: int, inputs: int, scheme: Scheme, seed: int) -> QuantizedRows:
    """Any codes, scales of both signs, but for FP4's powers of two, zeros that are codes or one beyond, or any in small
    groups of 4 bits."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**scheme.bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    codes = without_nan(codes, scheme)
    groups = scheme.num_groups(inputs)
    scales = torch.randn(outputs, groups, generator=generator) / (2 ** (scheme.bits - 1))
    if scheme.floating and scheme.bits == 4:
        scales = torch.exp2(torch.randint(-9, 2, scales.shape, generator=generator).float())
    order = torch.randperm(inputs, generator=generator) if scheme.ordered else None
    if scheme.scale_form == ScaleForm.FACTORS:
        large = torch.randn(outputs, -(-groups // FACTOR_GROUPS), 2, generator=generator).half() / 512
        small = torch.randint(0, 64, (outputs, groups, 2), generator=generator, dtype=torch.uint8)
        small *= torch.rand(small.shape, generator=generator) < 0.9
        factors = ScaleFactors(large, small)
        codes *= (factors.products()[0] != 0).repeat_interleave(32, 1)[:, :inputs]
        return QuantizedRows(scheme, codes, *steps_of(*factors.products()), order, factors=factors)
    if scheme.scale_form == ScaleForm.FLOAT16:
        scales = scales.half().float()
    zeros = None
    if not scheme.symmetric:
        zeros = torch.randint(0, 2**scheme.bits + 1, (outputs, groups), generator=generator).float()
        if any_zeros(scheme) and seed % 2:
            zeros = 50 * torch.randn(zeros.shape, generator=generator)
    return QuantizedRows(scheme, codes, scales, zeros, order)


def any_zeros(scheme: Scheme) -> bool:
    """Whether zeros need not be whole: 4-bit codes whose sums are exact in float32."""
    few = scheme.group_size is not None and scheme.group_size <= 64
    return few and scheme.bits == 4 and not scheme.symmetric


def packed(
    level: Level, rows: QuantizedRows, paired: bool = False, native: NativeLibrary | None = None
) -> QuantizedMatrix:
    outputs, inputs = len(rows.codes), rows.codes.shape[1] * (1 + rows.halved)
    memory = HugePages(CodeSizes.of(outputs, inputs, rows.scheme, paired=paired).room())
    matrix = QuantizedMatrix(native or load_library(level), memory, outputs, inputs, rows.scheme, paired=paired)
    half, cut = outputs // 2, outputs // 3
    everything = (0, inputs)
    if paired:
        matrix.pack_rows(rows.select((0, half), everything), 0, Pairing.GATE)
        matrix.pack_rows(rows.select((half, outputs), everything), 0, Pairing.UP)
    else:
        matrix.pack_rows(rows.select((0, cut), everything), 0)
        matrix.pack_rows(rows.select((cut, outputs), everything), cut)
    return matrix


def widened(level: Level, rows: QuantizedRows, paired: bool = False) -> PackedMatrix:
    """The bfloat16 matrix whose sums those of `rows` are, but for the scales of whole channels."""
    weight = rows.dequantize(torch.bfloat16)
    if rows.scheme.by_channel:
        ones = replace(rows, scales=torch.ones_like(rows.scales))
        weight = ones.dequantize(torch.bfloat16)
    return helpers_native.packed(level, weight, paired)


def segments(scheme: Scheme, inputs: int) -> list[tuple[int, int, int]]:
    """Begin, end and group of what is added up before it is scaled: up to 256 inputs of a group."""
    size = scheme.group_size or inputs
    edges = sorted({*range(0, inputs, 256), *range(0, inputs, size), inputs})
    return [(begin, end, begin // size) for begin, end in itertools.pairwise(edges)]


def integer_sums(level: Level, rows: QuantizedRows, x: Tensor) -> Tensor:
    """What native/linear_integers.h defines, to the last bit: `x` in fixed point times codes, exact for a segment, then
    in float32. With bytes (native/plane_rows.h), all inputs are one segment."""
    whole_rows = exact(level, rows.scheme)
    x = x if rows.order is None else x[:, rows.order]
    if rows.scheme.dynamic:
        fixed, unit = int8_rows(x)
    else:
        _, exponents = x.float().abs().amax(dim=1, keepdim=True).frexp()
        unit = torch.ldexp(torch.ones(len(x), 1, dtype=torch.float64), (exponents - 1).clamp(-112) - 14)
        fixed = (x.double() / unit).round()
        if whole_rows:
            fixed = fixed.clamp(max=32639)
    scales = torch.ones_like(rows.scales) if rows.scheme.by_channel else rows.scales
    zeros = rows.zeros if rows.zeros is not None else torch.full_like(rows.scales, rows.scheme.middle)
    codes = rows.codes.double()
    if rows.scheme.floating:  # of FP4: whole numbers are twice as large
        codes, scales = 2 * floating_numbers(rows.scheme, rows.codes).double(), scales / 2
    total = torch.zeros(len(x), len(rows.codes))
    for begin, end, group in [(0, x.shape[1], 0)] if whole_rows else segments(rows.scheme, x.shape[1]):
        part, group_zeros = fixed[:, begin:end], zeros[:, group]
        whole = part @ (codes[:, begin:end] - (0 if any_zeros(rows.scheme) else group_zeros[:, None])).t()
        assert whole_rows or float(whole.abs().max()) < (2**24 if any_zeros(rows.scheme) else 2**31)
        sums = whole.float()
        if any_zeros(rows.scheme):
            sums = fused(-part.sum(dim=1, keepdim=True).float(), group_zeros, sums)
        total = fused(sums, scales[:, group], total)
    total = total * unit.float()
    return total * rows.scales[:, 0] if rows.scheme.by_channel else total


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as whole numbers up to 127, and the units [T, 1] that they count."""
    largest = x.float().abs().amax(dim=1, keepdim=True)
    factor = torch.full_like(largest, 127).div(largest)  # "127 / largest" would be 127 times its reciprocal
    fixed = (x.float() * factor.where(largest >= 1e-30, 0)).round()
    return fixed.double(), (largest / 127).where(largest >= 1e-30, 0).double()


def multiplied(scheme: Scheme, x: Tensor) -> Tensor:
    """What codes are multiplied with, but for roundings to fixed point of 16 bits."""
    if not scheme.dynamic:
        return x.double()
    fixed, unit = int8_rows(x)
    return fixed * unit


def scaled_sums(level: Level, rows: QuantizedRows, x: Tensor) -> Tensor:
    """Sums of numbers in groups, as those of a bfloat16 matrix, times the scales of their groups: FP8's, twice FP4's,
    and codes less the middle one. Rounded once where those of all formats are scaled (native/linear_number_dots.h)."""
    scheme, scales, middle = rows.scheme, rows.scales, float(rows.scheme.middle)
    once = load_library(level).scales_sums(Format.INT8)
    numbers = floating_numbers(scheme, rows.codes) if scheme.floating else rows.codes - middle
    if scheme.floating and scheme.bits == 4:
        numbers, scales = 2 * numbers, scales / 2
    total = torch.zeros(len(x), len(rows.codes))
    for begin, end, group in segments(scheme, x.shape[1]):
        matrix = helpers_native.packed(level, numbers[:, begin:end].to(torch.bfloat16).contiguous())
        sums = matrix.linear(x[:, begin:end].contiguous(), Finish.STORE_FLOAT, torch.empty_like(total))
        if not once:
            total = total + sums * scales[:, group]
            continue
        of_x = x[:, begin:end].double().sum(dim=1, keepdim=True).float()
        if rows.factors is not None:
            scale, least = (of[:, group] for of in rows.factors.products())
            total = fused(-of_x, -least - middle * scale, fused(sums, scale, total))
            continue
        if rows.zeros is not None:
            sums = fused(-of_x, rows.zeros[:, group] - middle, sums)
        total = fused(sums, scales[:, group], total)
    return total


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, rounded once: in long double, whose 64 bits hold products of float32."""
    wide = a.numpy().astype(np.longdouble) * b.numpy() + c.numpy()
    return torch.from_numpy(wide.astype(np.float32))


def rounds(level: Level, scheme: Scheme) -> bool:
    """Whether the weights of this scheme are rounded to bfloat16 when they are widened."""
    native = load_library(level)
    if scheme.dynamic and not scheme.by_channel and native.knows(rounded_format(scheme)):
        return False
    return not (scheme.by_channel or in_integers(level, scheme) or native.scales_sums(plain_format(scheme)))


def plain_format(scheme: Scheme) -> Format:
    """That of codes in groups whose activations are not rounded."""
    if scheme.floating:
        return Format.FLOAT4 if scheme.bits == 4 else Format.FLOAT8
    return Format.INT4 if scheme.bits == 4 else Format.INT8


def rounded_format(scheme: Scheme) -> Format:
    """That of codes in groups whose activations are rounded, too."""
    if scheme.floating:
        return Format.FLOAT4_SEGMENTS
    return Format.INT4_SEGMENTS if scheme.bits == 4 else Format.INT8_SEGMENTS


def in_integers(level: Level, scheme: Scheme) -> bool:
    return exact(level, scheme) or (load_library(level).integers and not is_fp8(scheme))


def exact(level: Level, scheme: Scheme) -> bool:
    """Whether all inputs are one sum in integers."""
    if not scheme.by_channel or scheme.floating:
        return False
    return load_library(level).exact(Format.INT8_BOTH if scheme.dynamic else Format.INT8_CHANNEL)


def is_fp8(scheme: Scheme) -> bool:
    return scheme.floating and scheme.bits == 8


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
