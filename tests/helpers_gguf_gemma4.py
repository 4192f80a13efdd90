"""GGUF files of Gemma 4, written as llama.cpp's converter does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.helpers_gguf import (
    add_settings,
    add_tokenizer,
    architecture_number,
    common_settings,
    finish,
    name_in_file,
    stored_as,
)
from worker_proc.weights import SINGLE_FILE

_NAMES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


def write_gemma4_gguf(
    source: Path,
    file: Path,
    kind_of: Callable[[str], str],
    *,
    plain: Path | None = None,
    apart: bool = False,
    factors: list[float] | None = None,
    **settings: Any,
) -> Path:
    """`kind_of`, `plain` and `settings` as in `write_gguf`. With `apart`, gates and ups of experts are two tensors;
    `factors` replace those that frequencies are divided by."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "gemma4")
    add_settings(writer, _settings(config) | settings)
    add_tokenizer(writer, source, {})
    names = gguf.get_tensor_name_map(architecture_number("gemma4"), config["num_hidden_layers"])
    random, stands_for = np.random.default_rng(0), {}
    for name, numbers in load_file(source / SINGLE_FILE).items():
        data = numbers.float()
        stored = _name(names, name)
        kind = "F32" if data.dim() == 1 or "ffn_gate_inp" in stored else kind_of(stored)
        raw, meant = stored_as(data.numpy(), kind, random)
        parts = {stored: raw}
        if apart and "ffn_gate_up_exps" in stored:
            gates, ups = np.split(raw, 2, axis=1)
            parts = {stored.replace("_gate_up_", "_gate_"): gates, stored.replace("_gate_up_", "_up_"): ups}
        for part, rows in parts.items():
            writer.add_tensor(part, np.ascontiguousarray(rows), raw_dtype=gguf.GGMLQuantizationType[kind])
        stands_for[name] = torch.from_numpy(np.ascontiguousarray(meant))
    far = _full(config)["head_dim"]
    turning = int(config["rope_parameters"]["full_attention"]["partial_rotary_factor"] * far / 2)
    divided = [1.0] * turning + [1e30] * (far // 2 - turning) if factors is None else factors
    writer.add_tensor("rope_freqs.weight", np.array(divided, np.float32))
    finish(writer)
    if plain is not None:
        shutil.copytree(source, plain)
        save_file(stands_for, plain / SINGLE_FILE)
    return file


def _full(config: dict[str, Any]) -> dict[str, Any]:
    """What layers without a window have."""
    said: dict[str, Any] = next(iter(config["per_layer_config"].values()))
    return {"num_key_value_heads": config["num_key_value_heads"]} | said


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    layers, borrowing, near = config["num_hidden_layers"], config["num_kv_shared_layers"], config["head_dim"]
    slides, full = [kind == "sliding_attention" for kind in config["layer_types"]], _full(config)
    channels = config["intermediate_size"]
    values = common_settings(config) | {
        "attention.key_length": full["head_dim"],
        "attention.value_length": full["head_dim"],
        "attention.key_length_swa": near,
        "attention.value_length_swa": near,
        "rope.dimension_count": full["head_dim"],
        "rope.dimension_count_swa": near,
        "rope.freq_base_swa": float(config["rope_parameters"]["sliding_attention"]["rope_theta"]),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": borrowing,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
    }
    if full["num_key_value_heads"] != config["num_key_value_heads"]:
        kinds = (full["num_key_value_heads"], config["num_key_value_heads"])
        values["attention.head_count_kv"] = [kinds[slide] for slide in slides]
    if config["use_double_wide_mlp"]:
        values["feed_forward_length"] = [channels * (1 + (layer >= layers - borrowing)) for layer in range(layers)]
    if config["final_logit_softcapping"] is not None:
        values["final_logit_softcapping"] = float(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        values |= {"expert_count": config["num_experts"], "expert_used_count": config["top_k_experts"]}
        values["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return values


def _name(names: gguf.TensorNameMap, name: str) -> str:
    for last, stored in _NAMES.items():
        if name.endswith(last):
            return f"blk.{name.split('.')[2]}.{stored}"
    if name.endswith(("layer_scalar", "_proj")):  # parameters that are no modules'
        return name_in_file(names, name + ".weight")
    return name_in_file(names, name)
