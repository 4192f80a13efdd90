"""The sampler against transformers' logits processors, published random numbers and exact distributions."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from common.sampling_params import DrawParams
from worker_proc.random import philox4x32, uniforms
from worker_proc.sampler import Sampler, _draw, _filter, _nucleus_edge, weights_of
from worker_proc.staging import Staging

DRAWS = 20_000
VOCAB = 40
PARAMS = {
    "temperature": DrawParams(temperature=0.7),
    "hot": DrawParams(temperature=3.0),
    "top_k": DrawParams(top_k=7),
    "top_p": DrawParams(top_p=0.8),
    "min_p": DrawParams(min_p=0.08),
    "all": DrawParams(temperature=1.4, top_k=20, top_p=0.9, min_p=0.05),
}


def make_logits(rows: int, vocab: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def expected_probs(logits: Tensor, draw: DrawParams) -> Tensor:
    """float64 probabilities `[rows, vocab]` after transformers' warpers in the order of `DrawParams`."""
    ids, scores = torch.zeros(len(logits), 1, dtype=torch.int64), logits.double()
    warpers: list[Any] = [TemperatureLogitsWarper(draw.temperature)]
    if draw.top_k:
        warpers.append(TopKLogitsWarper(draw.top_k))
    if draw.top_p < 1:
        warpers.append(TopPLogitsWarper(draw.top_p))
    if draw.min_p:
        warpers.append(MinPLogitsWarper(draw.min_p))
    for warper in warpers:
        scores = warper(ids, scores)
    return scores.softmax(-1)


def draw_tokens(sampler: Sampler, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    return sampler.sample(logits, sampler.prepare(slots, positions, Staging("cpu")))


def set_params(sampler: Sampler, slots: list[int], draws: list[DrawParams]) -> None:
    staging = Staging("cpu")
    sampler.set_params(slots, draws, staging)
    staging.send()


def sample(logits: Tensor, draws: list[DrawParams], positions: list[int] | None = None) -> list[int]:
    """Row i with `draws[i]`, in slots that are not the row numbers."""
    slots = [3 * i + 1 for i in reversed(range(len(draws)))]
    sampler = Sampler(3 * len(draws) + 1)
    set_params(sampler, slots, draws)
    at = torch.tensor(positions or [0] * len(draws))
    return draw_tokens(sampler, logits, torch.tensor(slots), at).tolist()


def sample_positions(row: Tensor, draw: DrawParams, count: int = DRAWS) -> Tensor:
    """`count` draws of one request from one row of logits, at positions 0, 1, 2, ..."""
    sampler = Sampler(1)
    set_params(sampler, [0], [draw])
    slots = torch.zeros(count, dtype=torch.int64)
    return draw_tokens(sampler, row.expand(count, -1), slots, torch.arange(count))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123 1.14.0, tests/kat_vectors
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    def words(text: str) -> Tensor:
        return torch.tensor([[int(word, 16)] for word in text.split()])

    assert torch.equal(philox4x32(words(counter), words(key)), words(expected))
    crowd = philox4x32(words(counter).expand(-1, 5), words(key).expand(-1, 5))
    assert torch.equal(crowd, words(expected).expand(-1, 5))


def test_uniforms_use_all_of_seed_and_position() -> None:
    seeds = torch.tensor([0, 1, 2**32, 2**62, 2**63 - 1]).repeat_interleave(4)
    positions = torch.tensor([0, 1, 2, 2**22]).repeat(5)
    numbers = uniforms(seeds, positions)
    assert len(set(numbers.tolist())) == 20
    assert numbers.dtype == torch.float64 and bool(((numbers >= 0) & (numbers < 1)).all())


def test_uniforms_are_uniform_over_positions_and_over_seeds() -> None:
    run, still = torch.arange(DRAWS), torch.full((DRAWS,), 5)
    assert kstest(uniforms(still, run).numpy(), "uniform").pvalue > 1e-4
    assert kstest(uniforms(run, still).numpy(), "uniform").pvalue > 1e-4


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = make_logits(4, 100)
    logits[2, [17, 60]] = 50.0
    assert sample(logits, [DrawParams(temperature=0.0, top_k=5, top_p=0.1, seed=3)] * 4) == logits.argmax(-1).tolist()
    assert sample(logits, [DrawParams(temperature=0.0)] * 4)[2] == 17
    assert Sampler(1).prepare(torch.tensor([0]), torch.tensor([0]), Staging("cpu")) is None, "for no more than that"


@pytest.mark.parametrize("name", PARAMS)
def test_distribution(name: str) -> None:
    draw, row = PARAMS[name], make_logits(1, VOCAB, seed=1)
    probs = expected_probs(row, draw)[0]
    counts = torch.bincount(sample_positions(row, draw), minlength=VOCAB)
    assert int(counts[probs == 0].sum()) == 0
    order = probs.argsort(descending=True)
    expected, observed = (probs[order] * DRAWS).tolist(), counts[order].tolist()
    while len(expected) > 1 and expected[-1] < 5:  # chi-square wants at least five expected draws per cell
        expected[-2:], observed[-2:] = [expected[-2] + expected[-1]], [observed[-2] + observed[-1]]
    assert len(expected) >= 5
    assert chisquare(observed, [e / sum(expected) * DRAWS for e in expected]).pvalue > 1e-4


def test_a_wrong_distribution_is_noticed() -> None:
    """The yardstick of `test_distribution`: a slightly different temperature must fail it."""
    row = make_logits(1, VOCAB, seed=1)
    counts = torch.bincount(sample_positions(row, DrawParams(temperature=0.95)), minlength=VOCAB)
    expected = expected_probs(row, DrawParams())[0] * DRAWS
    cells = expected >= 5
    assert chisquare(counts[cells], expected[cells] / expected[cells].sum() * counts[cells].sum()).pvalue < 1e-4


@pytest.mark.parametrize("name", PARAMS)
def test_what_is_filtered_out_has_no_weight_at_all(name: str) -> None:
    draw, logits = PARAMS[name], make_logits(5, VOCAB, seed=2)
    best, temperature = logits.max(dim=1).values, torch.full((5,), draw.temperature)
    weights = weights_of(logits.clone(), best, temperature, exact=True)
    params = torch.tensor([[draw.temperature], [draw.top_k], [draw.top_p], [draw.min_p]], dtype=torch.float64)
    _filter(weights, params.expand(4, 5), params.expand(4, 5))
    assert torch.equal(weights > 0, expected_probs(logits, draw) > 0)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**6), st.sampled_from([0.2, 1.0, 2.5]), st.sampled_from([0, 1, 3, 50, 10**9]),
    st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]), st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)  # fmt: skip
