"""A worker of its own, quantized or not: what it says of itself, and how many pages its memory gives."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.config import CacheConfig, ClusterConfig, ModelConfig
from tests.helpers_hybrid import make_hybrid
from tests.helpers_models import make_checkpoint
from worker_proc.choices import choose_dtype
from worker_proc.errors import ModelError
from worker_proc.memory import CacheSize
from worker_proc.models.interface import ModelInfo
from worker_proc.startup import load_worker


def test_a_worker_says_what_it_is_served_in_and_has_more_pages(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path / "model")  # head size 32
    model = ModelConfig(str(path), dtype="bfloat16", threads=1)
    plain = ClusterConfig(str(tmp_path), model, CacheConfig(kv_bytes=2**20))
    quantized = ClusterConfig(
        str(tmp_path),
        replace(model, quantization="int4", quantization_group_size=32),
        CacheConfig(kv_bytes=2**20, kv_dtype="int8"),
    )
    workers = [load_worker(config, 0, "0", tmp_path / f"store{i}") for i, config in enumerate((plain, quantized))]
    assert [worker.labels["quantization"] for worker in workers] == ["none", "int4, groups of 32"]
    assert [worker.labels["kv_cache_dtype"] for worker in workers] == ["bfloat16", "int8"]
    heads = 2 * 2 * 2  # layers, K and V, KV heads
    assert [worker.info["kv_bytes_per_token"] for worker in workers] == [heads * 32 * 2, heads * (32 + 4)]
    assert [worker.info["num_pages"] for worker in workers] == [2**20 // (16 * heads * size) for size in (64, 36)]


def test_a_settled_number_of_pages_is_kept_whatever_memory_is_available_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who are started in the place of lost ones: others' memory may not all have come back yet."""
    monkeypatch.setattr("worker_proc.memory.available_memory", lambda: 0)
    path = make_checkpoint("qwen3", tmp_path / "model")
    config = ClusterConfig(
        str(tmp_path), ModelConfig(str(path), threads=1), CacheConfig(kv_bytes=2**20, host_kv_bytes=2**20)
    )
    found = load_worker(config, 0, "0", tmp_path / "store", CacheSize(7)).info
    assert found["num_pages"] == 7 and found["host_pages"] == 2**20 // (16 * found["kv_bytes_per_token"])
    with pytest.raises(ModelError, match="kv_memory"):
        load_worker(config, 0, "0", tmp_path / "another")


def test_checkpoints_with_codes_and_float16_scales_are_computed_in_bfloat16() -> None:
    info = ModelInfo("LlamaForCausalLM", "llama", "native", 10, 10, (), 10, "float16", quantization="gptq")
    assert choose_dtype(ModelConfig("m"), info) == torch.bfloat16
    assert choose_dtype(ModelConfig("m", dtype="float16"), info) == torch.float16
    assert choose_dtype(ModelConfig("m"), replace(info, quantization=None)) == torch.float16


def test_a_model_without_attention_has_pages_that_take_nothing(tmp_path: Path) -> None:
    path = make_hybrid("mamba2", tmp_path / "model")
    config = ClusterConfig(str(tmp_path), ModelConfig(str(path), threads=1, context_len=4096))
    loaded = load_worker(config, 0, "0", tmp_path / "store")
    assert loaded.info["kv_bytes_per_token"] == 0 and loaded.info["num_pages"] == 256 * 4096 // 16
    assert loaded.info["slots"] == 256 and loaded.info["snapshots"]
