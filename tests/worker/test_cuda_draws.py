"""Draws without sorting against the sampler that sorts: the same tokens, to the last one. On the GPU where there is
one, else in Triton's interpreter."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers_triton import DEVICE

pytest.importorskip("triton")

from common.sampling_params import DrawParams
from worker_proc import sampler as reference
from worker_proc.cuda.sampling import draw_rows, make_weights
from worker_proc.random import uniforms


def params_of(draws: list[DrawParams]) -> tuple[Tensor, Tensor]:
    rows = [(d.temperature, d.top_k, d.top_p, d.min_p) for d in draws]
    return torch.tensor(rows, dtype=torch.float64).T.contiguous(), torch.tensor([d.seed for d in draws])


def both(logits: Tensor, draws: list[DrawParams], positions: list[int]) -> tuple[list[int], list[int]]:
    """Row i with `draws[i]`, temperature 1: tokens by the kernels, and by the functions of worker_proc/sampler.py."""
    params, seeds = params_of(draws)
    rows, at = torch.arange(len(draws)), torch.tensor(positions)
    tokens = torch.full((len(draws) + 1,), -1)
    above = torch.cat((torch.zeros(1, logits.shape[1]), logits))  # row i + 1 is drawn from, and its token goes there
    index = torch.stack((rows + 1, rows, at))
    draw_rows(*(on := [t.to(DEVICE) for t in (above, above.max(-1).values, params, seeds, index, tokens)]))
    assert int(on[-1][0]) == -1, "a row was written to another place"
    kept = as_weights(logits)
    reference._filter(kept, params, params)
    return on[-1][1:].tolist(), reference._draw(kept, uniforms(seeds, at)).tolist()


def as_weights(logits: Tensor) -> Tensor:
    return reference.weights_of(logits.clone(), logits.max(-1).values, torch.ones(len(logits)), exact=True)


KS = [0, 1, 2, 7, 39, 40, 41, 10**9]
PS = [1e-300, 1e-6, 0.1, 0.5, 0.9, 0.999999, 1.0]
MINS = [0.0, 1e-9, 0.05, 1.0]


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 40]),
    st.sampled_from([0, 1, 3]),
    st.lists(st.tuples(st.sampled_from(KS), st.sampled_from(PS), st.sampled_from(MINS)), min_size=4, max_size=4),
)
@example(0, 40, 0, [(0, 0.5, 0.0)] * 4)
def test_tokens_equal_those_of_sorting(seed: int, vocab: int, ties: int, kinds: list[tuple[int, float, float]]) -> None:
    """`ties`: logits are rounded to so many digits, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(kinds), vocab, generator=generator) * 3
    if ties:
        logits = (logits * ties).round() / ties
    draws = [DrawParams(1.0, k, p, least, seed + i) for i, (k, p, least) in enumerate(kinds)]
    got, want = both(logits, draws, [seed % 1000 + i for i in range(len(kinds))])
    assert got == want


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 20.0])
@pytest.mark.parametrize("kind", [
    DrawParams(), DrawParams(top_p=0.9), DrawParams(top_k=50), DrawParams(top_k=5000), DrawParams(min_p=0.02),
    DrawParams(1.0, 1000, 0.95, 0.001),
])  # fmt: skip
def test_a_large_vocabulary(scale: float, kind: DrawParams) -> None:
    """More than one block, flat and steep; with `scale` 0 all tokens are equal."""
    logits = torch.randn(6, 9001, generator=torch.Generator().manual_seed(3)) * scale
    draws = [DrawParams(1.0, kind.top_k, kind.top_p, kind.min_p, seed=i * 2**40) for i in range(6)]
    got, want = both(logits, draws, [0, 1, 2**20, 3, 2**31, 5])
    assert got == want