def test_kept_tokens_are_those_of_transformers(seed: int, temperature: float, k: int, p: float, min_p: float) -> None:
    """Numbers just inside the borders of the cumulative distribution reach every kept token, and no other one."""
    draw, row = DrawParams(temperature, k, p, min_p, seed), make_logits(1, 60, seed)
    probs = expected_probs(row, draw)[0]
    drawn = set(sample_positions(row, draw, 3000).tolist())
    assert drawn <= set(probs.nonzero().squeeze(1).tolist())
    assert drawn >= set((probs > 0.01).nonzero().squeeze(1).tolist())


def test_wide_nucleus_of_a_large_vocabulary() -> None:
    """Nearly flat logits need more candidates than the first ones, row by row."""
    logits = make_logits(3, 3000, seed=4, scale=0.1)
    logits[1] *= 80  # a narrow nucleus between two wide ones
    for p in (0.3, 0.9):
        draws = [DrawParams(top_p=p, seed=seed) for seed in range(3)]
        for row, probs in enumerate(expected_probs(logits, draws[0])):
            kept = probs.argsort(descending=True)[: int(probs.count_nonzero())].tolist()
            drawn = set(sample_positions(logits[row : row + 1], draws[row], 300).tolist())
            assert drawn <= set(kept)
            assert drawn & set(kept[int(0.9 * len(kept)) :]) or row == 1
        assert sample(logits, draws) == [int(sample_positions(logits[i : i + 1], draws[i], 1)) for i in range(3)]


def test_equal_logits_are_kept_together() -> None:
    row = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    assert set(sample_positions(row, DrawParams(top_k=2), 2000).tolist()) == {0, 2, 3, 4}
    assert set(sample_positions(row, DrawParams(top_p=0.6), 2000).tolist()) == {0, 2, 3, 4}
    assert set(sample_positions(row, DrawParams(top_p=0.4), 2000).tolist()) == {0}


@pytest.mark.parametrize("vocab", [37, 1000, 4099])
def test_a_request_draws_the_same_alone_and_in_any_batch(vocab: int) -> None:
    kinds = [*PARAMS.values(), DrawParams(temperature=0.0), DrawParams(top_p=0.95), DrawParams(0.6, 50, 0.95)]
    for size in (1, 2, 7, 33):
        logits = make_logits(size, vocab, seed=size)
        draws = [
            DrawParams(d.temperature, d.top_k, d.top_p, d.min_p, seed=10 * i + 1)
            for i, d in enumerate((kinds * 5)[:size])
        ]
        positions = [i * i for i in range(size)]
        together = sample(logits, draws, positions)
        assert together == [sample(logits[i : i + 1], [draws[i]], [positions[i]])[0] for i in range(size)]
        turned = sample(logits.flip(0), draws[::-1], positions[::-1])
        assert together == turned[::-1]


