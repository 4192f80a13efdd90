"""The parser of Granite 4 (IBM, 2025), with and without Mamba-2 layers and experts. Needs no torch."""

import math
from dataclasses import replace
from typing import Any

from worker_proc.errors import ModelError
from worker_proc.models.config_fields import Config, boolean, divide, optional_int, positive_float, positive_int
from worker_proc.models.family_parts import experts, layer_types, parse_llama
from worker_proc.models.spec import DecoderSpec, MixtureSpec, SpaceSpec

_FULL, _LINEAR = "full_attention", "linear_attention"
_PUBLISHED = {"attention": _FULL, "mamba": _LINEAR}  # as checkpoints name them


def parse_granite_hybrid(config: Config) -> DecoderSpec:
    """Layers are scaled as in Granite 3. Each has an MLP, which is the shared expert where there are others."""
    shared, mixed = positive_int(config, "shared_intermediate_size"), config.get("num_local_experts") != 0
    size = positive_int(config, "intermediate_size") if mixed else shared
    spec = parse_llama({**config, "intermediate_size": size})
    mixture = None
    if mixed:
        mixture = MixtureSpec(*experts(config), renormalizes=True, shared=shared, shared_gate=False)
    kinds = config.get("layer_types") or [_LINEAR] * spec.num_layers
    if isinstance(kinds, list):
        kinds = [_PUBLISHED.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    kinds = layer_types({"layer_types": kinds}, spec.num_layers, (_FULL, _LINEAR))
    recurrent = tuple(kind == _LINEAR for kind in kinds)
    if all(recurrent):
        raise ModelError("layer_types", kinds, f"some layers must be {_FULL}")
    position = config.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        raise ModelError("position_embedding_type", position, "only rope and nope are known")
    return replace(
        spec,
        layout="granite_hybrid",
        mixture=mixture,
        ropes=spec.ropes if position == "rope" else (None,) * spec.num_layers,
        scales=(positive_float(config, "attention_multiplier", 1.0),) * spec.num_layers,
        embedding_scale=positive_float(config, "embedding_multiplier", 1.0),
        residual_scale=positive_float(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / positive_float(config, "logits_scaling", 1.0),
        space=_space(config, recurrent) if any(recurrent) else None,
    )


def _space(config: Config, layers: tuple[bool, ...]) -> SpaceSpec:
    width = positive_int(config, "mamba_expand") * positive_int(config, "hidden_size")
    heads, groups = positive_int(config, "mamba_n_heads"), positive_int(config, "mamba_n_groups")
    divide(heads, groups, "mamba_n_heads", "mamba_n_groups")
    head_dim = divide(width, heads, "mamba_expand * hidden_size", "mamba_n_heads")
    if config.get("mamba_d_head") not in (None, "auto") and optional_int(config, "mamba_d_head") != head_dim:
        raise ModelError("mamba_d_head", config["mamba_d_head"], f"must be {head_dim}, so that heads fill the layer")
    least, most = _limits(config.get("time_step_limit"))
    return SpaceSpec(
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_size=positive_int(config, "mamba_d_state"),
        kernel=positive_int(config, "mamba_d_conv"),
        conv_bias=boolean(config, "mamba_conv_bias", True),
        bias=boolean(config, "mamba_proj_bias", False),
        least_step=least,
        most_step=most,
    )


def _limits(given: Any) -> tuple[float, float]:
    """Between which step sizes are. transformers writes infinity as an object."""
    if given is None:
        return 0.0, math.inf
    if isinstance(given, list) and len(given) == 2:
        least, most = (math.inf if each == {"__float__": "Infinity"} else each for each in given)
        if all(isinstance(each, int | float) for each in (least, most)) and 0 <= least <= most:
            return float(least), float(most)
    raise ModelError("time_step_limit", given, "must be two numbers, the smaller one first")


GRANITE_HYBRID: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "intermediate_size": 11008,
    "shared_intermediate_size": 1024,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "eos_token_id": 2,
}
