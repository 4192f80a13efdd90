"""Packed matrix products against torch, for every instruction set of this CPU."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers_native import check_bits_in_any_batch, packed
from tests.worker.test_cpu_build import needs_compiler
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.linear import Finish
from worker_proc.models.layers import gated
from worker_proc.models.spec import CLAMPED_SWIGLU

pytestmark = needs_compiler
LEVELS = cpu_features().levels()
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([96, 127, 128, 129, 256, 300, 640]))
GATES = {Finish.SILU_MUL: "silu", Finish.GELU_MUL: "gelu_pytorch_tanh", Finish.CLAMPED_MUL: CLAMPED_SWIGLU}
ROWS = st.one_of(st.integers(1, 70), st.sampled_from([96, 127, 128, 129, 200]))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = F.linear(x.double(), weight.double())
    return out if bias is None else out + bias.double()


def close(got: Tensor, want: Tensor, inputs: int, half: bool) -> None:
    """Within what float32 sums of `inputs` products of numbers about 1 may lose, and the rounding of the result."""
    torch.testing.assert_close(got.double(), want, rtol=2**-8 if half else 1e-5, atol=4e-6 * inputs + 1e-5)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=60, deadline=None)
@given(rows=ROWS, outputs=SIZES, inputs=SIZES, threads=st.integers(1, 3), biased=st.booleans(), seed=st.integers(0, 99))
def test_products_equal_torch(
    level: Level, rows: int, outputs: int, inputs: int, threads: int, biased: bool, seed: int
) -> None:
    load_library(level).set_threads(threads)
    weight, x = random(outputs, inputs, seed=seed), random(rows, inputs, seed=seed + 1)
    bias = random(outputs, seed=seed + 2) if biased else None
    matrix, want = packed(level, weight), exact(x, weight, bias)
    if bias is not None:
        matrix.set_bias(bias)
    got = matrix.linear(x, Finish.STORE_FLOAT, torch.full((rows, outputs), torch.nan))
    close(got, want, inputs, half=False)
    close(matrix.linear(x, Finish.STORE, torch.empty(rows, outputs, dtype=torch.bfloat16)), want, inputs, half=True)
    before = random(rows, outputs, seed=seed + 3).float()
    close(matrix.linear(x, Finish.ADD, before.clone()), want + before, inputs, half=False)
    index, best = matrix.argmax(x)
    assert torch.equal(best, got.max(dim=1).values)
    assert torch.equal(index, (got == best[:, None]).int().argmax(dim=1)), "the first of equal ones"
    load_library(level).set_threads(1)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=40, deadline=None)
@given(
    rows=ROWS,
    channels=SIZES,
    inputs=SIZES,
    biased=st.booleans(),
    finish=st.sampled_from(tuple(GATES)),
    seed=st.integers(0, 99),
)
def test_gated_products_equal_torch(
    level: Level, rows: int, channels: int, inputs: int, biased: bool, finish: Finish, seed: int
) -> None:
    weight, x = random(2 * channels, inputs, seed=seed) / 4, random(rows, inputs, seed=seed + 1)
    bias = random(2 * channels, seed=seed + 2) if biased else None
    matrix = packed(level, weight, paired=True)
    if bias is not None:
        matrix.set_bias(bias)
    gate, up = exact(x, weight, bias).chunk(2, dim=1)
    got = matrix.linear(x, finish, torch.empty(rows, channels, dtype=torch.bfloat16))
    torch.testing.assert_close(got.double(), gated(GATES[finish])(gate, up), rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("finish", GATES)
def test_gates_of_any_size_are_finite(level: Level, finish: Finish) -> None:
    """Two inputs: the first one is the gate, the second one the factor."""
    matrix = packed(level, torch.eye(2, dtype=torch.bfloat16).repeat_interleave(16, 0), paired=True)
    gates = torch.tensor([0.0, 1e-30, 1.0, 20.0, 300.0, 1e6, 1e15, 1e30]).to(torch.bfloat16)
    x = torch.cat([torch.stack([sign * gates, torch.ones_like(gates)], dim=1) for sign in (1, -1)])
    got = matrix.linear(x, finish, torch.empty(len(x), 16, dtype=torch.bfloat16)).double()
    want = gated(GATES[finish])(x[:, :1].double(), x[:, 1:].double()).expand(-1, 16)
    torch.testing.assert_close(got, want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=30, deadline=None)
@given(st.data(), SIZES, SIZES)
def test_a_row_has_the_same_bits_in_any_batch(level: Level, data: st.DataObject, outputs: int, inputs: int) -> None:
    rows = data.draw(st.sampled_from([2, 17, 33, 64, 70, 513, 700]))
    matrix, x = packed(level, random(outputs, inputs, seed=1)), random(rows, inputs, seed=2)
    check_bits_in_any_batch(level, matrix, x, outputs, data)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [512, 513, 700])
@pytest.mark.parametrize("outputs", [32, 64, 100, 352])  # one panel, whole lines, a rest, many panels
@pytest.mark.parametrize("finish", [Finish.STORE, *GATES])
def test_results_of_many_rows_have_the_bits_of_those_of_few(
    level: Level, rows: int, outputs: int, finish: Finish
) -> None:
    """Plain ones of many rows go past the caches where lines are aligned; what is beside them stays as it is."""
    native = load_library(level)
    native.set_threads(2)
    paired = finish is not Finish.STORE
    matrix = packed(level, random(2 * outputs if paired else outputs, 96, seed=4), paired=paired)
    x, width = random(rows, 96, seed=5), -(-outputs // 32) * 32 + 32
    memory = torch.full((rows * width + 32,), 7.0, dtype=torch.bfloat16)
    begin = -(memory.data_ptr() // 2) % 32
    whole = memory[begin : begin + rows * width].view(rows, width)
    matrix.linear(x, finish, whole[:, :outputs])
    assert bool((whole[:, outputs:] == 7.0).all())
    few = torch.cat([matrix.linear(part, finish, part.new_empty(len(part), outputs)) for part in x.split(50)])
    assert torch.equal(whole[:, :outputs], few)
    native.set_threads(1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (31, 33), (32, 32), (100, 64), (65, 95)])
def test_rows_are_unpacked_as_they_were(level: Level, outputs: int, inputs: int) -> None:
    weight = random(outputs, inputs, seed=3)
    matrix = packed(level, weight)
    wanted = torch.tensor([outputs - 1, 0, outputs // 2])
    assert torch.equal(matrix.unpack(wanted), weight[wanted])


@pytest.mark.parametrize("level", LEVELS)
def test_equal_logits_give_the_first_index_and_nan_gives_some(level: Level) -> None:
    weight = torch.zeros(100, 32, dtype=torch.bfloat16)
    weight[[40, 70], 0] = 2.0
    x = torch.zeros(4, 32, dtype=torch.bfloat16)
    x[:, 0] = torch.tensor([1.0, -1.0, torch.nan, 0.0])
    index, best = packed(level, weight).argmax(x)
    assert index.tolist()[:2] == [40, 0] and index.tolist()[3] == 0 and 0 <= int(index[2]) < 100
    assert best.tolist()[:2] == [2.0, 0.0]