def test_rows_that_go_on_draw_what_they_draw_anew() -> None:
    """The same slots, step after step, at other positions and later with other parameters."""
    draws = [DrawParams(seed=1), DrawParams(temperature=0.0), DrawParams(0.7, 20, seed=3)]
    slots, logits = torch.tensor([4, 0, 2]), make_logits(3, 1000)
    going_on = Sampler(5)
    for round_ in range(2):
        set_params(going_on, slots.tolist(), draws)
        for position in range(5):
            positions = torch.tensor([position, 7, 100 * round_ + position])
            anew = Sampler(5)
            set_params(anew, slots.tolist(), draws)
            expected = draw_tokens(anew, logits, slots.clone(), positions)
            assert torch.equal(draw_tokens(going_on, logits, slots, positions), expected)
        draws = [DrawParams(temperature=0.0), DrawParams(seed=1), DrawParams(0.9, seed=5)]


def test_many_rows_are_worked_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = make_logits(20, 100)
    draws = [DrawParams(top_k=5 * (i % 3), top_p=0.9, seed=i) for i in range(20)]
    whole = sample(logits, draws)
    monkeypatch.setattr("worker_proc.sampler._MAX_ELEMENTS", 300)
    assert sample(logits, draws) == whole

    def number_of_slot(*args: Tensor) -> None:
        index, tokens = args[-2:]
        tokens[index[0]] = index[1]

    sampler, slots = Sampler(20, draw_rows=number_of_slot), torch.arange(19, -1, -1)
    set_params(sampler, list(range(20)), draws)
    assert torch.equal(draw_tokens(sampler, logits, slots, slots), slots), "by kernels, too"


@pytest.mark.parametrize("apart", [1, 100, 300])
def test_a_number_on_the_border_of_two_tokens_is_the_latter(apart: int) -> None:
    """And tokens without weight, first ones too, are never drawn. With 300, tokens lie in blocks of their own."""
    weights = torch.zeros(1, 5 * apart)
    weights[0, torch.arange(1, 5) * apart] = torch.tensor([1.0, 0.0, 4.0, 3.0])
    numbers = [0.0, 1 / 8 - 2**-53, 1 / 8, 5 / 8 - 2**-53, 5 / 8, 1 - 2**-53]
    drawn = _draw(weights.expand(6, -1), torch.tensor(numbers, dtype=torch.float64))
    assert drawn.tolist() == [apart, apart, 3 * apart, 3 * apart, 4 * apart, 4 * apart]


@pytest.mark.parametrize("candidates", [1, 3, 9])
def test_the_nucleus_is_the_smallest(candidates: int) -> None:
    weights = torch.tensor([[1.0, 8.0, 2.0, 4.0, 1.0]]).expand(5, -1)
    wanted = torch.tensor([[1.0], [8.0], [8.5], [14.0], [16.0]], dtype=torch.float64)
    assert _nucleus_edge(weights, wanted, candidates).flatten().tolist() == [8, 8, 4, 2, 1]


def test_seed_and_position_change_the_draw() -> None:
    row = make_logits(1, 1000, scale=0.5)
    by_seed = sample(row.expand(50, -1), [DrawParams(seed=i) for i in range(50)])
    by_position = sample(row.expand(50, -1), [DrawParams(seed=0)] * 50, list(range(50)))
    assert len(set(by_seed)) > 40 and len(set(by_position)) > 40
    assert by_seed[0] == by_position[0]


def test_logits_are_left_as_they_were() -> None:
    logits = make_logits(3, 50)
    before = logits.clone()
    sample(logits, list(PARAMS.values())[-3:])
    assert torch.equal(logits, before)


def test_extremes() -> None:
    logits = make_logits(1, 50)
    best = int(logits.argmax())
    assert sample(logits, [DrawParams(temperature=1e-300)]) == [best]
    assert sample(logits, [DrawParams(top_p=1e-300)]) == [best]
    assert sample(logits, [DrawParams(min_p=1.0)]) == [best]
    assert sample(logits, [DrawParams(top_k=2**31 - 1, top_p=1.0)])[0] in range(50)
    masked = torch.full((1, 50), float("-inf"))
    masked[0, 30] = -1e30
    assert sample(masked, [DrawParams(temperature=100.0)]) == [30]
    for bad in (float("nan"), float("inf"), float("-inf")):
        token = sample(torch.full((1, 50), bad), [DrawParams(top_k=5, top_p=0.5)])[0]
        assert 0 <= token < 50


def test_set_params_of_no_slots() -> None:
    set_params(Sampler(4), [], [])
