"""The native decoder against transformers: greedy tokens of random-weight checkpoints, in float32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers_models import VOCAB_SIZE, greedy, make_checkpoint
from tests.helpers_paged import NEW_TOKENS, Row, generate, make_batch, make_prompts
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.kv_cache import KVCache
from worker_proc.models.interface import LanguageModel
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel

NATIVE = [
    "llama",
    "llama-gqa-untied",
    "llama-bias",
    "llama-mqa",
    "llama-rope-llama3",
    "llama-rope-linear",
    "llama-rope-dynamic",
    "llama-rope-yarn",
    "mistral",
    "mistral-sliding",
    "qwen2",
    "qwen2-sliding",
    "qwen3",
    "gpt2",
]
PROMPTS = make_prompts(VOCAB_SIZE)


def load(path: Path, dtype: torch.dtype = torch.float32) -> LanguageModel:
    return load_model(path, dtype=dtype, device="cpu", tp=TensorParallel(), attention=ReferenceAttention())


@pytest.mark.parametrize("kind", NATIVE)
def test_greedy_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path)
    model, want = load(path), greedy(path, PROMPTS, NEW_TOKENS)
    assert len({token for output in want for token in output}) > 20, "a degenerate model proves nothing"
    assert generate(model, PROMPTS, NEW_TOKENS, page_size=16) == want
    assert generate(model, PROMPTS, NEW_TOKENS, page_size=1, chunk=9) == want
    assert [generate(model, [prompt], NEW_TOKENS, page_size=16, chunk=16)[0] for prompt in PROMPTS] == want


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 80, "activation_function": "relu"}),
    ("gpt2", {"scale_attn_weights": False, "initializer_range": 0.15, "tie_word_embeddings": False}),
    ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "rms_norm_eps": 1e-3}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0 + i / 4 for i in range(8)],
                                "long_factor": [9.0] * 8, "original_max_position_embeddings": 128}}),
    ("llama-rope-yarn", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32,
                                          "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False,
                                          "mscale": 0.7, "mscale_all_dim": 1.1}}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields"), VARIANTS)
def test_variants_equal_transformers(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path, **fields)
    want = greedy(path, PROMPTS, NEW_TOKENS)
    assert len({token for output in want for token in output}) > 20, "a degenerate model proves nothing"
    assert generate(load(path), PROMPTS, NEW_TOKENS, page_size=16) == want


def test_one_step_may_ask_for_the_logits_of_any_tokens(tmp_path: Path) -> None:
    model = load(make_checkpoint("llama", tmp_path))
    cache = KVCache(model.kv_spec, 8, 4)
    batch = make_batch([Row([5, 6, 7, 8, 9], [3, 1])], [5], 4)
    rows = torch.tensor([4, 0, 2])
    every = model.forward(replace(batch, logit_rows=torch.arange(5)), cache)
    assert every.shape == (5, VOCAB_SIZE) and every.dtype == torch.float32
    torch.testing.assert_close(model.forward(replace(batch, logit_rows=rows), cache), every[rows])
    assert model.forward(replace(batch, logit_rows=rows[:0]), cache).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    logits = []
    for wanted in (torch.float32, dtype):
        model = load(path, wanted)
        assert model.kv_spec.dtype == wanted
        logits.append(model.forward(make_batch([Row([5, 6, 7, 8, 9], [3, 1])], [5], 4), KVCache(model.kv_spec, 8, 4)))
    assert logits[1].dtype == torch.float32
    assert (logits[0] - logits[1]).norm() < 0.05 * logits[0].norm()
