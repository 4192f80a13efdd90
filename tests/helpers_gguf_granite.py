"""GGUF files of Granite 4's hybrids, written as llama.cpp's converter does: gates apart from ups, rates in place of
their logarithms, norms by groups, and rows of queries and keys by turns.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers_gguf import add_settings, add_tokenizer, common_settings, finish, stored_as
from worker_proc.weights import SINGLE_FILE

_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mamba.in_proj": "ssm_in",
    "mamba.out_proj": "ssm_out",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.norm": "ssm_norm",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
}
_OUTSIDE = {"embed_tokens": "token_embd", "norm": "output_norm"}


def write_granite_gguf(
    source: Path, file: Path, kind_of: Callable[[str], str], *, plain: Path | None = None, **settings: Any
) -> Path:
    """`kind_of` and `settings` as in `write_gguf`. `plain` is where another file goes, with the numbers that are meant
    in float32."""
    config, random = json.loads((source / "config.json").read_text()), np.random.default_rng(0)
    writers = [gguf.GGUFWriter(path, "granitehybrid") for path in (file, plain) if path is not None]
    for writer in writers:
        add_settings(writer, _settings(config) | settings)
        add_tokenizer(writer, source, {})
    for name, numbers in _stored(config, load_file(source / SINGLE_FILE)):
        small = numbers.dim() == 1 or any(part in name for part in ("ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm", "_inp"))
        kind = "F32" if small else kind_of(name)
        raw, meant = stored_as(numbers.contiguous().numpy(), kind, random)
        for writer, (data, of_kind) in zip(writers, ((raw, kind), (meant, "F32")), strict=False):
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[of_kind])
    for writer in writers:
        finish(writer)
    return file


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    attends = [kind == "full_attention" for kind in config["layer_types"]]
    values = common_settings(config) | {
        "attention.head_count_kv": [config["num_key_value_heads"] * attend for attend in attends],
        "attention.scale": float(config["attention_multiplier"]),
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "logit_scale": float(config["logits_scaling"]),
        "rope.scaling.finetuned": config["position_embedding_type"] == "rope",
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
    }
    if config["num_local_experts"]:
        return values | {
            "expert_count": config["num_local_experts"],
            "expert_used_count": config["num_experts_per_tok"],
        }
    return values | {"feed_forward_length": config["shared_intermediate_size"]}


def _stored(config: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """By their names in the file, float32."""
    for name, stored in tensors.items():
        numbers, (_, *rest) = stored.float(), name.removeprefix("model.").split(".", 2)
        if name == "lm_head.weight":
            yield "output.weight", numbers
        elif not name.startswith("model.layers."):
            yield _OUTSIDE[name.split(".")[1]] + ".weight", numbers
        else:
            for part, data in _of_layer(config, rest[1], numbers):
                yield f"blk.{rest[0]}.{part}", data


def _of_layer(config: dict[str, Any], name: str, numbers: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name.endswith("input_linear.weight"):
        last = "_exps" if "sparse" in name else "_shexp" if config["num_local_experts"] else ""
        gate, up = numbers.chunk(2, dim=-2)
        yield from ((f"ffn_gate{last}.weight", gate), (f"ffn_up{last}.weight", up))
    elif name == "shared_mlp.output_linear.weight":
        yield f"ffn_down{'_shexp' if config['num_local_experts'] else ''}.weight", numbers
    else:
        (old, new), *_ = ((old, new) for old, new in _NAMES.items() if name.startswith(old))
        yield name.replace(old, new), _changed(config, name, numbers)


def _changed(config: dict[str, Any], name: str, numbers: Tensor) -> Tensor:
    if name.endswith("A_log"):
        return -numbers.exp()[:, None]
    if name.endswith("mamba.D"):
        return numbers[:, None]
    if name == "mamba.norm.weight":
        return numbers.view(config["mamba_n_groups"], -1)
    if name == "mamba.conv1d.weight":
        return numbers[:, 0]
    if "q_proj" in name or "k_proj" in name:
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return numbers.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return numbers
