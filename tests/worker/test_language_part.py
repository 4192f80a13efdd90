"""Multimodal checkpoints: their language model answers text as the whole model of transformers does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from tests.helpers_hybrid import make_hybrid
from tests.helpers_models import VOCAB_SIZE
from tests.helpers_multimodal import KINDS, MISTRAL_4, greedy_of_whole, make_multimodal
from tests.helpers_paged import NEW_TOKENS, generate, make_prompts
from worker_proc.attention.cpu import CpuAttention
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.errors import ModelError
from worker_proc.models import language_part
from worker_proc.models.describe import describe
from worker_proc.models.interface import LanguageModel
from worker_proc.models.registry import load_model
from worker_proc.parallel import TensorParallel

PROMPTS = [[token for token in prompt if token != 3] for prompt in make_prompts(VOCAB_SIZE)]  # 3 stands for an image


def load(path: Path, **settings: Any) -> LanguageModel:
    given: dict[str, Any] = {"dtype": torch.float32, "tp": TensorParallel(), "attention": ReferenceAttention()}
    return load_model(path, device="cpu", **given | settings)


def test_every_kind_is_tried() -> None:
    assert set(KINDS) == language_part.KINDS


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_text_is_answered_as_by_the_whole_model(kind: str, tmp_path: Path) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know it")
    path = make_multimodal(kind, tmp_path)
    want = greedy_of_whole(path, PROMPTS, NEW_TOKENS)
    assert len({token for output in want for token in output}) > 20, "a degenerate model proves nothing"
    assert generate(load(path), PROMPTS, NEW_TOKENS, page_size=16, chunk=9) == want


def test_layers_that_read_what_another_one_made_hold_nothing(tmp_path: Path) -> None:
    """Gemma 4's last layer reads the keys and values of the last but two; the heads of its layers differ."""
    spec = load(make_multimodal("gemma4", tmp_path)).kv_spec
    assert [tuple(heads) for heads in spec.layers] == [(2, 16, 16), (2, 32, 32), (2, 16, 16)]
    assert spec.bytes_per_token == (2 * 2 * 16 + 2 * 2 * 32 + 2 * 2 * 16) * 4


@pytest.mark.parametrize("level", cpu_features().levels())
def test_native_attention_knows_layers_with_other_heads(level: Level, tmp_path: Path) -> None:
    path = make_multimodal("gemma4", tmp_path)
    want, codes = greedy_of_whole(path, PROMPTS, NEW_TOKENS), generate(load(path), PROMPTS, NEW_TOKENS, int8=True)
    model = load(path, attention=CpuAttention(load_library(level)))
    for page_size in (1, 16):
        assert generate(model, PROMPTS, NEW_TOKENS, page_size=page_size, chunk=9) == want
        assert generate(model, PROMPTS, NEW_TOKENS, page_size=page_size, int8=True) == codes


@pytest.mark.parametrize("published", [True, False])
def test_stacked_experts_are_read_either_way_round(published: bool, tmp_path: Path) -> None:
    """Qwen3-VL's published checkpoints have them `[in, out]`, which transformers turns when it reads and not back."""
    path = make_multimodal("qwen3_vl_moe", tmp_path)
    want, file = greedy_of_whole(path, PROMPTS, NEW_TOKENS), path / "model.safetensors"
    stored = load_file(file)
    inner = {name: tensor for name, tensor in stored.items() if "language_model" in name and ".experts." in name}
    turned = next(tensor for name, tensor in inner.items() if name.endswith("gate_up_proj")).shape[1] == 64
    if published != turned:
        stored |= {name: tensor.transpose(1, 2).contiguous() for name, tensor in inner.items()}
        save_file(stored, file, {"format": "pt"})
    assert describe(path).backend == "native"
    assert generate(load(path), PROMPTS, NEW_TOKENS, page_size=16, chunk=9) == want


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "glm4v", "mistral3"])
def test_what_is_read_as_a_whole_is_held_without_towers(kind: str, tmp_path: Path) -> None:
    """A mixture with layers that are none; a language model that has no class of its own; Mistral Small 4."""
    text: dict[str, Any] = {"qwen3_vl_moe": {"mlp_only_layers": [1]}, "mistral3": MISTRAL_4}.get(kind, {})
    path = make_multimodal(kind, tmp_path, text=text)
    want = greedy_of_whole(path, PROMPTS, NEW_TOKENS)
    model: Any = load(path)
    assert not [name for name, _ in model.model.named_parameters() if "visual" in name or "vision" in name]
    assert describe(path).backend == "transformers"
    assert generate(model, PROMPTS, NEW_TOKENS, page_size=16, chunk=9) == want


def test_what_is_counted_and_read_is_the_language_model(tmp_path: Path) -> None:
    path = make_multimodal("mistral3", tmp_path)
    stored = load_file(path / "model.safetensors")
    seen: list[tuple[int, int]] = []
    load(path, progress=lambda done, total: seen.append((done, total)))
    language = sum(tensor.nbytes for name, tensor in stored.items() if name.startswith("language_model."))
    assert 0 < language < sum(tensor.nbytes for tensor in stored.values())
    assert describe(path).parameter_bytes == seen[-1][0] == seen[-1][1] == language
    assert describe(path).backend == "native"


@pytest.mark.parametrize("kind", ["mistral3", "aya_vision"])  # a native one, and one by transformers
def test_strange_tensors_of_the_language_model_are_refused_and_others_are_not(kind: str, tmp_path: Path) -> None:
    path = make_multimodal(kind, tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"audio_tower.strange": torch.zeros(2)}, path / "model.safetensors", {"format": "pt"})
    load(path)
    strange = "language_model.model.layers.0.strange.weight"
    save_file(tensors | {strange: torch.zeros(2)}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.0\.strange\.weight"):
        load(path)


@pytest.mark.parametrize("says", [False, None])
def test_a_head_of_its_own_is_used(says: bool | None, tmp_path: Path) -> None:
    """Published models leave `tie_word_embeddings` out as often as not."""
    path = make_multimodal("llava", tmp_path, tie_word_embeddings=False)
    want = greedy_of_whole(path, PROMPTS, NEW_TOKENS)
    config = json.loads((path / "config.json").read_text())
    for part in (config, config["text_config"]):
        part.pop("tie_word_embeddings", None)
    if says is not None:
        config["tie_word_embeddings"] = says
    (path / "config.json").write_text(json.dumps(config))
    assert generate(load(path), PROMPTS, NEW_TOKENS, page_size=16) == want


def test_a_config_that_leaves_all_to_its_class_is_completed(tmp_path: Path) -> None:
    """As those of Gemma 3 do, which name neither heads nor vocabulary."""
    path = make_multimodal("gemma3", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"text_config": {"model_type": "gemma3_text"}}))
    info = describe(path)
    assert (info.vocab_size, info.context_length) == (262_208, 131_072)


def test_multimodal_models_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    path = make_multimodal("llava", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "paligemma"}))
    with pytest.raises(ModelError, match="text of") as caught:
        describe(path)
    assert caught.value.field == "vision_config"


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_layers_that_guess_tokens_are_left_out(kind: str, tmp_path: Path) -> None:
    """Checkpoints bring layers for multi-token prediction, which transformers' models do not have."""
    path = make_multimodal(kind, tmp_path) if kind in KINDS else make_hybrid(kind, tmp_path)
    file = path / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.zeros(2, 2)}, file, {"format": "pt"})
    load(path)
