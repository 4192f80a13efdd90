"""Greedy tokens by a look at int8 first: those of all products to the last bit, whatever the numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers_native import SCREENING, packed
from tests.worker.test_cpu_build import needs_compiler
from worker_proc.cpu.compressed import CompressedMatrix
from worker_proc.cpu.features import Level
from worker_proc.cpu.library import load_library
from worker_proc.cpu.linear import PackedMatrix
from worker_proc.cpu.memory import HugePages
from worker_proc.cpu.screen import HeadScreen, screen_scheme

pytestmark = needs_compiler


def screened(level: Level, weight: Tensor) -> HeadScreen:
    """Filled in two pieces, which meet inside a panel."""
    native, (outputs, inputs) = load_library(level), weight.shape
    scheme = screen_scheme(native, outputs, inputs, least=0)
    assert scheme is not None
    screen = HeadScreen(native, HugePages(HeadScreen.room(outputs, inputs, scheme)), outputs, inputs, scheme)
    for first, piece in ((outputs // 3, weight[outputs // 3 :]), (0, weight[: outputs // 3])):
        screen.pack(piece, first)
    screen.seal()
    return screen


def compressed(level: Level, weight: Tensor) -> PackedMatrix:
    native, (outputs, inputs) = load_library(level), weight.shape
    matrix = CompressedMatrix(native, HugePages(CompressedMatrix.room(outputs, inputs)), outputs, inputs)
    matrix.pack(weight, 0)
    matrix.seal()
    return matrix


def check(matrix: PackedMatrix, screen: HeadScreen, x: Tensor) -> None:
    index, best = matrix.argmax(x)
    got, value = matrix.argmax(x, screen.struct)
    assert torch.equal(got, index) and torch.equal(value.view(torch.int32), best.view(torch.int32))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spread(numbers: Tensor, how: str, seed: int) -> Tensor:
    """Rows `[R, inputs]` of a kind that is hard to round."""
    rows, inputs = numbers.shape
    draw = torch.Generator().manual_seed(seed)
    if how == "channels":  # a few channels are much larger, as of trained models
        numbers[:, torch.randint(inputs, (1 + inputs // 100,), generator=draw)] *= 20
    elif how == "exponents":
        numbers *= torch.exp2(torch.randint(-40, 5, (rows, inputs), generator=draw))
    elif how == "alike":  # rows differ in the last bits of a few numbers
        numbers = numbers[:1] * (1 + (torch.rand(rows, inputs, generator=draw) < 0.03) * 2.0**-8)
    elif how == "equal":
        numbers = numbers[torch.randint(max(rows // 40, 1), (rows,), generator=draw)]
    elif how == "sizes":  # from what is nothing to the largest
        numbers *= torch.logspace(-45, 36, rows)[torch.randperm(rows, generator=draw), None]
    elif how == "tiny":
        numbers *= 1e-38
    elif how == "sparse":
        numbers *= torch.rand(rows, inputs, generator=draw) < 0.05
    elif how == "not finite":
        numbers[torch.randint(rows, (1 + rows // 50,), generator=draw), 0] = torch.tensor(torch.inf)
        numbers[torch.randint(rows, (1 + rows // 50,), generator=draw), -1] = torch.nan
    return numbers


KINDS = ("plain", "channels", "exponents", "alike", "equal", "sizes", "tiny", "sparse", "not finite")


@pytest.mark.parametrize("level", SCREENING)
@settings(max_examples=50, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 40), st.sampled_from([64, 300])),
    outputs=st.one_of(st.integers(1, 200), st.sampled_from([1000, 2048, 3001])),
    inputs=st.one_of(st.integers(1, 70), st.sampled_from([96, 128, 129, 256, 300, 512, 2080])),
    weights=st.sampled_from(KINDS),
    hidden=st.sampled_from(KINDS),
    in_12_bits=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_the_largest_is_that_of_all_products(
    level: Level,
    rows: int,
    outputs: int,
    inputs: int,
    weights: str,
    hidden: str,
    in_12_bits: bool,
    threads: int,
    seed: int,
) -> None:
    native = load_library(level)
    native.set_threads(threads)
    weight = spread(random(outputs, inputs, seed=seed), weights, seed).bfloat16()
    x = spread(random(rows, inputs, seed=seed + 1), hidden, seed + 1).bfloat16()
    matrix = (compressed if in_12_bits and native.compresses else packed)(level, weight)
    screen = screened(level, weight)
    for part in (x, x[: rows // 2], x[:1], x):
        check(matrix, screen, part)
    native.set_threads(1)


@pytest.mark.parametrize("level", SCREENING)
@pytest.mark.parametrize("kind", ["plain", "channels"])
def test_a_look_is_enough_for_numbers_as_models_have_them(level: Level, kind: str) -> None:
    weight, x = random(16384, 512, seed=1).bfloat16(), spread(random(40, 512, seed=2), kind, 3).bfloat16()
    matrix, screen = packed(level, weight), screened(level, weight)
    for rows in x.split(2):
        check(matrix, screen, rows)
        assert screen.rest.tolist() == [0, 1]  # not so if one of two rows took all products


@pytest.mark.parametrize("level", SCREENING)
def test_sums_may_be_as_small_and_as_large_as_float32_and_beyond(level: Level) -> None:
    numbers, rows = random(2048, 64, seed=1), random(3, 64, seed=2)
    for of_weights in (1e-38, 1e-30, 1e-19, 1.0, 1e19, 1e30, 3e37):
        weight = (numbers * of_weights).bfloat16()
        matrix, screen = packed(level, weight), screened(level, weight)
        for of_rows in (1e-38, 1e-30, 1e-25, 1e-19, 1e-10, 1e-7, 1.0, 1e7, 1e10, 1e18, 1e19, 1e30, 3e37):
            screen.rest[:] = torch.tensor([0, 1])
            check(matrix, screen, (rows * of_rows).bfloat16())


@pytest.mark.parametrize("level", SCREENING)
def test_of_equal_outputs_that_are_rounded_differently_the_first_counts(level: Level) -> None:
    """Where the other inputs of an output are large, its one input that counts is rounded coarsely."""
    weight, x = 9 * random(8192, 64, seed=1), torch.zeros(6, 64)
    equal = torch.tensor([40, 41, 700, 3000, 5001, 8191])
    weight[:, 0], x[:, 0] = -1.0, torch.tensor([0.25, 0.5, 1.0, 2.0, 3.0, 1000.0])
    weight[equal, 0] = 1.0
    weight[equal] *= torch.where(torch.arange(64) == 0, 1.0, torch.logspace(0, 0.6, len(equal))[:, None])
    weight, x = weight.bfloat16(), x.bfloat16()
    matrix, screen = packed(level, weight), screened(level, weight)
    check(matrix, screen, x)
    assert matrix.argmax(x, screen.struct)[0].tolist() == [40] * 6 and screen.rest.tolist() == [0, 1]


@pytest.mark.parametrize("level", SCREENING)
def test_where_a_look_does_not_pay_it_is_left_out_more_and_more_often(level: Level) -> None:
    weight = random(2048, 64, seed=1).bfloat16()
    matrix, screen, nothing = packed(level, weight), screened(level, weight), torch.zeros(3, 64).bfloat16()
    looks = 0
    for _ in range(400):
        before = screen.rest.tolist()
        check(matrix, screen, nothing)
        looks += before[0] == 0
        assert screen.rest.tolist() == (
            [before[1], min(2 * before[1], 64)] if before[0] == 0 else [before[0] - 1, before[1]]
        )
    assert looks == 12  # 0, 2, 5, 10, 19, 36, 69, 134, 199, ...
    while int(screen.rest[0]):
        check(matrix, screen, nothing)
    check(matrix, screen, random(3, 64, seed=2).bfloat16())
    assert screen.rest.tolist() == [0, 1]


@pytest.mark.parametrize("level", SCREENING)
def test_small_heads_are_not_screened(level: Level) -> None:
    native = load_library(level)
    assert screen_scheme(native, 1000, 1000) is None
    assert screen_scheme(native, 151_936, 1024) is not None
