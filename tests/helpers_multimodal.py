"""Tiny random-weight multimodal checkpoints, and what transformers answers to text with them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.helpers_hybrid import HYBRIDS
from tests.helpers_models import VOCAB_SIZE, make_tokenizer

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
_SLIDING: dict[str, Any] = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"] * 2}
_SECTIONS: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_GEMMA4 = _SLIDING | {
    "global_head_dim": 32,
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
_UNTIED = {"tie_word_embeddings": False}  # else such tiny models repeat themselves
_WHOLE: dict[str, dict[str, Any]] = {"gemma4": _UNTIED, "gemma4_unified": _UNTIED}
_DELTA = {"rope_parameters": _SECTIONS | {"mrope_interleaved": True, "partial_rotary_factor": 0.5}} | HYBRIDS[
    "qwen3_5_text"
]
_TOWERS = ("vision_config", "audio_config", "qformer_config")

# What each kind's language model has beside `_TEXT`.
KINDS: dict[str, dict[str, Any]] = {
    "aya_vision": {"model_type": "cohere2"} | _SLIDING,
    "cohere2_vision": {"model_type": "cohere2"} | _SLIDING,
    "deepseek_vl": {"model_type": "llama"},
    "gemma3": {"model_type": "gemma3_text", "query_pre_attn_scalar": 16} | _SLIDING,
    "gemma4": {"model_type": "gemma4_text"} | _GEMMA4,
    "gemma4_unified": {"model_type": "gemma4_unified_text"} | _GEMMA4,
    "idefics3": {"model_type": "llama"},
    "internvl": {"model_type": "qwen2"},
    "lfm2_vl": {"model_type": "lfm2"} | HYBRIDS["lfm2"],
    "llava": {"model_type": "llama"},
    "llava_next": {"model_type": "mistral", "sliding_window": None},
    "llava_next_video": {"model_type": "llama"},
    "llava_onevision": {"model_type": "qwen2"},
    "mistral3": {"model_type": "mistral", "sliding_window": None},
    "ovis2": {"model_type": "qwen2"},
    "qwen2_vl": {"model_type": "qwen2_vl_text", "rope_parameters": _SECTIONS},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl_text", "rope_parameters": _SECTIONS},
    "qwen3_5": {"model_type": "qwen3_5_text"} | _DELTA,
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text"} | _DELTA | HYBRIDS["qwen3_5_moe_text"],
    "qwen3_vl": {"model_type": "qwen3_vl_text", "rope_parameters": _SECTIONS | {"mrope_interleaved": True}},
    "smolvlm": {"model_type": "llama"},
    "video_llava": {"model_type": "llama"},
    "vipllava": {"model_type": "llama"},
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "depth": 1,
    "embed_dim": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 32,
    "vocab_size": 64,
    "num_visual_indicator_tokens": 2,
}


def make_multimodal(kind: str, path: Path, **overrides: Any) -> Path:
    """Write a checkpoint with config and tokenizer; returns `path`. `overrides` are of the whole model's fields."""
    whole = AutoConfig.for_model(kind)
    parts: dict[str, Any] = {"text_config": _TEXT | KINDS[kind]}
    for key in _TOWERS:
        tower = getattr(whole, key, None)
        if tower is not None:
            known = tower.to_dict()
            small = {name: value for name, value in _TOWER.items() if name in known}
            parts[key] = small | {"model_type": tower.model_type} if key == "vision_config" else None
    special = {key: 3 for key in whole.to_dict() if key.endswith(("_token_id", "_token_index"))}  # of images and sound
    config = AutoConfig.for_model(kind, **special | parts | _WHOLE.get(kind, {}) | overrides)
    torch.manual_seed(2)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and not name.endswith("bias")
            parameter.normal_(1.0, 0.1) if is_norm else parameter.normal_(0.0, 0.15)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def greedy_of_whole(path: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """What the whole model of transformers answers to each prompt alone, in float32."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    answers = []
    for prompt in prompts:
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        answers.append(found[0, len(prompt) :].tolist())
    return answers
