"""The native decoder against transformers: greedy tokens of random-weight checkpoints, in float32."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers_models import VOCAB_SIZE, make_checkpoint
from tests.helpers_paged import generate, make_batch, Row
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.errors import ModelError
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
NEW_TOKENS = 24


def load(path: Path, **settings: Any) -> LanguageModel:
    return load_model(
        path,
        **{"dtype": torch.float32, "device": "cpu", "tp": TensorParallel(), "attention": ReferenceAttention(), **settings},
    )


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 2, 17, 33, 70)]


def expected(path: Path, new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("kind", NATIVE)
def test_greedy_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path)
    model, want = load(path), expected(path)
    assert len({token for output in want for token in output}) > 20, "a degenerate model proves nothing"
    assert generate(model, prompts(), NEW_TOKENS, page_size=16) == want
    assert generate(model, prompts(), NEW_TOKENS, page_size=1, chunk=9) == want
    assert [generate(model, [prompt], NEW_TOKENS, page_size=16, chunk=16)[0] for prompt in prompts()] == want
