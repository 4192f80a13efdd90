"""Models computed by transformers through our paged attention, against transformers' own generate."""

from pathlib import Path

import pytest

from tests.helpers_models import make_checkpoint
from tests.helpers_paged import generate
from tests.unit.test_model_native import NEW_TOKENS, expected, load, prompts


@pytest.mark.parametrize("kind", ["gemma2", "phi3", "gptneox", "olmo", "mixtral"])
def test_greedy_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path)
    model, want = load(path), expected(path)
    assert len({token for output in want for token in output}) > 20, "a degenerate model proves nothing"
    assert generate(model, prompts(), NEW_TOKENS, page_size=16) == want
    assert generate(model, prompts(), NEW_TOKENS, page_size=1, chunk=9) == want
