"""The settings of Gemma 4's GGUF files, whose layers differ, in Hugging Face's terms."""

import math
from collections.abc import Collection
from typing import Any

from worker_proc.errors import ModelError
from worker_proc.gguf.architectures import SHARED_FACTORS
from worker_proc.gguf.rope import Factors
from worker_proc.gguf.settings import Settings

_NEVER = 1e29  # files divide frequencies that are meant to be 0 by 1e30


def layers_of_gemma4(settings: Settings, layers: int, factors: Factors, names: Collection[str]) -> dict[str, Any]:
    """What config.json says of layers, heads and rotations; `names` are those of the file's tensors. From then on, the
    settings of heads, of channels and of rotations are those of layers with a window, alike in all layers."""
    slides = settings.by_layer("attention.sliding_window_pattern", layers, bool)
    near, far = (layers - 1 - slides[::-1].index(kind) if kind in slides else None for kind in (True, False))
    if near is None or far is None:
        raise ModelError(settings.prefix + "attention.sliding_window_pattern", slides, "must have both kinds of layers")
    borrowing = settings.get("attention.shared_kv_layers", 0)
    if not isinstance(borrowing, int) or not 0 <= borrowing < layers:
        raise ModelError(settings.prefix + "attention.shared_kv_layers", borrowing, "must be fewer than the layers")
    heads = settings.by_layer("attention.head_count_kv", layers)
    channels = settings.by_layer("feed_forward_length", layers)
    full_dim = settings.whole("attention.key_length")
    settings.must_be("attention.value_length", full_dim)
    settings.must_be("rope.dimension_count", full_dim)
    for index, slide in enumerate(slides):
        if heads[index] != heads[near if slide else far]:
            raise ModelError(settings.prefix + "attention.head_count_kv", heads, "must be that of all layers of a kind")
    once = [channels[0]] * layers
    twice = once[borrowing:] + [2 * channels[0]] * borrowing
    if channels not in (once, twice):
        reason = "must be the same in all layers, or twice that in those without keys"
        raise ModelError(settings.prefix + "feed_forward_length", channels, reason)
    near_dim = settings.whole("attention.key_length_swa", full_dim)
    settings.must_be("attention.value_length_swa", near_dim)
    settings.must_be("rope.dimension_count_swa", near_dim)
    alike = {"attention.key_length": near_dim, "attention.value_length": near_dim, "rope.dimension_count": near_dim}
    settings.values |= alike | {"attention.head_count_kv": heads[near], "feed_forward_length": channels[0]}
    full = [index for index, slide in enumerate(slides) if not slide]
    return {
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "per_layer_config": {str(i): {"head_dim": full_dim, "num_key_value_heads": heads[far]} for i in full},
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in names,
        "num_kv_shared_layers": borrowing,
        "use_double_wide_mlp": channels != once,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": settings.number("rope.freq_base"),
                "partial_rotary_factor": _turning_share(factors, full_dim),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": settings.number("rope.freq_base_swa", 10000.0),
            },
        },
    }


def _turning_share(factors: Factors, head_dim: int) -> float:
    """How much of a head turns in layers without a window: its frequencies are not divided by a huge number. Raises
    ModelError for other factors."""
    (name,) = SHARED_FACTORS
    values = factors.get(name, [1.0] * (head_dim // 2))
    turning = sum(value == 1.0 for value in values)
    if len(values) != head_dim // 2 or not turning or any(value < _NEVER for value in values[turning:]):
        raise ModelError(
            name, values[:4], "must leave the first frequencies as they are, and divide the others by 1e30"
        )
    share = 2 * turning / head_dim
    return share if int(share * head_dim // 2) == turning else math.nextafter(share, 1.0)


def gemma4(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    """What is left."""
    if config.get("rope_scaling"):
        raise ModelError(settings.prefix + "rope.scaling.type", config["rope_scaling"]["rope_type"], "not supported")
    inputs = settings.get("embedding_length_per_layer_input", 0)
    cap = settings.get("final_logit_softcapping")
    return {
        "sliding_window": settings.whole("attention.sliding_window"),
        "final_logit_softcapping": settings.number("final_logit_softcapping") if cap is not None else None,
        "hidden_size_per_layer_input": inputs and settings.whole("embedding_length_per_layer_input"),
    }


def experts_of_gemma4(settings: Settings) -> dict[str, Any]:
    """Beside the MLPs, where there are any."""
    if not settings.get("expert_count", 0):
        settings.get("expert_feed_forward_length")
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": settings.whole("expert_count"),
        "top_k_experts": settings.whole("expert_used_count"),
        "moe_intermediate_size": settings.whole("expert_feed_forward_length"),
    }
