"""Llama 4: attention that begins anew after each chunk, and queries that are scaled by their positions."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.helpers_models import VOCAB_SIZE, greedy, make_checkpoint
from tests.helpers_paged import NEW_TOKENS, fill, generate, make_prompts, shuffled_batch
from worker_proc.attention.chunks import in_chunks
from worker_proc.attention.cpu import CpuAttention
from worker_proc.attention.interface import AttentionBackend
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.errors import ModelError
from worker_proc.kv_cache import KVCache, KVSpec
from worker_proc.models import paged_call
from worker_proc.models.interface import LanguageModel
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel

PROMPTS = make_prompts(VOCAB_SIZE)
LEVELS = [None, *cpu_features().levels()]


def make_attention(level: Level | None) -> AttentionBackend:
    return ReferenceAttention() if level is None else CpuAttention(load_library(level))


def load(path: Path, **settings: Any) -> LanguageModel:
    given: dict[str, Any] = {"dtype": torch.float32, "tp": TensorParallel(), "attention": ReferenceAttention()}
    return load_model(path, device="cpu", **given | settings)


@pytest.mark.parametrize("experts", [True, False])
def test_greedy_tokens_equal_transformers(experts: bool, tmp_path: Path) -> None:
    path = make_checkpoint("llama4", tmp_path, **({} if experts else {"moe_layers": [], "use_qk_norm": False}))
    want = greedy(path, PROMPTS, NEW_TOKENS)
    assert len({token for output in want for token in output}) > 20, "a degenerate model proves nothing"
    for level in LEVELS:
        model = load(path, attention=make_attention(level))
        assert generate(model, PROMPTS, NEW_TOKENS, page_size=16) == want
        assert generate(model, PROMPTS, NEW_TOKENS, page_size=1, chunk=9) == want
        assert generate(model, PROMPTS, NEW_TOKENS, page_size=8, chunk=23) == want


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("size", "page_size"), [(8, 8), (12, 4), (5, 1)])
def test_a_token_sees_those_of_its_chunk_before_it(level: Level | None, size: int, page_size: int) -> None:
    rng = random.Random(size)
    totals = [1, size - 1, size, size + 1, *(rng.randrange(1, 6 * size) for _ in range(8))]
    rows = sorted(((rng.choice([1, rng.randint(1, total)]), total) for total in totals), key=lambda row: row[0] == 1)
    batch, pages = shuffled_batch(rows, page_size)
    cache = KVCache(KVSpec.uniform(1, 2, 16, 16, torch.float32), pages, page_size)
    fill(cache)
    torch.manual_seed(size)
    q, k, v = (torch.randn(len(batch.token_ids), heads, 16) for heads in (4, 2, 2))
    attention = make_attention(level)
    found = attention.forward(0, q, k, v, in_chunks(batch, size, page_size), cache, scale=0.25)
    first = 0
    for row, (new, total) in enumerate(rows):
        table = batch.page_table[row]
        slots = torch.tensor([int(table[at // page_size]) * page_size + at % page_size for at in range(total)])
        keys, values = cache.read(0, slots)
        for at in range(total - new, total):
            seen = slice(at // size * size, at + 1)
            expected = F.scaled_dot_product_attention(
                q[first, :, None], keys[seen].transpose(0, 1), values[seen].transpose(0, 1), scale=0.25, enable_gqa=True
            )
            assert torch.allclose(found[first], expected[:, 0], atol=1e-5)
            first += 1


def test_a_step_within_the_first_chunk_is_left_as_it_is() -> None:
    batch, _ = shuffled_batch([(7, 9), (1, 16)], 4)
    assert in_chunks(batch, 16, 4) is batch
    assert in_chunks(batch, 12, 4).q_lens == [7, 1]
    assert in_chunks(batch, 4, 4).q_lens == [2, 4, 1, 1]


def test_pages_across_chunks_are_refused() -> None:
    spec = replace(KVSpec.uniform(1, 2, 16, 16, torch.float32), chunk=24)
    with pytest.raises(ModelError, match=r"multiple of the page size \(16\)") as caught:
        KVCache(spec, 4, 16)
    assert caught.value.field == "attention_chunk_size"
    KVCache(spec, 4, 8)


def test_the_trial_run_at_load_catches_scales_by_other_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_call, "tempered", lambda module, query, positions: query)
    with pytest.raises(ModelError, match="differ from the model's own"):
        load(make_checkpoint("llama4", tmp_path))


def test_in_bfloat16_its_linear_layers_are_native(tmp_path: Path) -> None:
    path = make_checkpoint("llama4", tmp_path)
    native = load_library(cpu_features().levels()[-1])
    model: Any = load(path, dtype=torch.bfloat16, attention=CpuAttention(native), native=native)
    assert type(model.model.model.layers[0].self_attn.q_proj).__name__ == "NativeLinear"
    whole = generate(model, PROMPTS, NEW_TOKENS, page_size=16)
    assert generate(model, PROMPTS, NEW_TOKENS, page_size=4, chunk=9) == whole
