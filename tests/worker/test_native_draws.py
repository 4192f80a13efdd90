"""The native draw against the sampler: given the same weights, the same tokens, on every instruction set."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.sampling_params import DrawParams
from tests.helpers_native import native_draws
from worker_proc.cpu.features import cpu_features
from worker_proc.cpu.sampling import NativeDraws
from worker_proc.random import uniforms
from worker_proc.sampler import UNIT, Sampler, weights_of
from worker_proc.staging import Staging

VOCABS = (5, 128, 1000, 4099, 40_000)


@pytest.fixture(params=cpu_features().levels(), scope="module")
def native(request: pytest.FixtureRequest) -> Iterator[NativeDraws]:
    yield from native_draws(request.param)


def make_logits(rows: int, vocab: int, seed: int, scale: float) -> Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return torch.round(logits * 8) / 8 if seed % 2 else logits  # many equal ones


def sample(sampler: Sampler, logits: Tensor, draws: list[DrawParams], positions: list[int] | None = None) -> list[int]:
    """Row i with `draws[i]`, in slots that are not the row numbers."""
    slots = [2 * i + 1 for i in reversed(range(len(draws)))]
    staging = Staging("cpu")
    sampler.set_params(slots, draws, staging)
    staging.send()
    at = torch.tensor(positions or [7] * len(draws))
    drawing = sampler.prepare(torch.tensor(slots), at, staging)
    tokens: list[int] = sampler.sample(logits, drawing).tolist()
    return tokens


def with_kernels(native: NativeDraws, rows: int) -> Sampler:
    return Sampler(2 * rows + 1, draw_rows=native.draw, best_rows=native.best)


draw_params = st.builds(
    DrawParams,
    st.sampled_from([0.0, 1e-300, 0.3, 1.0, 4.0, 100.0]),
    st.sampled_from([0, 1, 2, 20, 300, 2000, 2**31 - 1]),
    st.sampled_from([1e-300, 0.05, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 1e-5, 0.05, 1.0]),
    st.integers(0, 2**63 - 1),
)


@settings(max_examples=150)
@given(
    st.lists(draw_params, min_size=1, max_size=5), st.sampled_from(VOCABS), st.integers(0, 1000),
    st.sampled_from([0.01, 1.0, 4.0, 30.0]),
)  # fmt: skip
def test_tokens_are_those_of_the_sampler(
    native: NativeDraws, draws: list[DrawParams], vocab: int, seed: int, scale: float
) -> None:
    logits = make_logits(len(draws), vocab, seed, scale)
    before = logits.clone()

    def native_weights(logits: Tensor, best: Tensor, temperature: Tensor, *, exact: bool) -> Tensor:
        return torch.stack([native.weights(row, float(t)) for row, t in zip(logits, temperature, strict=True)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker_proc.sampler.weights_of", native_weights)
        expected = sample(Sampler(2 * len(draws) + 1), logits, draws)
    assert sample(with_kernels(native, len(draws)), logits, draws) == expected
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("temperature", [0.2, 1.0, 50.0])
def test_weights_are_those_of_the_sampler_up_to_the_last_bits(
    native: NativeDraws, vocab: int, temperature: float
) -> None:
    logits = make_logits(1, vocab, 4, 5.0)
    exact = weights_of(logits.clone(), logits.max(1).values, torch.tensor([temperature]), exact=True)[0].double()
    weights = native.weights(logits[0], temperature).double()
    assert float(weights.max()) == UNIT and torch.equal(weights, weights.round())
    assert bool(((weights - exact).abs() <= 1 + exact * 3e-7).all())


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_numbers_are_those_of_the_sampler(native: NativeDraws, seed: int, position: int) -> None:
    assert native.uniform(seed, position) == float(uniforms(torch.tensor([seed]), torch.tensor([position])))


@pytest.mark.parametrize("vocab", VOCABS)
def test_a_request_draws_the_same_alone_and_in_any_batch(native: NativeDraws, vocab: int) -> None:
    logits = make_logits(9, vocab, 2, 2.0)
    draws = [DrawParams(0.5 + i / 4, 10 * (i % 3), 1 - i / 20, seed=i) for i in range(9)]
    positions = [i * i for i in range(9)]
    together = sample(with_kernels(native, 9), logits, draws, positions)
    alone = [sample(with_kernels(native, 1), logits[i : i + 1], [draws[i]], [positions[i]])[0] for i in range(9)]
    assert together == alone
    assert sample(with_kernels(native, 9), logits.flip(0), draws[::-1], positions[::-1]) == together[::-1]


@pytest.mark.parametrize("vocab", VOCABS)
def test_best_is_the_first_of_the_largest(native: NativeDraws, vocab: int) -> None:
    wide = make_logits(6, vocab + 3, 1, 2.0)
    wide[2, :vocab] = -torch.inf
    wide[3, [1, vocab - 1]] = 90.0
    for logits in (wide[:, :vocab], wide[:, :vocab].T.contiguous().T):  # rows apart, and not in rows at all
        best, index = native.best(logits)
        assert torch.equal(best, logits.max(1).values)
        assert index.tolist() == [(row == row.max()).nonzero()[0].item() for row in logits]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_without_a_distribution_get_some_token(native: NativeDraws, value: float) -> None:
    logits = make_logits(3, 1000, 0, 1.0)
    good = sample(with_kernels(native, 3), logits, [DrawParams(top_k=5, top_p=0.5)] * 3)
    logits[1] = value
    tokens = sample(with_kernels(native, 3), logits, [DrawParams(top_k=5, top_p=0.5)] * 3)
    assert 0 <= tokens[1] < 1000 and tokens[::2] == good[::2]
    logits[1, 300] = 2.0  # the only number among them
    if value < 0:
        assert sample(with_kernels(native, 3), logits, [DrawParams(100.0)] * 3)[1] == 300
