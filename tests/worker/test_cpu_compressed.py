"""Weights in 12 bits: what comes out are the weights that went in, and products have the bits of plain ones."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers_native import COMPRESSING, packed
from tests.worker.test_cpu_build import needs_compiler
from worker_proc.cpu.compressed import CompressedMatrix, frequent_high_bytes
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.linear import Finish, Pairing
from worker_proc.cpu.memory import HugePages

pytestmark = needs_compiler
LEVELS = cpu_features().levels()
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([96, 128, 300, 1060]))
ROWS = st.one_of(st.integers(1, 70), st.sampled_from([96, 128, 129, 200, 513, 700]))


def normal(*shape: int, seed: int, scale: float = 0.02) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(torch.bfloat16)


def any_bits(*shape: int, seed: int) -> Tensor:
    """Every bfloat16, infinities and NaN of all kinds among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(torch.bfloat16)


def with_odd_ones(weight: Tensor, share: float, seed: int) -> Tensor:
    """With zeros of both signs, and some numbers of another size."""
    generator = torch.Generator().manual_seed(seed)
    odd = torch.tensor([0.0, -0.0, 3.0e38, -1.0e-38, 1.0e-40, -7.0], dtype=torch.bfloat16)
    drawn = odd[torch.randint(len(odd), weight.shape, generator=generator)]
    return torch.where(torch.rand(weight.shape, generator=generator) < share, drawn, weight)


def bits(weights: Tensor) -> Tensor:
    return weights.contiguous().view(torch.int16)


def compressed(level: Level, weight: Tensor, cuts: list[int], paired: bool = False) -> CompressedMatrix:
    outputs, inputs = weight.shape
    room = CompressedMatrix.room(outputs, inputs, paired=paired)
    matrix = CompressedMatrix(load_library(level), HugePages(room), outputs, inputs, paired=paired)
    halves = [(Pairing.GATE, weight[: outputs // 2]), (Pairing.UP, weight[outputs // 2 :])]
    for pairing, rows in halves if paired else [(Pairing.NONE, weight)]:
        borders = sorted({0, *(min(cut, len(rows)) for cut in cuts), len(rows)})
        for first, end in pairwise(borders):
            matrix.pack(rows[first:end], first, pairing)
    matrix.seal()
    return matrix


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=60, deadline=None)
@given(
    outputs=SIZES, inputs=SIZES, cuts=st.lists(st.integers(1, 1060), max_size=3), seed=st.integers(0, 99),
    odd=st.sampled_from([0.0, 0.005, 0.1, 1.0]),
)  # fmt: skip
def test_weights_come_out_as_they_went_in(
    level: Level, outputs: int, inputs: int, cuts: list[int], seed: int, odd: float
) -> None:
    weight = with_odd_ones(normal(outputs, inputs, seed=seed), odd, seed)
    matrix = compressed(level, weight, cuts)
    assert torch.equal(bits(matrix.unpack(torch.arange(outputs))), bits(weight))


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_says_whether_it_knows_such_weights(level: Level) -> None:
    assert load_library(level).compresses == (level in COMPRESSING)


@pytest.mark.parametrize("level", LEVELS)
def test_weights_of_any_bits_are_kept_plain(level: Level) -> None:
    weight = any_bits(70, 64, seed=1)
    matrix = compressed(level, weight, [])
    assert not matrix.compressed
    assert torch.equal(bits(matrix.unpack(torch.arange(70))), bits(weight))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("others", [1, 100])
def test_later_rows_that_are_not_like_the_first_ones(level: Level, others: int) -> None:
    """A few of them are listed, all of a piece at once; with many the matrix becomes plain."""
    weight = torch.cat((normal(600, 64, seed=1), any_bits(others, 64, seed=2)))
    matrix = compressed(level, weight, [600])
    assert matrix.compressed == (others == 1)
    rows = torch.arange(len(weight))
    assert torch.equal(bits(matrix.unpack(rows)), bits(weight))
    if level in COMPRESSING:
        x = normal(40, 64, seed=3)
        got, want = (
            m.linear(x, Finish.STORE_FLOAT, torch.empty(40, len(weight))) for m in (matrix, packed(level, weight))
        )
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def test_levels_compress_alike() -> None:
    weight = with_odd_ones(normal(100, 96, seed=5), 0.005, 5)
    first, *others = (compressed(level, weight, [33]) for level in COMPRESSING)
    for other in others:  # the places of bytes may differ
        assert torch.equal(first.memory.sort().values, other.memory.sort().values)
        assert torch.equal(bits(first.unpack(torch.arange(100))), bits(other.unpack(torch.arange(100))))


def test_the_codes_are_for_zero_and_what_is_frequent() -> None:
    rows = torch.cat([torch.full((1, 20 - n), 2.0 ** (2 * n), dtype=torch.bfloat16) for n in range(18)], dim=1)
    codes, other = frequent_high_bytes(rows)
    wanted = [0, *(int(v) >> 8 for v in bits(rows[0].unique().flip(0)).flip(0)[:15])]
    assert codes.tolist()[0] == 0 and sorted(codes.tolist()) == sorted(wanted)
    assert other == pytest.approx((5 + 4 + 3) / rows.numel())


def test_a_compressed_matrix_takes_three_quarters() -> None:
    assert CompressedMatrix.room(4096, 1024) == HugePages.room(4096 * 1024 * 2 * 3 // 4)
    with pytest.raises(ValueError, match="bytes are wanted of a block"):
        CompressedMatrix(load_library(LEVELS[0]), HugePages(100), 32, 32)


@pytest.mark.parametrize("level", COMPRESSING)
@settings(max_examples=80, deadline=None)
@given(
    rows=ROWS, outputs=SIZES, inputs=SIZES, threads=st.integers(1, 3), seed=st.integers(0, 99),
    odd=st.sampled_from([0.0, 0.005, 0.015]),
)  # fmt: skip
def test_products_have_the_bits_of_plain_ones(
    level: Level, rows: int, outputs: int, inputs: int, threads: int, seed: int, odd: float
) -> None:
    weight, x = with_odd_ones(normal(outputs, inputs, seed=seed), odd, seed), normal(rows, inputs, seed=1, scale=1.0)
    load_library(level).set_threads(threads)
    pair = compressed(level, weight, [outputs // 3]), packed(level, weight)
    for finish, dtype in (
        (Finish.STORE, torch.bfloat16),
        (Finish.STORE_FLOAT, torch.float32),
        (Finish.ADD, torch.float32),
    ):
        got, want = (m.linear(x, finish, torch.ones(rows, outputs, dtype=dtype)) for m in pair)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), finish
    for got, want in zip(*(m.argmax(x) for m in pair), strict=True):
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
    load_library(level).set_threads(1)


@pytest.mark.parametrize("level", COMPRESSING)
@pytest.mark.parametrize("rows", [1, 17, 40, 130, 513])
@pytest.mark.parametrize(("channels", "inputs"), [(16, 64), (50, 300), (160, 2080)])
@pytest.mark.parametrize("finish", [Finish.SILU_MUL, Finish.GELU_MUL])
def test_gated_products_have_the_bits_of_plain_ones(
    level: Level, rows: int, channels: int, inputs: int, finish: Finish
) -> None:
    weight, x = normal(2 * channels, inputs, seed=7), normal(rows, inputs, seed=8, scale=1.0)
    matrix = compressed(level, weight, [16, 23], paired=True)
    assert matrix.compressed
    got, want = (
        m.linear(x, finish, torch.empty(rows, channels, dtype=torch.bfloat16))
        for m in (matrix, packed(level, weight, paired=True))
    )
    assert torch.equal(bits(got), bits(want))
