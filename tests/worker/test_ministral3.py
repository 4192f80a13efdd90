"""Ministral 3 in the native decoder and in GGUF files: queries are scaled by their positions."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers_divided import check_native, reports_of
from tests.helpers_gguf import directory_of, write_gguf
from tests.helpers_models import VOCAB_SIZE, make_model, make_tokenizer
from tests.helpers_multimodal import KINDS as MULTIMODAL
from tests.helpers_multimodal import make_multimodal
from tests.helpers_paged import NEW_TOKENS, generate, make_prompts
from tests.helpers_quantized import store_bytes
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_hybrid_decoder import LEVELS, all_logits, error, load, load_native, matrices, round_weights
from worker_proc.cpu.features import Level
from worker_proc.gguf.directory import GgufError, directory_for
from worker_proc.models.describe import describe, read_config
from worker_proc.models.hybrid_families import hybrid_spec
from worker_proc.models.registry import has_recurrent_layers, keys_hold_positions

pytestmark = needs_compiler
PROMPTS = make_prompts(VOCAB_SIZE)  # of up to 90 tokens
ROPE = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 16.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.8, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "initializer_range": 0.15, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def make(path: Path, rope: dict[str, Any] | None = None, **changes: Any) -> Path:
    config = AutoConfig.for_model("ministral3", **SMALL | {"rope_parameters": ROPE | (rope or {})} | changes)
    make_model(config).save_pretrained(path)  # type: ignore[operator]
    make_tokenizer().save_pretrained(path)
    return path


def config_of(rope: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """As transformers writes it."""
    config = AutoConfig.for_model("ministral3", **SMALL | {"rope_parameters": ROPE}).to_dict()
    return config | {"rope_parameters": ROPE | (rope or {})} | changes


def reference(path: Path, prompt: list[int]) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        wanted: Tensor = model(torch.tensor([prompt])).logits[0]
    return wanted


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 320])
def test_queries_are_scaled_by_their_positions(head_dim: int, level: Level, tmp_path: Path) -> None:
    sizes = {"head_dim": head_dim, "initializer_range": 0.1}
    path = round_weights(make(tmp_path / "model", **sizes))
    want, got = reference(path, PROMPTS[4]), all_logits(load_native(path, level), PROMPTS[4])
    assert error(got, want) < 0.04
    unscaled = round_weights(make(tmp_path / "unscaled", {"llama_4_scaling_beta": 0.0}, **sizes))
    other = all_logits(load_native(unscaled, level), PROMPTS[4])
    assert torch.equal(other[:16], got[:16]), "the first period is as without"
    assert error(other[16:], got[16:]) > 0.1


@pytest.mark.parametrize("level", LEVELS)
def test_tokens_do_not_depend_on_chunks_and_pages(level: Level, tmp_path: Path) -> None:
    model = load_native(make(tmp_path), level)
    want = generate(model, PROMPTS, NEW_TOKENS, page_size=16)
    for page_size, chunk in ((1, 9), (16, 1), (8, 30)):
        assert generate(model, PROMPTS, NEW_TOKENS, page_size=page_size, chunk=chunk) == want


def test_a_window_is_that_of_transformers(tmp_path: Path) -> None:
    path = round_weights(make(tmp_path, sliding_window=12, initializer_range=0.1))
    assert error(all_logits(load_native(path), PROMPTS[4]), reference(path, PROMPTS[4])) < 0.04


def test_it_keeps_no_states(tmp_path: Path) -> None:
    path = make(tmp_path)
    assert not has_recurrent_layers(path) and not keys_hold_positions(path)


def test_a_config_without_rotations_means_those_of_its_class() -> None:
    spec, whole = hybrid_spec(config_of(rope_parameters=None)), AutoConfig.for_model("ministral3", **SMALL).to_dict()
    assert spec is not None and spec == hybrid_spec(whole | {"model_type": "ministral3"})
    (rope,) = set(spec.ropes)
    assert rope is not None and (rope.query_beta, rope.original_context, rope.attention_factor) == (0.1, 16384, 1.0)


@pytest.mark.parametrize(
    "change",
    [
        {"rope": {"llama_4_scaling_beta": -1.0}}, {"rope": {"llama_4_scaling_beta": "much"}}, {"rope": {"unheard": 1}},
        {"rope": {"rope_type": "linear", "llama_4_scaling_beta": 0.1}}, {"architectures": ["Changed"]},
    ],
    ids=str,
)  # fmt: skip
def test_others_are_left_to_transformers(change: dict[str, Any]) -> None:
    assert hybrid_spec(config_of(**change)) is None


@pytest.mark.parametrize("level", LEVELS)
def test_stored_bytes_are_what_they_stand_for(level: Level, tmp_path: Path) -> None:
    """As it is published: FP8 with a scale for each matrix, and activations with one of theirs."""
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False}
    source = make(tmp_path / "source", initializer_range=0.08)
    codes, plain = store_bytes(source, tmp_path, config, (None, None), "weight_scale_inv")
    assert describe(codes).quantization == "fp8"
    of_codes, of_plain = (load_native(path, level) for path in (codes, plain))
    for one, other in zip(of_codes.weights.layers, of_plain.weights.layers, strict=True):
        for got, meant in zip(matrices(one), matrices(other), strict=True):
            assert error(*(matrix.unpack(torch.arange(matrix.outputs)) for matrix in (got, meant))) < 0.003
    assert error(*(all_logits(model, PROMPTS[4]) for model in (of_codes, of_plain))) < 0.1


def test_the_language_model_of_a_multimodal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it is where it is published."""
    language = {"model_type": "ministral3", "sliding_window": None, "rope_parameters": ROPE}
    monkeypatch.setitem(MULTIMODAL, "mistral3", language)
    path = make_multimodal("mistral3", tmp_path)
    native, half = load_native(path), load(path, None, dtype=torch.float32)
    assert error(all_logits(native, PROMPTS[4]), all_logits(half, PROMPTS[4])) < 0.1


