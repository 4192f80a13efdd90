"""What `quantization_config` may say, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers_models import make_checkpoint
from tests.helpers_quantized import bytes_config, quantization_config
from worker_proc.errors import ModelError
from worker_proc.models.describe import describe
from worker_proc.quantization.scheme import Scheme
from worker_proc.quantization.stored_config import parse_stored

INT4 = Scheme(4, 32)


def check_field(directory: Path, stored: dict[str, Any], field: str) -> None:
    """What a checkpoint says of its codes is refused for this field."""
    path = make_checkpoint("llama", directory)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    with pytest.raises(ModelError) as caught:
        describe(path)
    assert caught.value.field == f"quantization_config: {field}"


@pytest.mark.parametrize(
    ("method", "change", "field"),
    [
        ("gptq", {"quant_method": "bitsandbytes"}, "quant_method"),
        ("gptq", {"quant_method": "fp8", "fmt": "e5m2"}, "fmt"),
        ("gptq", {"quant_method": "fp8", "scale_fmt": "ue8m0"}, "scale_fmt"),
        ("gptq", {"quant_method": "fp8", "weight_block_size": [128, 48]}, "weight_block_size"),
        ("gptq", {"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size"),
        ("gptq", {"quant_method": "fp8", "kv_cache_scheme": "static"}, "kv_cache_scheme"),
        ("gptq", {"bits": 3}, "bits"),
        ("gptq", {"bits": True}, "bits"),
        ("gptq", {"desc_act": "yes"}, "desc_act"),
        ("gptq", {"group_size": 48}, "group_size"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format"),
        ("gptq", {"sym": None}, "sym"),
        ("gptq", {"dynamic": {"+:.*down_proj": {"sym": False}}}, "dynamic: +:.*down_proj"),
        ("gptq", {"dynamic": {"-:.*o_proj": {}, ".*up_proj": {"bits": 8}}}, "dynamic: .*up_proj"),
        ("gptq", {"dynamic": {".*": {"group_size": 64}}}, "dynamic: .*"),
        ("gptq", {"dynamic": {".*": {"desc_act": True}}}, "dynamic: .*"),
        ("gptq", {"dynamic": {".*": {"bits": 3}}}, "bits"),
        ("gptq", {"dynamic": {".*": None}}, "dynamic: .*"),
        ("gptq", {"dynamic": ["-:.*"]}, "dynamic"),
        ("awq", {"version": "gemv"}, "version"),
        ("awq", {"bits": 8}, "bits"),
        ("awq", {"zero_point": False}, "zero_point"),
        ("compressed-tensors", {"format": "nvfp4-pack-quantized"}, "format"),
        ("compressed-tensors", {"format": "float-quantized"}, "num_bits"),
        ("compressed-tensors", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ("compressed-tensors", {"config_groups": {}}, "config_groups"),
    ],
)
def test_other_formats_are_refused_by_name(method: str, change: dict[str, Any], field: str, tmp_path: Path) -> None:
    check_field(tmp_path, quantization_config(method, INT4) | change, field)


def test_rules_for_modules_may_exclude_them_and_repeat_what_holds_for_all() -> None:
    stored = quantization_config("gptq", INT4)
    same = {"bits": 4, "group_size": 32, "sym": True, "damp_percent": 0.2}
    rules = {"-:.*o_proj": {}, "+:.*down_proj": same, ".*up_proj": {}}
    for dynamic in (rules, {}, None):
        config = {"quantization_config": stored | {"dynamic": dynamic}}
        assert parse_stored(config) == parse_stored({"quantization_config": stored})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_bits": 2}, "num_bits"),
        ({"type": "float"}, "type"),
        ({"strategy": "tensor"}, "strategy"),
        ({"actorder": "dynamic"}, "actorder"),
        ({"group_size": 16}, "group_size"),
        ({"dynamic": True}, "dynamic"),
    ],
)
def test_other_schemes_are_refused_by_name(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    stored = quantization_config("compressed-tensors", INT4)
    stored["config_groups"]["group_0"]["weights"] |= change
    check_field(tmp_path, stored, field)


@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [
        ("float", {"type": "int"}, "type"),
        ("float", {"symmetric": False}, "symmetric"),
        ("float", {"strategy": "token"}, "strategy"),
        ("int", {"num_bits": 3}, "num_bits"),
        ("float", {"num_bits": 4}, "num_bits"),
        ("int", {"actorder": "weight"}, "actorder"),
        ("float", {"strategy": "block", "block_structure": [128]}, "block_structure"),
    ],
)
def test_other_bytes_are_refused_by_name(kind: str, change: dict[str, Any], field: str, tmp_path: Path) -> None:
    check_field(tmp_path, bytes_config(kind, **change), field)


@pytest.mark.parametrize("kind", ["gpt2", "vaultgemma"])
def test_models_whose_codes_are_not_read_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config("gptq", INT4)}))
    with pytest.raises(ModelError, match=r"quantization_config = 'gptq': .* llama, mistral, qwen2, qwen3, .* only"):
        describe(path)
