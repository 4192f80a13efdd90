"""What every beam search keeps to, on tables of random log probabilities. What it finds is compared with transformers'
own in tests/worker/test_beam_search.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers_beams import PROMPT, logprobs_by, searched
from tokenizer_proc.beam_search import BeamSearch, candidates_per_beam


@given(st.integers(0, 1000), st.integers(1, 6))
def test_one_beam_without_ends_is_greedy(seed: int, most: int) -> None:
    logprobs = logprobs_by(seed)
    (found,) = searched(BeamSearch(1, most, frozenset()), most, logprobs)
    tokens, total = list(PROMPT), 0.0
    for _ in range(most):
        values = logprobs(tokens)
        tokens.append(values.index(max(values)))
        total += max(values)
    assert list(found.tokens) == tokens[2:]
    assert found.score == pytest.approx(total / most, abs=1e-5)


@given(st.integers(0, 10**6), st.integers(1, 4), st.lists(st.integers(3, 11), max_size=2, unique=True), st.booleans())
def test_hypotheses_are_different_sorted_and_complete(seed: int, width: int, ends: list[int], early: bool) -> None:
    search = BeamSearch(width, 6, frozenset(ends), early_stopping=early)
    found = searched(search, 6, logprobs_by(seed))
    assert len(found) == width == len({h.tokens for h in found})
    scores = [h.score for h in found]
    assert scores == sorted(scores, reverse=True)
    for hypothesis in found:
        assert not set(hypothesis.tokens[:-1]) & set(ends)
        assert hypothesis.tokens[-1] in ends or len(hypothesis.tokens) == 6


@pytest.mark.parametrize("penalty", [-10.0, 10.0])
def test_the_largest_penalties_of_the_longest_answers_do_no_harm(penalty: float) -> None:
    search = BeamSearch(2, 2**20, frozenset({0}), length_penalty=penalty)
    search._length = 2**20 - 2
    search.advance([[(0, -1.0), (1, -2.0), (2, -3.0), (3, -4.0)]])
    search.advance([[(0, -1.0), (1, -2.0), (2, -3.0), (3, -4.0)]] * 2)
    assert search.done and len(search.hypotheses) == 2


def test_candidates() -> None:
    assert [candidates_per_beam(4, ends) for ends in (0, 1, 2)] == [8, 8, 12]
