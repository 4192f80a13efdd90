"""The parser of Gemma 4's language models. Needs no torch."""

from dataclasses import replace
from typing import Any

from worker_proc.errors import ModelError
from worker_proc.models.config_fields import Config, boolean, divide, optional_float, optional_int, positive_int
from worker_proc.models.family_parts import but_each, windows_of
from worker_proc.models.gemma_families import parse_gemma
from worker_proc.models.rope_spec import RopeSpec, parse_rope
from worker_proc.models.spec import DecoderSpec, Gemma4Spec, MixtureSpec

_FULL, _SLIDING = "full_attention", "sliding_attention"


def parse_gemma4(config: Config) -> DecoderSpec:
    """Heads of layers with and without a window differ, the last layers may read keys and values of others, and layers
    may have inputs of a token itself, or a mixture beside their MLP."""
    both_ways = config.get("use_bidirectional_attention")
    if both_ways not in (None, "vision"):  # of which text is none
        raise ModelError("use_bidirectional_attention", both_ways, "only causal attention is served")
    ropes = config.get("rope_parameters") or _ROPES
    if not isinstance(ropes, dict) or not {_FULL, _SLIDING} <= set(ropes):
        raise ModelError("rope_parameters", ropes, f"must hold {_FULL} and {_SLIDING}")
    rest = {key: value for key, value in config.items() if key not in _READ_HERE}
    spec = parse_gemma(rest)
    layers = spec.num_layers
    slides = but_each(6, layers)
    slides[-1] = False  # whatever the configuration says
    if isinstance(config.get("layer_types"), list) and len(config["layer_types"]) == layers:
        config = {**config, "layer_types": [*config["layer_types"][:-1], _FULL]}
    windows = windows_of(config, slides)
    full = [window is None for window in windows]
    gemma4 = _what_differs(config, spec, full)
    near = _rope(rest, ropes, _SLIDING, spec.head_dim, spec.context_length)
    far = _rope(rest, ropes, _FULL, gemma4.full_head_dim, spec.context_length)
    limits = [rope.max_positions for rope in (near, far) if rope.max_positions is not None]
    spec = replace(
        spec,
        context_length=min([spec.context_length, *limits]),
        norm_offset=0.0,
        output_norms=True,
        qk_norm=True,
        scales=(1.0,) * layers,
        windows=windows,
        ropes=tuple(far if each else near for each in full),
        logit_softcap=optional_float(config, "final_logit_softcapping"),
        gemma4=gemma4,
    )
    return _with_mixture(spec, config) if boolean(config, "enable_moe_block", False) else spec


def _rope(config: dict[str, Any], ropes: dict[str, Any], kind: str, head_dim: int, context: int) -> RopeSpec:
    if not isinstance(ropes[kind], dict):
        raise ModelError(f"rope_parameters.{kind}", ropes[kind], "must be an object")
    return parse_rope({**config, "rope_parameters": ropes[kind]}, head_dim, context)


def _what_differs(config: Config, spec: DecoderSpec, full: list[bool]) -> Gemma4Spec:
    keys_as_values = boolean(config, "attention_k_eq_v", False)
    sizes = _of_full_layers(config, spec, full, keys_as_values)
    divide(spec.num_heads, sizes[0], "num_attention_heads", "num_global_key_value_heads")
    borrowing = config.get("num_kv_shared_layers") or 0
    if not isinstance(borrowing, int) or isinstance(borrowing, bool) or not 0 <= borrowing < spec.num_layers:
        raise ModelError("num_kv_shared_layers", borrowing, f"must be fewer than the {spec.num_layers} layers")
    own = spec.num_layers - borrowing
    if not set(full[own:]) <= set(full[:own]):
        raise ModelError("num_kv_shared_layers", borrowing, "no layer before those has the keys that they read")
    inputs = inputs_vocab = 0
    if config["model_type"] == "gemma4_text" and config.get("hidden_size_per_layer_input") != 0:
        inputs = optional_int(config, "hidden_size_per_layer_input") or 0
    if inputs and (inputs_vocab := positive_int(config, "vocab_size_per_layer_input")) < spec.vocab_size:
        raise ModelError("vocab_size_per_layer_input", inputs_vocab, f"must be at least vocab_size = {spec.vocab_size}")
    return Gemma4Spec(
        *sizes,
        keys_as_values=keys_as_values,
        borrowing=borrowing,
        widens=boolean(config, "use_double_wide_mlp", False),
        inputs=inputs,
        inputs_vocab=inputs_vocab,
    )


def _of_full_layers(config: Config, spec: DecoderSpec, full: list[bool], keys_as_values: bool) -> tuple[int, int]:
    """Heads of keys, and numbers of a head: in fields of their own, or said for each layer, as transformers does."""
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        kv_heads = optional_int(config, "num_global_key_value_heads") if keys_as_values else None
        return kv_heads or spec.num_kv_heads, positive_int(config, "global_head_dim")
    expected = {layer for layer, each in enumerate(full) if each}
    said = list(by_layer.values()) if isinstance(by_layer, dict) else []
    layers = {int(layer) if str(layer).isdecimal() else layer for layer in by_layer} if said else set()  # "04", too
    if not said or layers != expected or any(each != said[0] for each in said):
        raise ModelError("per_layer_config", by_layer, f"must say the same of each layer with {_FULL}, and of no other")
    if not isinstance(said[0], dict) or not set(said[0]) <= {"head_dim", "num_key_value_heads"}:
        raise ModelError("per_layer_config", by_layer, "only head_dim and num_key_value_heads may differ")
    own = {"num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim} | said[0]
    return positive_int(own, "num_key_value_heads"), positive_int(own, "head_dim")


def _with_mixture(spec: DecoderSpec, config: Config) -> DecoderSpec:
    """Experts, beside MLPs."""
    count, each = positive_int(config, "num_experts"), positive_int(config, "top_k_experts")
    if each > count:
        raise ModelError("top_k_experts", each, f"must be at most num_experts = {count}")
    mixture = MixtureSpec(count, each, renormalizes=True, beside=True, dense_size=spec.intermediate_size)
    return replace(spec, mixture=mixture, intermediate_size=positive_int(config, "moe_intermediate_size"))


_READ_HERE = ("rope_parameters", "rope_scaling", "use_bidirectional_attention", "layer_types")
_ROPES: dict[str, Any] = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
GEMMA4: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
GEMMA4_UNIFIED = GEMMA4 | {"max_position_embeddings": 262_144, "sliding_window": 1024}
