"""Models with recurrent layers, against transformers' own generate."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers_hybrid import HYBRIDS, make_hybrid
from tests.helpers_models import VOCAB_SIZE, greedy
from tests.helpers_paged import NEW_TOKENS, generate, make_prompts
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.models.describe import describe
from worker_proc.models.interface import LanguageModel
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel

PROMPTS = make_prompts(VOCAB_SIZE)


def load(path: Path, **settings: Any) -> LanguageModel:
    given: dict[str, Any] = {"dtype": torch.float32, "tp": TensorParallel(), "attention": ReferenceAttention()}
    return load_model(path, device="cpu", **given | settings)


@pytest.mark.parametrize("kind", sorted(HYBRIDS))
def test_greedy_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    path = make_hybrid(kind, tmp_path)
    assert describe(path).context_length == 256
    model, want = load(path), greedy(path, PROMPTS, NEW_TOKENS)
    assert len({token for output in want for token in output}) > 20, "a degenerate model proves nothing"
    assert model.kv_spec.bytes_per_state
    assert generate(model, PROMPTS, NEW_TOKENS, page_size=16) == want
    assert generate(model, PROMPTS, NEW_TOKENS, page_size=1, chunk=9) == want
    assert generate(model, PROMPTS, NEW_TOKENS, page_size=16, chunk=1) == want
