"""The beam search of the tokenizer against transformers' own, on models that are tables of random logits.

It stands here because transformers' generation loads torch, and all of tests/unit does without."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from tests.helpers_beams import PROMPT, VOCAB, row_of, searched, table
from tokenizer_proc.beam_search import BeamSearch


class TableConfig(PretrainedConfig):
    model_type = "table"

    def __init__(self, vocab_size: int = VOCAB, table_seed: int = 0, **kwargs: Any):
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.table_seed = table_seed
        self.num_hidden_layers = 1


class TableModel(PreTrainedModel, GenerationMixin):
    """Logits are rows of a table."""

    config_class = TableConfig
    main_input_name = "input_ids"

    def __init__(self, config: TableConfig):
        super().__init__(config)
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.table = torch.tensor(table(config.table_seed))
        self.post_init()

    def logits(self, tokens: list[int]) -> Tensor:
        return self.table[row_of(tokens)]

    def logprobs(self, tokens: list[int]) -> list[float]:
        values: list[float] = self.logits(tokens).log_softmax(-1).tolist()
        return values

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
    search = BeamSearch(width, most, frozenset(ends), length_penalty=penalty, early_stopping=early)
    found = searched(search, most, model.logprobs)
    expected, expected_scores = theirs(model, width, most, ends, penalty, early)
    assert [list(h.tokens) for h in found] == expected
    assert [h.score for h in found] == pytest.approx(expected_scores, abs=1e-5)
