"""Small random Gemma 4 checkpoints of each kind that is published, and of odd sizes."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from tests.helpers_models import VOCAB_SIZE, make_model, make_tokenizer

_NEAR, _FULL = "sliding_attention", "full_attention"
_ROPES = {
    _NEAR: {"rope_type": "default", "rope_theta": 300.0},
    _FULL: {"rope_type": "proportional", "rope_theta": 3000.0, "partial_rotary_factor": 0.25},
}
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "sliding_window": 12,
    "layer_types": [_NEAR, _FULL, _NEAR, _FULL, _NEAR, _FULL], "max_position_embeddings": 256,
    "rope_parameters": _ROPES,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "final_logit_softcapping": 30.0,
    "initializer_range": 0.1, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_INPUTS = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB_SIZE}
_MIXTURE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 4, "moe_intermediate_size": 48}
_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "inputs": _INPUTS | {"num_key_value_heads": 1, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    "keys-as-values": _AS_VALUES | {"num_key_value_heads": 4},
    "unified": _AS_VALUES
    | {"kind": "gemma4_unified_text", "num_kv_shared_layers": 2, "use_bidirectional_attention": None},
    "mixture": _MIXTURE | _AS_VALUES,
    "all": _INPUTS | _MIXTURE | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "odd": _INPUTS
    | {
        "hidden_size": 72, "intermediate_size": 50, "head_dim": 20, "global_head_dim": 44, "num_attention_heads": 3,
        "num_key_value_heads": 1, "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True, "tie_word_embeddings": True, "final_logit_softcapping": None,
    },
    "mixture-odd": _MIXTURE | {"hidden_size": 72, "intermediate_size": 50, "moe_intermediate_size": 40, "head_dim": 24},
    "wide-heads": _INPUTS
    | {"head_dim": 256, "global_head_dim": 512, "num_hidden_layers": 3, "layer_types": [_NEAR, _FULL, _FULL]},
}  # fmt: skip


def gemma4_config(shape: str = "plain", **changes: Any) -> Any:
    """The configuration of one of `SHAPES`."""
    fields = {"kind": "gemma4_text"} | SMALL | SHAPES[shape] | changes
    return AutoConfig.for_model(fields.pop("kind"), **fields)


def make_gemma4(shape: str, path: Path, **changes: Any) -> Path:
    """A checkpoint of one of `SHAPES`."""
    model = make_model(gemma4_config(shape, **changes))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith(("layer_scalar", "per_expert_scale")):
                tensor.uniform_(0.5, 1.5)
            elif name.endswith("q_norm.weight"):  # as scores are not scaled: else each token would see but one other
                tensor.mul_(tensor.shape[0] ** -0.5)
    model.save_pretrained(path)  # type: ignore[operator]
    make_tokenizer().save_pretrained(path)
    return path
