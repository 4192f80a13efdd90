"""Tiny random-weight checkpoints of models with recurrent layers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from tests.helpers_models import VOCAB_SIZE, make_model, make_tokenizer

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "initializer_range": 0.15, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_LINEAR, _FULL = "linear_attention", "full_attention"
_MIXED = [_LINEAR, _FULL, _LINEAR, _LINEAR]
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": _MIXED,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
}  # fmt: skip
_STATE_SPACE = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2, "mamba_d_state": 16, "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}  # fmt: skip

_NO_ATTENTION = {"num_attention_heads": None, "num_key_value_heads": None, "max_position_embeddings": None}
_MAMBA = _NO_ATTENTION | {"state_size": 16, "initializer_range": 0.4}

WITHOUT_ATTENTION = ("mamba", "falcon_mamba", "mamba2")
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _EXPERTS,
    "qwen3_next": _DELTA | _EXPERTS,
    "olmo_hybrid": _DELTA,
    "lfm2": {"layer_types": ["conv", _FULL, "conv", "conv"], "conv_L_cache": 3, "block_ff_dim": 96},
    "lfm2_moe": {
        "layer_types": ["conv", _FULL, "conv", "conv"], "conv_L_cache": 3, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "num_dense_layers": 1,
    },
    "granitemoehybrid": _STATE_SPACE | {
        "layer_types": _MIXED, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48,
    },
    "bamba": _STATE_SPACE | {"attn_layer_indices": [1]},
    "jamba": {
        "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_dt_rank": 8, "mamba_d_state": 16,
    },
    "falcon_h1": _STATE_SPACE | {"mamba_d_ssm": 128},
    "nemotron_h": {
        "layers_block_type": [_LINEAR, "moe", _FULL, "mlp", _LINEAR], "num_hidden_layers": 5, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48,
    },
    "kimi_linear": {
        "layer_types": _MIXED, "linear_head_dim": 16, "linear_num_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "qk_nope_head_dim": 16, "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1,
        "moe_intermediate_size": 48, "model_max_length": 256, "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 1, "n_mamba_heads": 8,
        "mamba_headdim": 16, "mamba_ngroups": 2, "mamba_d_state": 16, "chunk_size": 16, "mamba_expand": 2,
    },
    "mamba": _MAMBA | {"time_step_rank": 8},
    "falcon_mamba": _MAMBA | {"time_step_rank": 8},
    "mamba2": _MAMBA | {"num_heads": 8, "n_groups": 2, "chunk_size": 16, "expand": 2},
}  # fmt: skip


def hybrid_config(kind: str, **overrides: Any) -> Any:
    """The configuration of a kind in `HYBRIDS`, with `overrides` replacing its fields."""
    return AutoConfig.for_model(kind, **{**_BASE, **HYBRIDS[kind], **overrides})


def make_hybrid(kind: str, path: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a checkpoint of a kind in `HYBRIDS`, with a tokenizer; returns `path`."""
    path = Path(path)
    model = make_model(hybrid_config(kind, **overrides), seed)
    for name, buffer in model.named_buffers():
        if name.endswith(".expert_bias"):  # whatever a router says, these are the likeliest: 1, 3, 0, 2
            buffer.copy_(torch.tensor([0.0, 3.0, -3.0, 1.5]))
    model.save_pretrained(path)  # type: ignore[operator]
    make_tokenizer().save_pretrained(path)
    return path
