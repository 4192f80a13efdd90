"""Models that compute attention by themselves, or do not hand on what ours needs, against transformers' generate."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from common.config import CacheConfig, ClusterConfig, ModelConfig
from tests.helpers_models import VOCAB_SIZE, greedy, make_config_of, make_model, make_tokenizer
from tests.helpers_paged import NEW_TOKENS, generate, make_prompts
from worker_proc import startup
from worker_proc.attention.cpu import CpuAttention
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.features import cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.errors import ModelError
from worker_proc.models.describe import describe
from worker_proc.models.interface import LanguageModel
from worker_proc.models.own_attention import with_positions
from worker_proc.models.registry import keys_hold_positions, load_model
from worker_proc.models.transformers_backend import TransformersModel
from worker_proc.parallel import TensorParallel

PROMPTS = make_prompts(VOCAB_SIZE)
_GPTJ = {"rotary_dim": 8, "tie_word_embeddings": False}
_FALCON = {"alibi": False, "bias": False, "new_decoder_architecture": False, "multi_query": True}
_FALCON_NEW = {"alibi": False, "bias": False, "new_decoder_architecture": True, "num_kv_heads": 2}
_ODD_HEADS = {"hidden_size": 72, "num_attention_heads": 6}  # no power of 2: ALiBi has two rows of slopes

# model type, its fields, KV heads, whether its keys hold positions
KINDS: dict[str, tuple[str, dict[str, Any], int, bool]] = {
    "gptj": ("gptj", _GPTJ, 4, False),
    "codegen": ("codegen", _GPTJ, 4, False),
    "gpt_neo": (
        "gpt_neo",
        {"num_hidden_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 12},
        4,
        False,
    ),
    "gpt_neox_japanese": ("gpt_neox_japanese", {"tie_word_embeddings": False}, 4, False),
    "falcon-7b": ("falcon", _FALCON, 1, False),
    "falcon-40b": ("falcon", _FALCON_NEW, 2, False),
    "falcon-11b": ("falcon", _FALCON_NEW | {"num_ln_in_parallel_attn": 1, "tie_word_embeddings": False}, 2, False),
    "falcon-rw": (
        "falcon",
        _FALCON | {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
        4,
        True,
    ),
    "bloom": ("bloom", _ODD_HEADS | {"seq_length": 256, "initializer_range": 0.3}, 6, True),
    "mpt": ("mpt", _ODD_HEADS | {"max_seq_len": 256, "attn_config": {"clip_qkv": 2.0}}, 6, True),
    "stablelm": ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True, "tie_word_embeddings": False}, 2, False),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "tie_word_embeddings": False}, 2, False),
    "nemotron": ("nemotron", {"head_dim": 16, "tie_word_embeddings": False}, 2, False),
    "biogpt": ("biogpt", {"tie_word_embeddings": False}, 4, False),
}


def make(kind: str, path: Path) -> Path:
    model_type, fields, _, _ = KINDS[kind]
    model = make_model(make_config_of(model_type, **fields))
    model.save_pretrained(path)  # type: ignore[operator]
    make_tokenizer().save_pretrained(path)
    return path


def load(path: Path, **settings: Any) -> LanguageModel:
    given: dict[str, Any] = {"dtype": torch.float32, "tp": TensorParallel(), "attention": ReferenceAttention()}
    return load_model(path, device="cpu", **given | settings)


def answers(kind: str, path: Path) -> list[list[int]]:
    """Falcon's eager attention adds ALiBi twice."""
    return greedy(path, PROMPTS, NEW_TOKENS, attention="sdpa" if kind == "falcon-rw" else "eager")


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    _, _, kv_heads, positions = KINDS[kind]
    path = make(kind, tmp_path)
    assert describe(path).context_length == 256 and keys_hold_positions(path) == positions
    model, want = load(path), answers(kind, path)
    assert len({token for output in want for token in output}) > 20, "a degenerate model proves nothing"
    assert {heads.num for heads in model.kv_spec.layers} == {kv_heads}
    assert generate(model, PROMPTS, NEW_TOKENS, page_size=16) == want
    assert generate(model, PROMPTS, NEW_TOKENS, page_size=1, chunk=9) == want


