"""GGUF files of Qwen 3.5 and Qwen3-Next, written as llama.cpp's converter does: norms around 1, rates in place of
their logarithms, q, k, v apart from z, and (of Qwen 3.5) value heads in turns: head h goes with key head h % key heads.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers_gguf import (
    add_settings,
    add_tokenizer,
    architecture_number,
    common_settings,
    finish,
    name_in_file,
    stack_experts,
    stored_as,
)
from worker_proc.weights import SINGLE_FILE

ARCHITECTURES = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next"}
_V_ROWS = ("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")  # a part for each value head
_V_LAST_ROWS = ("in_proj_qkv.weight", "conv1d.weight")


def write_hybrid_gguf(
    source: Path, file: Path, kind_of: Callable[[str], str], *, plain: Path | None = None, guesses: bool = False,
    **settings: Any,
) -> Path:  # fmt: skip
    """`kind_of` and `settings` as in `write_gguf`. `plain` is where another file goes, with the numbers that are meant
    in float32; `guesses` adds a layer that guesses further tokens."""
    config = json.loads((source / "config.json").read_text())
    writers = [gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]]) for path in (file, plain) if path is not None]
    layers, random = config["num_hidden_layers"], np.random.default_rng(0)
    for writer in writers:
        more = {"block_count": layers + 1, "nextn_predict_layers": 1} if guesses else {}
        add_settings(writer, _settings(config, layers + guesses) | more | settings)
        add_tokenizer(writer, source, {"pre": "qwen35"})
    tensors = dict(_as_stored(config, load_file(source / SINGLE_FILE)))
    if guesses:
        last = {f"blk.{layers}.{name}": torch.ones(8, 8) for name in ("nextn.eh_proj.weight", "attn_q.weight")}
        tensors |= last
    for name, numbers in tensors.items():
        kind = kind_of(name) if numbers.dim() > 1 and "conv1d" not in name else "F32"
        raw, meant = stored_as(numbers.contiguous().numpy(), kind, random)
        for writer, (data, of_kind) in zip(writers, ((raw, kind), (meant, "F32")), strict=False):
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[of_kind])
    for writer in writers:
        finish(writer)
    return file


def _settings(config: dict[str, Any], layers: int) -> dict[str, Any]:
    values = common_settings(config) | {
        "rope.dimension_count": int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
        "full_attention_interval": 4,
    }
    values["attention.recurrent_layers"] += [False] * (layers - config["num_hidden_layers"])
    if config["model_type"] != "qwen3_next":
        values["rope.dimension_sections"] = [11, 11, 10, 0]
    if "num_experts" in config:
        values |= {"expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"]}
        values["expert_feed_forward_length"] = config["moe_intermediate_size"]
        values["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    return values


def _as_stored(config: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """By their names in the file, float32."""
    number = architecture_number(ARCHITECTURES[config["model_type"]])
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    for name, stored in _apart(config, stack_experts(tensors)).items():
        numbers, last = stored.float(), name.rpartition("linear_attn.")[2]
        if config["model_type"] != "qwen3_next" and "linear_attn" in name:
            numbers = _in_turns(config, last, numbers)
        if last == "A_log":
            numbers = -numbers.exp()
        elif last == "conv1d.weight":
            numbers = numbers[:, 0]
        elif name.endswith("norm.weight") and last != "norm.weight":
            numbers = numbers + 1
        yield name_in_file(names, name.replace("dt_bias", "dt_proj.bias")), numbers


def _apart(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Qwen3-Next's q, k, v and z, which lie key head by key head, as q, k and v of all heads, and z."""
    keys, each = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    values = each * config["linear_value_head_dim"]
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "in_proj_qkvz" in name:
            by_heads = tensor.view(keys, -1, tensor.shape[1])
            q, k, v, z = by_heads.split([config["linear_key_head_dim"]] * 2 + [values] * 2, 1)
            found[name.replace("qkvz", "qkv")] = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
            found[name.replace("qkvz", "z")] = z.flatten(0, 1)
        else:
            found[name] = tensor
    return found


def _in_turns(config: dict[str, Any], name: str, numbers: Tensor) -> Tensor:
    """Value heads: the first ones of all key heads, then the second ones, ..."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]

    def turned(x: Tensor) -> Tensor:
        return x.reshape(keys, heads // keys, len(x) // heads, *x.shape[1:]).transpose(0, 1).reshape(x.shape)

    if name in _V_ROWS:
        return turned(numbers)
    if name in _V_LAST_ROWS:
        first = 2 * keys * config["linear_key_head_dim"]
        return torch.cat((numbers[:first], turned(numbers[first:])))
    return turned(numbers.t()).t() if name == "out_proj.weight" else numbers
