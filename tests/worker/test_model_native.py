"""The native decoder against transformers: greedy tokens of random-weight checkpoints, in float32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

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
    "gemma",
    "gemma2",
    "gemma3",
    "granite",
    "phi3",
    "smollm3",
    "mixtral",
    "qwen3-moe",
    "gpt-oss",
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
    ("gemma", {"hidden_act": "gelu"}),  # means the tanh form, in this family
    ("gemma2", {"attn_logit_softcapping": None, "layer_types": ["full_attention", "sliding_attention"]}),
    ("gemma3", {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, "num_hidden_layers": 2}),
    ("granite", {"mlp_bias": True, "num_key_value_heads": None}),
    ("phi3", {"partial_rotary_factor": 1.0, "sliding_window": None, "num_key_value_heads": None}),
    ("phi3", {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 128, "rope_scaling": {
        "type": "longrope", "short_factor": [1.0 + i / 4 for i in range(6)], "long_factor": [9.0] * 6}}),
    ("smollm3", {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 7, "attention_bias": True}),
    ("mixtral", {"sliding_window": 7, "num_experts_per_tok": 4, "head_dim": 24}),
    ("qwen3-moe", {"norm_topk_prob": True, "attention_bias": True, "use_sliding_window": True, "sliding_window": 9}),
    ("gpt-oss", {"layer_types": ["full_attention", "sliding_attention"], "attention_bias": False, "sliding_window": 5,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "num_key_value_heads": 1}),
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


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gemma3", "granite"])
def test_tied_embeddings_are_scaled_on_the_way_in_only(kind: str, tmp_path: Path) -> None:
    """Their answers repeat one token, so that logits are compared instead."""
    path = make_checkpoint(kind, tmp_path, tie_word_embeddings=True)
    model, prompt = load(path), PROMPTS[0]
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    pages = list(range(-(-len(prompt) // 4)))
    batch = replace(make_batch([Row(prompt, pages)], [len(prompt)], 4), logit_rows=torch.arange(len(prompt)))
    with torch.inference_mode():
        want = reference(torch.tensor([prompt])).logits[0]
    got = model.forward(batch, KVCache(model.kv_spec, len(pages), 4))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


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