@pytest.mark.parametrize("kind", KINDS)
def test_native_kernels_in_bfloat16(kind: str, tmp_path: Path) -> None:
    """Packed layers take the place of torch's; logits are those of the model in float32 but for rounding."""
    library = load_library(cpu_features().levels()[0])
    path = make(kind, tmp_path)
    exact, rounded = load(path), load(path, dtype=torch.bfloat16, attention=CpuAttention(library), native=library)
    assert isinstance(exact, TransformersModel) and isinstance(rounded, TransformersModel)
    assert not any(isinstance(module, nn.Linear) for module in rounded.model.base_model.modules())
    tokens = torch.tensor(PROMPTS[4])
    want, got = exact.forward_plain(tokens), rounded.forward_plain(tokens)
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.1
    assert all(len(output) == 8 for output in generate(rounded, PROMPTS, 8, page_size=16, chunk=9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_positions_of_alibi_are_exact_far_from_the_start(dtype: torch.dtype) -> None:
    """In bfloat16, whole numbers are so up to 256 only."""
    positions, slopes = torch.arange(65_536), torch.tensor([0.5, 2.0**-8])
    empty = torch.empty(1, 2, len(positions), 0, dtype=dtype)
    query, key = with_positions(empty[:, :, -1:], empty[:, :1], slopes, positions)
    assert query.dtype == key.dtype == dtype
    assert torch.equal((query.double() @ key.double().mT)[0, :, 0], slopes[:, None].double() * positions)


def test_long_prompts_of_alibi(tmp_path: Path) -> None:
    model_type, fields, _, _ = KINDS["bloom"]
    model = make_model(make_config_of(model_type, **fields | {"seq_length": 2048}))
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    prompts = [(prompt * 99)[:1100] for prompt in PROMPTS[2:]]
    assert generate(load(tmp_path), prompts, 4, chunk=300) == greedy(tmp_path, prompts, 4)


def test_masks_that_old_versions_kept_beside_the_weights_are_left_alone(tmp_path: Path) -> None:
    path = make("gpt_neo", tmp_path)
    want, file = answers("gpt_neo", path), tmp_path / "model.safetensors"
    tensors, name = load_file(file), "transformer.h.0.attn.attention."
    tensors[name + "bias"] = torch.ones(1, 1, 256, 256, dtype=torch.bool).tril()
    tensors[name + "masked_bias"] = torch.tensor(-1e9)
    save_file(tensors, file, metadata={"format": "pt"})
    assert generate(load(path), PROMPTS, NEW_TOKENS) == want
    tensors[name + "bias"] = torch.ones(64)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="do not fit the model"):
        load(path)


def test_an_int8_cache_is_refused_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "load_model", lambda *_, **__: pytest.fail("weights are read"))
    model = ModelConfig(path=str(make("mpt", tmp_path / "model")), device="cpu", cpu_kernels="torch")
    config = ClusterConfig(str(tmp_path), model, CacheConfig(kv_dtype="int8"))
    with pytest.raises(ModelError, match="ALiBi") as caught:
        startup.load_worker(config, 0, "0", tmp_path / "store")
    assert caught.value.field == "kv_cache_dtype"


@pytest.mark.parametrize(
    ("kind", "field"),
    [("xglm", "model_type"), ("rwkv", "model_type"), ("bart", "model_type"), ("minimax", "layer_types")],
)
def test_others_are_refused_before_weights_are_read(kind: str, field: str, tmp_path: Path) -> None:
    fields = {"num_local_experts": 4, "num_experts_per_tok": 2, "is_encoder_decoder": False}
    make_config_of(kind, **fields).save_pretrained(tmp_path)
    save_file({"no.weight.of.it": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert caught.value.field == field


def test_published_files_of_bloom(tmp_path: Path) -> None:
    """Weights of the base model alone, under their old names, and a config that does not say how long a context is."""
    path, base = make("bloom", tmp_path / "whole"), tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(path).transformer.save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    config |= {"n_embed": config.pop("hidden_size"), "num_attention_heads": config.pop("n_head")}
    del config["seq_length"], config["max_position_embeddings"]
    (base / "config.json").write_text(json.dumps(config | {"architectures": ["BloomForCausalLM"]}))
    assert describe(base).context_length == 2048
    assert generate(load(base), PROMPTS, NEW_TOKENS) == answers("bloom", path)
