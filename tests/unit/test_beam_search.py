"""The beam search against transformers' own, on models that are tables of random log probabilities."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from tokenizer_proc.beam_search import BeamSearch, candidates_per_beam

PROMPT = [1, 2]


class TableConfig(PretrainedConfig):
    model_type = "table"

    def __init__(self, vocab_size: int = 12, table_seed: int = 0, **kwargs: Any):
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.table_seed = table_seed
        self.num_hidden_layers = 1


class TableModel(PreTrainedModel, GenerationMixin):
    """Logits depend on the last two tokens and the length, through a random table."""

    config_class = TableConfig
    main_input_name = "input_ids"

    def __init__(self, config: TableConfig):
        super().__init__(config)
        self.unused = torch.nn.Parameter(torch.zeros(1))
        size = config.vocab_size
        generator = torch.Generator().manual_seed(config.table_seed)
        self.table = torch.randn(7, size, size, size, generator=generator) * 2
        self.post_init()

    def logits(self, tokens: list[int]) -> Tensor:
        return self.table[len(tokens) % 7, tokens[-2], tokens[-1]]

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        rows = [self.logits(row) for row in input_ids.tolist()]
        return CausalLMOutput(logits=torch.stack(rows)[:, None].expand(-1, input_ids.shape[1], -1))

    def prepare_inputs_for_generation(self, input_ids: Tensor, **_: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}


def theirs(
    model: TableModel, width: int, most: int, ends: list[int], penalty: float, early: bool
) -> tuple[list[list[int]], list[float]]:
    config = GenerationConfig(
        num_beams=width, num_return_sequences=width, max_new_tokens=most, do_sample=False, length_penalty=penalty,
        early_stopping=early, eos_token_id=ends or None, pad_token_id=0, use_cache=False, return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    out = model.generate(torch.tensor([PROMPT]), generation_config=config)
    sequences = []
    for row in out.sequences[:, len(PROMPT) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        sequences.append(row[:end])
    return sequences, out.sequences_scores.tolist()


def ours(
    model: TableModel, width: int, most: int, ends: list[int], penalty: float, early: bool
) -> tuple[list[list[int]], list[float]]:
    search = BeamSearch(width, most, frozenset(ends), length_penalty=penalty, early_stopping=early)
    steps = 0
    while not search.done:
        following = []
        for beam in search.beams:
            logprobs = model.logits([*PROMPT, *beam.tokens]).log_softmax(-1)
            best = logprobs.topk(min(search.num_candidates, len(logprobs)))
            following.append(list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
        search.advance(following)
        steps += 1
        assert steps <= most
    return [list(h.tokens) for h in search.hypotheses], [h.score for h in search.hypotheses]


@settings(max_examples=120)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(2, 4),
    most=st.integers(1, 9),
    ends=st.lists(st.integers(3, 11), max_size=2, unique=True),
    penalty=st.sampled_from([1.0, 0.0, 2.0, -1.0, 0.3]),
    early=st.booleans(),
)
@example(seed=1, width=4, most=1, ends=[3, 4], penalty=1.0, early=False)
def test_sequences_and_scores_are_those_of_transformers(
    seed: int, width: int, most: int, ends: list[int], penalty: float, early: bool
) -> None:
    model = TableModel(TableConfig(table_seed=seed))
    sequences, scores = ours(model, width, most, ends, penalty, early)
    expected, expected_scores = theirs(model, width, most, ends, penalty, early)
    assert sequences == expected
    assert scores == pytest.approx(expected_scores, abs=1e-5)


@given(st.integers(0, 1000), st.integers(1, 6))
def test_one_beam_without_ends_is_greedy(seed: int, most: int) -> None:
    model = TableModel(TableConfig(table_seed=seed))
    (sequence,), _ = ours(model, 1, most, [], 1.0, False)
    tokens = list(PROMPT)
    for _ in range(most):
        tokens.append(int(model.logits(tokens).argmax()))
    assert sequence == tokens[2:]


@given(st.integers(0, 10**6), st.integers(1, 4), st.lists(st.integers(3, 11), max_size=2, unique=True))
def test_hypotheses_are_different_sorted_and_complete(seed: int, width: int, ends: list[int]) -> None:
    model = TableModel(TableConfig(table_seed=seed))
    sequences, scores = ours(model, width, 6, ends, 1.0, False)
    assert len(sequences) == width == len({tuple(s) for s in sequences})
    assert scores == sorted(scores, reverse=True)
    for sequence in sequences:
        assert not set(sequence[:-1]) & set(ends)
        assert sequence[-1] in ends or len(sequence) == 6


@pytest.mark.parametrize("penalty", [-10.0, 10.0])
def test_the_largest_penalties_of_the_longest_answers_do_no_harm(penalty: float) -> None:
    search = BeamSearch(2, 2**20, frozenset({0}), length_penalty=penalty)
    search._length = 2**20 - 2
    search.advance([[(0, -1.0), (1, -2.0), (2, -3.0), (3, -4.0)]])
    search.advance([[(0, -1.0), (1, -2.0), (2, -3.0), (3, -4.0)]] * 2)
    assert search.done and len(search.hypotheses) == 2


def test_candidates() -> None:
    assert [candidates_per_beam(4, ends) for ends in (0, 1, 2)] == [8, 8, 12]
