"""Tiny random-weight multimodal checkpoints, and what transformers answers to text with them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from tests.helpers_hybrid import HYBRIDS
from tests.helpers_models import KINDS as MODELS
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
_TOWERS = ("vision_config", "audio_config", "qformer_config", "high_res_vision_config")
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_PART = {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
_GEMMA3N = _SLIDING | {
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE,
    "laurel_rank": 8, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
}  # fmt: skip

# What each kind's language model has beside `_TEXT`.
KINDS: dict[str, dict[str, Any]] = {
    "aria": {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "aya_vision": {"model_type": "cohere2"} | _SLIDING,
    "cohere2_vision": {"model_type": "cohere2"} | _SLIDING,
    "deepseek_vl": {"model_type": "llama"},
    "deepseek_vl_hybrid": {"model_type": "llama"},
    "ernie4_5_vl_moe": {
        "model_type": "ernie4_5_vl_moe_text",
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": [48, 48],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]},
    },
    "exaone4_5": {"model_type": "exaone4"} | _SLIDING,
    "gemma3": {"model_type": "gemma3_text", "query_pre_attn_scalar": 16} | _SLIDING,
    "gemma3n": {"model_type": "gemma3n_text"} | _GEMMA3N,
    "gemma4": {"model_type": "gemma4_text"} | _GEMMA4,
    "gemma4_unified": {"model_type": "gemma4_unified_text"} | _GEMMA4,
    "glm46v": {"model_type": "glm4v_text", "rope_parameters": _SECTIONS | _PART},
    "glm4v": {"model_type": "glm4v_text", "rope_parameters": _SECTIONS | _PART},
    "glm4v_moe": {"model_type": "glm4v_moe_text", "rope_parameters": _SECTIONS | _PART, "first_k_dense_replace": 1}
    | _ROUTED,
    "hyperclovax_vision_v2": {"model_type": "hyperclovax"},
    "idefics2": {"model_type": "mistral", "sliding_window": None},
    "idefics3": {"model_type": "llama"},
    "internvl": {"model_type": "qwen2"},
    "kimi_k25": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "head_dim": 8,
        "first_k_dense_replace": 1,
    }
    | _ROUTED
    | _LATENT,
    "lfm2_vl": {"model_type": "lfm2"} | HYBRIDS["lfm2"],
    "lfm3_vl": {"model_type": "lfm3", "layer_types": ["conv", "full_attention", "conv", "sliding_attention"]}
    | {"sliding_window": 12, "conv_L_cache": 3, "block_ff_dim": 96, "pad_token_id": 0},
    "llama4": MODELS["llama4"],
    "llava": {"model_type": "llama"},
    "llava_next": {"model_type": "mistral", "sliding_window": None},
    "llava_next_video": {"model_type": "llama"},
    "llava_onevision": {"model_type": "qwen2"},
    "minicpmv4_6": {"model_type": "qwen3_5_text"} | _DELTA,
    "minicpmv4_7": {"model_type": "qwen3_5_text"} | _DELTA,
    "mistral3": {"model_type": "mistral", "sliding_window": None},
    "mllama": {"model_type": "mllama_text_model", "cross_attention_layers": [1], "pad_token_id": 0},
    "ovis2": {"model_type": "qwen2"},
    "qwen2_5_omni": {"model_type": "qwen2_5_omni_text", "rope_parameters": _SECTIONS},
    "qwen2_vl": {"model_type": "qwen2_vl_text", "rope_parameters": _SECTIONS},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl_text", "rope_parameters": _SECTIONS},
    "qwen3_5": {"model_type": "qwen3_5_text"} | _DELTA,
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text"} | _DELTA | HYBRIDS["qwen3_5_moe_text"],
    "qwen3_omni_moe": {"model_type": "qwen3_omni_moe_text", "rope_parameters": _SECTIONS} | _EXPERTS,
    "qwen3_vl": {"model_type": "qwen3_vl_text", "rope_parameters": _SECTIONS | {"mrope_interleaved": True}},
    "qwen3_vl_moe": {"model_type": "qwen3_vl_moe_text", "rope_parameters": _SECTIONS | {"mrope_interleaved": True}}
    | _EXPERTS,
    "smolvlm": {"model_type": "llama"},
    "step3p7": {"model_type": "step3p5", "share_expert_dim": 48} | _ROUTED | _SLIDING,
    "video_llama_3": {"model_type": "qwen2"},
    "video_llava": {"model_type": "llama"},
    "vipllava": {"model_type": "llama"},
}
MISTRAL_4: dict[str, Any] = {"model_type": "mistral4", "num_key_value_heads": 4, "head_dim": 24} | _ROUTED | _LATENT
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
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "output_dim": 64,
}

# Kinds that are more than transformers can answer with: what it can, and how its tensors are called in the whole.
_THINKER, _DECODER = ("thinker_config", "", "thinker."), ("text_config", "model.", "model.language_model.")
_PARTS = {
    "gemma3n": ("gemma3n_text", *_DECODER),  # whose tower needs a library that is not here
    "qwen2_5_omni": ("qwen2_5_omni_thinker", *_THINKER),
    "qwen3_omni_moe": ("qwen3_omni_moe_thinker", *_THINKER),
}
_PART_OF_WHOLE = "part"  # the directory in which such a part is


def make_multimodal(kind: str, path: Path, *, text: dict[str, Any] | None = None, **overrides: Any) -> Path:
    """Write a checkpoint with config and tokenizer; returns `path`. `overrides` are of the whole model's fields, `text`
    of its language model's."""
    fields = KINDS[kind] | (text or {})
    make_tokenizer().save_pretrained(path)
    if kind not in _PARTS:
        return _write(_config(kind, fields, overrides), path)
    name, key, prefix, prefix_in_whole = _PARTS[kind]
    text = AutoConfig.for_model(**_TEXT | fields | overrides)
    part = _write(text if key == "text_config" else _config(name, fields, overrides), path / _PART_OF_WHOLE)
    tensors = load_file(part / "model.safetensors")
    renamed = {prefix_in_whole + name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    save_file(renamed, path / "model.safetensors", {"format": "pt"})
    config = {"model_type": kind, key: json.loads((part / "config.json").read_text())}
    (path / "config.json").write_text(json.dumps(config))
    return path


def _config(kind: str, text: dict[str, Any], overrides: dict[str, Any]) -> Any:
    whole = AutoConfig.for_model(kind)
    parts: dict[str, Any] = {"text_config": _TEXT | text}
    for key in _TOWERS:
        tower = getattr(whole, key, None)
        if tower is not None:
            known = tower.to_dict()
            small = {name: value for name, value in _TOWER.items() if name in known}
            held = key != "audio_config" or kind.endswith("_thinker")
            parts[key] = small | {"model_type": tower.model_type} if held else None
    special = {key: 3 for key in whole.to_dict() if key.endswith(("_token_id", "_token_index"))}  # of images and sound
    if kind.endswith("_thinker"):
        special["vision_start_token_id"] = 3
    return AutoConfig.for_model(kind, **special | parts | _WHOLE.get(kind, {}) | overrides)


def _write(config: Any, path: Path) -> Path:
    torch.manual_seed(2)
    model = _class_of(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and not name.endswith("bias")
            parameter.normal_(1.0, 0.1) if is_norm else parameter.normal_(0.0, 0.15)
    model.save_pretrained(path)
    return path


def _class_of(config: Any) -> Any:
    return AutoModelForImageTextToText if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else AutoModelForCausalLM


def greedy_of_whole(path: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """What the whole model of transformers answers to each prompt alone, in float32."""
    if (path / _PART_OF_WHOLE).exists():
        path = path / _PART_OF_WHOLE
    kind = _class_of(AutoConfig.from_pretrained(path))
    model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    answers = []
    for prompt in prompts:
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        answers.append(found[0, len(prompt) :].tolist())
    return answers
