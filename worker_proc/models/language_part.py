"""The language models of multimodal checkpoints, which are served for text (as vLLM does with `--language-model-only`).

Only kinds are known whose language model computes text as it would alone: causally, with the positions of a plain
decoder. Their towers for images and sound are neither read nor held.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from worker_proc.errors import ModelError
from worker_proc.weights import TensorEntry

KINDS = frozenset(
    {
        "aria", "aya_vision", "cohere2_vision", "deepseek_vl", "deepseek_vl_hybrid", "ernie4_5_vl_moe", "exaone4_5",
        "gemma3", "gemma3n", "gemma4", "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "hyperclovax_vision_v2",
        "idefics2", "idefics3", "internvl", "kimi_k25", "lfm2_vl", "lfm3_vl", "llama4", "llava", "llava_next",
        "llava_next_video", "llava_onevision", "minicpmv4_6", "minicpmv4_7", "mistral3", "mllama", "ovis2",
        "qwen2_5_omni", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe", "qwen3_vl",
        "qwen3_vl_moe", "smolvlm", "step3p7", "video_llama_3", "video_llava", "vipllava",
    }
)  # fmt: skip

# Those that transformers must read as a whole, with their towers, where they are not native: other names of tensors.
WHOLE = frozenset({"kimi_k25", "qwen2_5_omni", "qwen3_omni_moe", "qwen3_vl_moe"})

# With text alone, the three kinds of positions of a rotation by sections are the same, and the rotation a plain one.
_BY_SECTIONS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
}
_SECTIONS = ("mrope_section", "mrope_interleaved")

# The names of the language model's tensors, and what they are called where it is alone.
NAMES = {
    r"^thinker\.(?=model\.|lm_head\.)": "",  # of those that speak, too
    r"^language_model\.": "",
    r"^model\.(language_model|text_model)\.": "model.",
}
_TOWER = "visual."  # where the language model has no prefix (Qwen2-VL)


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether it is the config.json of a checkpoint whose language model is served."""
    return config.get("model_type") in KINDS


def language_tensors(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Those of the language model, under the names that they have where it is alone."""
    found: dict[str, TensorEntry] = {}
    prefixed = any(re.match(pattern, name) for name in tensors for pattern in NAMES)
    for name, entry in tensors.items():
        alone = name_alone(name)
        if alone != name or name.startswith("lm_head.") or not (prefixed or name.startswith(_TOWER)):
            found[alone] = replace(entry, name=alone)
    return found


def name_alone(name: str) -> str:
    """What a tensor of the language model is called where that is alone."""
    for pattern, own in NAMES.items():
        name = re.sub(pattern, own, name)
    return name


def without_sections(rope: Mapping[str, Any]) -> dict[str, Any]:
    """A rotation by sections as the plain one that it is for text."""
    return {key: value for key, value in rope.items() if key not in _SECTIONS}


def class_config(directory: Path, config: Mapping[str, Any]) -> Any:
    """The directory's config.json as transformers' class completes it; `config` is what it holds. Takes a second or
    more. Raises ModelError if transformers cannot read it."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        raise ModelError("model_type", config["model_type"], f"transformers cannot read the config: {error}") from None


def language_config(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's config.json, complete: those of multimodal models leave most to their classes. Raises
    ModelError as `class_config` does."""
    text: dict[str, Any] = class_config(directory, config).get_text_config(decoder=True).to_dict()
    text["model_type"] = _BY_SECTIONS.get(text["model_type"], text["model_type"])
    if config["model_type"] == "qwen3_vl_moe":
        text["norm_topk_prob"] = True  # whatever the file says
    rope = text.get("rope_parameters")
    if isinstance(rope, dict):
        text["rope_parameters"] = without_sections(rope)
    if text.get("use_bidirectional_attention") == "vision":
        text["use_bidirectional_attention"] = None
    text.pop("architectures", None)
    own = (config.get("thinker_config") or config).get("text_config") or {}
    for key in ("quantization_config", "eos_token_id"):
        if config.get(key, own.get(key)) is not None:
            text[key] = config.get(key, own.get(key))
    # The head belongs to the whole model, so what that says goes before.
    text["tie_word_embeddings"] = config.get("tie_word_embeddings", own.get("tie_word_embeddings", True))
    return text