def test_the_set_that_is_kept_is_that_of_sorting() -> None:
    """Rows of the same logits at many positions reach every token that is kept, and no other one."""
    rows = 120  # the last token to be reached is in row 60
    logits = (torch.randn(1, 30, generator=torch.Generator().manual_seed(5)) * 2).round()  # many ties
    for kind in (DrawParams(top_k=5), DrawParams(top_p=0.7), DrawParams(1.0, 9, 0.8, 0.02)):
        draws = [DrawParams(1.0, kind.top_k, kind.top_p, kind.min_p, seed=1)] * rows
        got, want = both(logits.repeat(rows, 1), draws, list(range(rows)))
        assert got == want
        kept = as_weights(logits)
        params, _ = params_of([kind])
        reference._filter(kept, params, params)
        assert set(got) == set(kept[0].nonzero().squeeze(1).tolist())


def test_rows_that_hold_nan_end() -> None:
    for vocab in (50, 9001):
        logits = torch.full((4, vocab), float("nan"))
        logits[1, 10:] = 1.0
        draws = [DrawParams(top_p=0.5), DrawParams(top_k=3), DrawParams(1.0, 3, 0.5, 0.1), DrawParams(1.0)]
        got, _ = both(logits, draws, [0, 1, 2, 3])
        assert all(0 <= token < vocab for token in got)


def made(logits: Tensor, temperatures: list[float], rows: list[int]) -> tuple[Tensor, Tensor]:
    """Weights of `rows` of `logits`, row i at `temperatures[i]`: by the kernel, and by torch."""
    params, _ = params_of([DrawParams(temperature) for temperature in reversed(temperatures)])
    slots = torch.arange(len(rows)).flip(0)
    index, best = torch.stack((torch.tensor(rows), slots, slots)), logits.max(-1).values
    got = make_weights(*(tensor.to(DEVICE) for tensor in (logits, best, params, index)))
    want = reference.weights_of(logits[rows], best[rows], params[0, slots].float(), exact=True)
    return got.weights.cpu().view(torch.int32), want.view(torch.int32)


NUMBERS = st.one_of(st.floats(width=32), st.floats(-60, 60, width=32), st.sampled_from([-torch.inf, 0.0, -1e-42]))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(NUMBERS, min_size=7, max_size=7), min_size=1, max_size=3),
    st.lists(st.sampled_from([1e-30, 1e-9, 0.1, 0.7, 1.0, 1.3, 100.0]) | st.floats(1e-30, 1e5), min_size=3, max_size=3),
)
def test_weights_have_the_bits_of_torch(numbers: list[list[float]], temperatures: list[float]) -> None:
    rows = [len(numbers) - 1, *range(len(numbers))][:3]
    got, want = made(torch.tensor(numbers), temperatures[: len(rows)], rows)
    numbers_are_equal = got == want
    neither_is_one = got.view(torch.float32).isnan() & want.view(torch.float32).isnan()
    assert bool((numbers_are_equal | neither_is_one).all())


def test_weights_of_more_than_a_block_have_the_bits_of_torch() -> None:
    """Rows of a wider matrix, whose logits stay as they are."""
    wide = torch.randn(4, 5100, generator=torch.Generator().manual_seed(7)) * 4
    logits = wide[:, :5001]
    before = wide.clone()
    got, want = made(logits, [0.3, 0.8, 1.0, 2.5, 0.8], [2, 0, 1, 3, 3])
    assert torch.equal(got, want) and torch.equal(wide, before)
    values = got.view(torch.float32)
    assert torch.equal(values, values.round()) and bool((values.max(-1).values == reference.UNIT).all())
    assert len(values.unique()) > 10_000, "weights that are all alike prove nothing"


def test_the_weights_of_a_cpu_are_within_a_rounding_of_these() -> None:
    """Which can move a draw, so rarely that it does not here: every row draws the same token."""
    logits = torch.randn(300, 500, generator=torch.Generator().manual_seed(8)) * 3
    best, ones = logits.max(-1).values, torch.ones(300)
    exact = reference.weights_of(logits.clone(), best, ones, exact=True)
    quick = reference.weights_of(logits.clone(), best, ones, exact=False)
    assert bool(((exact - quick).abs() <= exact * 2.0**-22 + 1).all())
    numbers = uniforms(torch.arange(300), torch.arange(300))
    assert torch.equal(reference._draw(exact, numbers), reference._draw(quick, numbers))