# ---- GGUF ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tempered", [False, True])
def test_a_plain_file_is_the_model_that_it_was_made_of(tempered: bool, tmp_path: Path) -> None:
    """Without scales it is Mistral Small 3."""
    rope = {} if tempered else {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    source = make(tmp_path / "source", **rope)
    file = write_gguf(source, tmp_path / "m.gguf", lambda name: "BF16", plain=tmp_path / "plain")
    directory = directory_of(file)
    assert hybrid_spec(read_config(directory)) == hybrid_spec(read_config(source))
    got, want = (all_logits(load_native(path), PROMPTS[4]) for path in (directory, tmp_path / "plain"))
    assert torch.equal(got, want)


def test_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    source = make(tmp_path / "source", initializer_range=0.08, intermediate_size=128)
    directory = directory_of(write_gguf(source, tmp_path / "m.gguf", lambda name: "Q8_0"))
    ((_, reports),) = reports_of(2, tmp_path, {"ministral3": directory}).values()
    check_native(directory, reports)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope.scaling.type": "none"}, "mistral3.rope.scaling.type = None: must be yarn"),
        ({"rope.scaling.yarn_log_multiplier": 0.5}, "mistral3.rope.scaling.yarn_log_multiplier = 0.5: not supported"),
        ({"attention.temperature_scale": -1.0}, "mistral3.attention.temperature_scale = -1.0: must be a positive"),
        ({"attention.temperature_length": 64}, "mistral3.attention.temperature_length = 64: an unknown setting"),
    ],
)  # fmt: skip
def test_a_setting_that_would_change_the_numbers_is_named(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = write_gguf(make(tmp_path / "source"), tmp_path / "m.gguf", lambda name: "F32", **settings)
    with pytest.raises(GgufError, match=re.escape(message)):
        directory_for(file, tmp_path / "cache")
