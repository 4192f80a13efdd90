"""The configuration of a model in Hugging Face's terms, from the settings of its GGUF file."""

import math
from collections.abc import Callable
from typing import Any

from worker_proc.errors import ModelError
from worker_proc.gguf.architectures import Architecture, architecture_of
from worker_proc.gguf.gemma4 import experts_of_gemma4, gemma4, layers_of_gemma4
from worker_proc.gguf.header import Header
from worker_proc.gguf.kinds import CODED
from worker_proc.gguf.rope import Factors, rope_scaling
from worker_proc.gguf.settings import Settings, layers_of
from worker_proc.models.family_parts import DELTA_NETS, but_each


def config_of(header: Header, factors: Factors) -> dict[str, Any]:
    """What config.json would say; `factors` are what tensors say of rotations. Raises ModelError naming a setting that
    is missing, impossible or unknown."""
    architecture, settings = architecture_of(header), Settings(header)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelError("token_embd.weight", None, "the file lacks this tensor")
    more: dict[str, Any] = {}
    hidden, heads, layers = settings.whole("embedding_length"), settings.heads(keys=False), layers_of(settings)
    if architecture.model_type == "gemma4_text":
        more = layers_of_gemma4(settings, layers, factors, shapes)
        more["vocab_size_per_layer_input"] = shapes.get("per_layer_token_embd.weight", (0,))[0]
        factors = {}
    head_dim = settings.whole("attention.key_length", hidden // heads)
    settings.must_be("attention.value_length", head_dim)
    settings.must_be("attention.causal", True)
    if other := architecture.other_layers:
        more["layer_types"] = ["full_attention" if attends else other for attends in settings.attending(layers)]
    config = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": settings.heads(keys=True),
        "head_dim": head_dim,
        "max_position_embeddings": settings.whole("context_length"),
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_theta": settings.number("rope.freq_base", 10000.0),
        **architecture.more,
        **more,
    }
    config |= _mlp(architecture, settings)
    if scaling := rope_scaling(settings, factors, head_dim, config["rope_theta"]):
        config["rope_scaling"] = scaling
    if architecture.model_type not in _ROTATED_IN_PART:
        settings.must_be("rope.dimension_count", head_dim)
    if architecture.model_type == "granitemoehybrid":
        config["attention_bias"] = any(name.endswith("attn_q.bias") for name in shapes)
        config["mamba_conv_bias"] = any(name.endswith("ssm_conv1d.bias") for name in shapes)
    if architecture.may_have_biases:
        config |= {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_up.bias" in shapes}
    config |= _OF_FAMILIES.get(architecture.model_type, _without_window)(settings, config)
    settings.refuse_others()
    if any(tensor.kind in CODED for tensor in header.tensors):
        config["quantization_config"] = {"quant_method": "gguf"}
    return config


def eos_token_ids(header: Header) -> list[int]:
    """Tokens that end an answer, as far as the file names them."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    values = (header.settings.get(f"tokenizer.ggml.{key}") for key in keys)
    return sorted({value for value in values if isinstance(value, int)})


def _mlp(architecture: Architecture, settings: Settings) -> dict[str, Any]:
    """Channels, and experts where there are any."""
    if architecture.model_type == "gemma4_text":
        return {"intermediate_size": settings.whole("feed_forward_length")} | experts_of_gemma4(settings)
    if architecture.model_type == "granitemoehybrid":
        return _granite_mlp(settings)
    if not architecture.experts:
        settings.must_be("expert_count", 0)
        settings.must_be("expert_used_count", 0)
        return {"intermediate_size": settings.whole("feed_forward_length")}
    settings.must_be("expert_weights_norm", True)
    settings.must_be("expert_weights_scale", 1.0, 0.0)
    settings.must_be("expert_shared_count", 1 if architecture.model_type in DELTA_NETS else 0)
    sigmoid = architecture.model_type == "lfm2_moe"
    settings.must_be("expert_gating_func", 2 if sigmoid else 1)
    count, each = settings.whole("expert_count"), settings.whole("expert_used_count")
    found = {"num_experts_per_tok": each}
    if architecture.model_type == "mixtral":
        channels = settings.whole("feed_forward_length")
        settings.must_be("expert_feed_forward_length", channels)
        return found | {"num_local_experts": count, "intermediate_size": channels}
    if sigmoid:
        found["intermediate_size"] = settings.whole("feed_forward_length")
        found["num_dense_layers"] = settings.get("leading_dense_block_count", 0)
    settings.get("feed_forward_length")  # of layers without experts, which there are none of
    channels = settings.whole("expert_feed_forward_length")
    if architecture.model_type == "gpt_oss":
        return found | {"num_local_experts": count, "intermediate_size": channels}
    return found | {"num_experts": count, "moe_intermediate_size": channels}


def _without_window(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    settings.must_be("attention.sliding_window", 0)
    return {}


def _phi3(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    """A window in every layer, where files have one: llama.cpp itself leaves it out, and the 4k models break behind it.
    Their first files do not name it. Rotations may be of a part of a head."""
    context, head_dim = config["max_position_embeddings"], config["head_dim"]
    default = 2047 if context == 4096 else 0
    window = settings.get("attention.sliding_window", default) and settings.whole("attention.sliding_window", default)
    share = _rotated_share(settings, head_dim)
    found: dict[str, Any] = {"sliding_window": window or None, "partial_rotary_factor": share}
    key = "original_max_position_embeddings"
    if original := config.get("rope_scaling", {}).get(key):
        found[key] = original  # where the family's default would win
    return found


def _rotated_share(settings: Settings, head_dim: int) -> float:
    rotated = settings.whole("rope.dimension_count", head_dim)
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else math.nextafter(share, 1.0)


def _delta(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    """Qwen 3.5's and Qwen3-Next's Gated DeltaNets."""
    keys, size = settings.whole("ssm.group_count"), settings.whole("ssm.state_size")
    values = settings.whole("ssm.time_step_rank")
    settings.must_be("ssm.inner_size", values * size)
    settings.get("rope.dimension_sections")  # three kinds of positions, which are the same in text
    layers, every = config["num_hidden_layers"], settings.whole("full_attention_interval", 4)
    recurrent = settings.get("attention.recurrent_layers", but_each(every, layers))
    if not isinstance(recurrent, list) or len(recurrent) < layers:
        raise ModelError(f"{settings.prefix}attention.recurrent_layers", recurrent, "must say so for each layer")
    found = _without_window(settings, config) | {
        "partial_rotary_factor": _rotated_share(settings, config["head_dim"]),
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent[:layers]],
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": settings.whole("ssm.conv_kernel"),
    }
    if "num_experts" in config:
        found["shared_expert_intermediate_size"] = settings.whole("expert_shared_feed_forward_length")
    return found


def _lfm2(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    """Gated short convolutions."""
    return _without_window(settings, config) | {
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": settings.whole("shortconv.l_cache"),
        "conv_bias": False,
    }


def _ministral3(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    """Queries are scaled by their positions, with yarn, which leaves cos and sin as they are; without (Mistral Small 3)
    it is a Llama."""
    found, rope = _without_window(settings, config), {"rope_type": "default", "rope_theta": config["rope_theta"]}
    if settings.get("attention.temperature_scale", 0.0) == 0.0:
        return found | {"rope_parameters": rope}
    beta, scaling = settings.number("attention.temperature_scale"), config.get("rope_scaling")
    if scaling is None or scaling["rope_type"] != "yarn":
        raise ModelError(settings.prefix + "rope.scaling.type", scaling, "must be yarn")
    settings.must_be("rope.scaling.yarn_log_multiplier", 1.0)
    more = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": beta}
    return found | {"rope_scaling": scaling | more}


def _granite_mlp(settings: Settings) -> dict[str, Any]:
    """Of its hybrids: the MLP of a layer is the shared expert where there are others."""
    channels = settings.whole("feed_forward_length")
    settings.must_be("expert_gating_func", 1)
    count = settings.get("expert_count", 0)
    found = {
        "num_local_experts": count and settings.whole("expert_count"),
        "intermediate_size": channels,
        "shared_intermediate_size": settings.whole("expert_shared_feed_forward_length", channels),
    }
    if not count:
        settings.must_be("expert_used_count", 0)
        settings.must_be("expert_shared_feed_forward_length", channels)
        return found
    return found | {"num_experts_per_tok": settings.whole("expert_used_count")}


def _granite_hybrid(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    inner, hidden, heads = settings.whole("ssm.inner_size"), config["hidden_size"], settings.whole("ssm.time_step_rank")
    if inner % hidden or inner % heads:
        reason = f"must be a multiple of the hidden size ({hidden}) and of the heads ({heads})"
        raise ModelError(f"{settings.prefix}ssm.inner_size", inner, reason)
    return _granite_scales(settings, config) | {
        "position_embedding_type": "rope" if settings.get("rope.scaling.finetuned", True) else "nope",
        "mamba_expand": inner // hidden,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": settings.whole("ssm.group_count"),
        "mamba_d_state": settings.whole("ssm.state_size"),
        "mamba_d_conv": settings.whole("ssm.conv_kernel"),
        "mamba_proj_bias": False,
        "time_step_limit": None,
    }


def _granite(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    settings.must_be("rope.scaling.finetuned", True)  # else queries and keys are not rotated
    return _granite_scales(settings, config)


def _granite_scales(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    return _without_window(settings, config) | {
        "attention_multiplier": settings.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": settings.number("embedding_scale", 1.0),
        "residual_multiplier": settings.number("residual_scale", 1.0),
        "logits_scaling": settings.number("logit_scale"),
    }


def _gpt_oss(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    settings.must_be("attention.sliding_window_pattern", 2)
    found: dict[str, Any] = {"sliding_window": settings.whole("attention.sliding_window")}
    if scaling := config.get("rope_scaling"):
        found["rope_scaling"] = {**scaling, "truncate": False}  # as it was trained, though llama.cpp rounds
    return found


def _gemma2(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma_windows(settings, config, every=2, largest=46) | {
        "attn_logit_softcapping": settings.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": settings.number("final_logit_softcapping", 30.0),
    }


def _gemma3(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    far = {"rope_type": "default", "rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
    near = {"rope_type": "default", "rope_theta": settings.number("rope.freq_base_swa", 10000.0)}
    return _gemma_windows(settings, config, every=6, largest=62) | {
        "sliding_window_pattern": 6,
        "rope_parameters": {"full_attention": far, "sliding_attention": near},
        "rope_scaling": None,
    }


def _gemma_windows(settings: Settings, config: dict[str, Any], *, every: int, largest: int) -> dict[str, Any]:
    """Scores are scaled by the head size, but in the largest models (by their layers), which have hidden / heads."""
    settings.must_be("attention.sliding_window_pattern", every)
    is_largest = config["num_hidden_layers"] == largest
    scale = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    return {"sliding_window": settings.whole("attention.sliding_window"), "query_pre_attn_scalar": scale}


_ROTATED_IN_PART = ("phi3", *DELTA_NETS)
_OF_FAMILIES: dict[str, Callable[[Settings, dict[str, Any]], dict[str, Any]]] = {
    "phi3": _phi3,
    **dict.fromkeys(DELTA_NETS, _delta),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _lfm2),
    "ministral3": _ministral3,
    "granite": _granite,
    "granitemoehybrid": _granite_hybrid,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma4_text": gemma4,
    "gpt_oss": _gpt_oss,
}
