"""Log probabilities: torch's against float64 and a plain sort, the native ones against torch's, on every instruction
set."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.logprobs import Logprobs
from tests.helpers_native import native_draws
from worker_proc.cpu.features import cpu_features
from worker_proc.cpu.sampling import NativeDraws
from worker_proc.logprobs import Scores, of_tokens, score_with_torch

VOCABS = (1, 5, 127, 128, 1000, 4096, 4099, 40_000)


@pytest.fixture(params=cpu_features().levels(), scope="module")
def native(request: pytest.FixtureRequest) -> Iterator[NativeDraws]:
    yield from native_draws(request.param)


def make_logits(rows: int, vocab: int, seed: int, scale: float) -> Tensor:
    """With an odd seed, many are equal, as those of a bfloat16 head; with every third, some are impossible."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=random) * scale
    if seed % 2:
        logits = torch.round(logits * 4) / 4
    if not seed % 3:
        logits[torch.rand(rows, vocab, generator=random) < 0.5] = -torch.inf
    return logits


def close(scores: Scores, wanted: Scores, error: float = 3e-5) -> None:
    """Ids and ranks to the last one, log probabilities up to rounding: of their own, which grows with their magnitude,
    and of the sum, which torch adds up in float32."""
    assert scores.ranks.tolist() == wanted.ranks.tolist()
    assert scores.top_ids.tolist() == wanted.top_ids.tolist()
    for some, others in ((scores.own, wanted.own), (scores.top_values, wanted.top_values)):
        torch.testing.assert_close(some, others, atol=error, rtol=5e-7, equal_nan=True)


def plainly(logits: Tensor, tokens: Tensor, most: int) -> Scores:
    logprobs = logits.double().log_softmax(-1).float()
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, :most]
    own = logits.gather(1, tokens[:, None])
    return Scores(
        logprobs.gather(1, tokens[:, None])[:, 0], (logits > own).sum(1) + 1, ids, logprobs.gather(1, ids)
    )  # fmt: skip


cases = {
    "vocab": st.sampled_from(VOCABS), "seed": st.integers(0, 1000),
    "scale": st.sampled_from([0.0, 0.01, 1.0, 6.0, 60.0]),
    "most": st.sampled_from([0, 1, 5, 20, 300, 512]),
    "shift": st.sampled_from([0.0, 1000.0, -70.0]), "data": st.data(),
}  # fmt: skip


def draw_case(
    vocab: int, seed: int, scale: float, most: int, shift: float, data: st.DataObject
) -> tuple[Tensor, Tensor, int]:
    logits = make_logits(3, vocab, seed, scale) + shift
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), min_size=3, max_size=3))
    logits[:, data.draw(st.integers(0, vocab - 1))] = shift  # something is possible
    return logits, torch.tensor(tokens), min(most, vocab)


@settings(max_examples=100)
@given(**cases)
def test_torch_gives_what_sorting_does(
    vocab: int, seed: int, scale: float, most: int, shift: float, data: st.DataObject
) -> None:
    logits, tokens, most = draw_case(vocab, seed, scale, most, shift, data)
    close(score_with_torch(logits, tokens, most), plainly(logits, tokens, most))


@settings(max_examples=100)
@given(**cases)
def test_native_gives_what_torch_does(
    native: NativeDraws, vocab: int, seed: int, scale: float, most: int, shift: float, data: st.DataObject
) -> None:
    logits, tokens, most = draw_case(vocab, seed, scale, most, shift, data)
    before, scores = logits.clone(), native.score(logits, tokens, most)
    close(scores, score_with_torch(logits, tokens, most))
    close(scores, plainly(logits, tokens, most), 1.5e-6)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_native_logarithms_are_rounded_once(native: NativeDraws, scale: float) -> None:
    """float32 has 24 bits: of -12, a step is 1e-6."""
    logits, tokens = make_logits(4, 151_936, 2, scale), torch.arange(4)
    wanted = logits.double().log_softmax(-1)[:, :4].diagonal()
    error = (native.score(logits, tokens, 0).own.double() - wanted).abs().max()
    assert float(error) < 1.5e-6


@pytest.mark.parametrize("vocab", VOCABS[1:])
@pytest.mark.parametrize(
    "values", [(float("nan"),), (float("inf"),), (float("-inf"), float("nan")), (3e38, float("inf"))]
)
@pytest.mark.parametrize("everywhere", [False, True])
def test_rows_without_a_distribution(
    native: NativeDraws, vocab: int, values: tuple[float, ...], everywhere: bool
) -> None:
    logits, tokens, most = make_logits(3, vocab, 2, 1.0), torch.tensor([0, vocab // 2, vocab - 1]), min(vocab, 20)
    good = native.score(logits, tokens, most)
    if everywhere:
        logits[1] = values[0]
    logits[1, -len(values) :] = torch.tensor(values)  # in a tail that fills no vector
    bad = native.score(logits, tokens, most)
    close(bad, score_with_torch(logits, tokens, most))
    assert bad.own[1].isnan() and int(bad.ranks[1]) == 1 and bad.top_ids[1].tolist() == list(range(most))
    for part in ("own", "ranks", "top_ids", "top_values"):
        assert torch.equal(getattr(bad, part)[::2], getattr(good, part)[::2])


def test_impossible_tokens(native: NativeDraws) -> None:
    logits = torch.full((2, 300), -torch.inf)
    logits[0, [7, 200]] = torch.tensor([1.0, 2.0])
    tokens = torch.tensor([5, 5])
    for score in (native.score, score_with_torch):
        entries = of_tokens(logits, tokens, [4, 1], score)
        assert list(entries.top_ids) == [200, 7, 0, 1, 0]
        assert list(entries.ranks) == [3, 1] and list(entries.logprobs) == [-9999, -9999]
        assert list(entries.top_logprobs) == pytest.approx([-0.31326, -1.31326, -9999, -9999, -9999], abs=1e-4)


@pytest.mark.parametrize("vocab", VOCABS[1:])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(native: NativeDraws, vocab: int) -> None:
    wide = make_logits(9, vocab + 3, 1, 4.0)
    tokens, tops = torch.arange(9) % vocab, [0, 3, 20, 1, 0, 7, 20, 2, 5]
    together = of_tokens(wide[:, :vocab], tokens, tops, native.score)
    alone = Logprobs.empty()
    for i in range(9):
        row = wide[i : i + 1, :vocab].T.contiguous().T  # elsewhere in memory, and for the last one not in rows at all
        alone.extend(of_tokens(row, tokens[i : i + 1], tops[i : i + 1], native.score))
    assert together == alone
    columns = wide[:, :vocab].T.contiguous().T
    assert of_tokens(columns, tokens, tops, native.score) == together
