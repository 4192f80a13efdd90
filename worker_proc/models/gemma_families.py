"""The parsers of Gemma 1 to 3. Need no torch."""

from dataclasses import replace

from worker_proc.errors import ModelError
from worker_proc.models.config_fields import Config, activation, boolean, optional_float, positive_float, positive_int
from worker_proc.models.family_parts import but_each, parse_llama, windows_of
from worker_proc.models.rope_spec import parse_rope
from worker_proc.models.spec import DecoderSpec


def parse_gemma(config: Config) -> DecoderSpec:
    """What all Gemmas have: norms around 1, scaled embeddings, GELU."""
    if boolean(config, "use_bidirectional_attention", False):
        raise ModelError("use_bidirectional_attention", True, "only causal attention is served")
    key = "hidden_act" if config["model_type"] == "gemma" else "hidden_activation"
    gate = activation(config, key, "gelu_pytorch_tanh")
    if gate == "gelu" and key == "hidden_act":  # an error of the first checkpoints, which means the other one
        gate = "gelu_pytorch_tanh"
    spec = parse_llama({name: value for name, value in config.items() if name != "hidden_act"})
    return replace(
        spec,
        activation=gate,
        norm_offset=1.0,
        embedding_scale=spec.hidden_size**0.5,
        rounds_embedding_scale=True,
    )


def parse_gemma2(config: Config) -> DecoderSpec:
    spec = parse_gemma(config)
    layers, every = spec.num_layers, 2
    if config["model_type"] == "gemma3_text" and config.get("layer_types") is None:
        every = positive_int(config, "sliding_window_pattern")
    return replace(
        spec,
        output_norms=True,
        scales=(positive_float(config, "query_pre_attn_scalar", 256.0) ** -0.5,) * layers,
        windows=windows_of(config, but_each(every, layers)),
        softcap=optional_float(config, "attn_logit_softcapping"),
        logit_softcap=optional_float(config, "final_logit_softcapping"),
    )


def parse_gemma3(config: Config) -> DecoderSpec:
    """Norms of queries and keys, and two rotations: one for layers with a window, another one for the rest."""
    nested = config.get("rope_parameters") or {}
    if not isinstance(nested, dict) or not set(nested) <= {"full_attention", "sliding_attention"}:
        raise ModelError("rope_parameters", nested, "must hold full_attention and sliding_attention")
    scaling = config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ModelError("rope_scaling", scaling, "must be an object")
    rest = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    far = {**(nested.get("full_attention") or {}), **scaling}
    near = nested.get("sliding_attention") or {}
    spec = parse_gemma2(rest)
    ropes = {}
    for slides, given, theta in ((False, far, "rope_theta"), (True, near, "rope_local_base_freq")):
        kind = {**rest, "rope_parameters": given or {"rope_type": "default"}}
        kind["rope_theta"] = positive_float(config, theta, 10_000.0 if slides else 1_000_000.0)
        ropes[slides] = parse_rope(kind, spec.head_dim, spec.context_length)
    limits = [rope.max_positions for rope in ropes.values() if rope.max_positions is not None]
    return replace(
        spec,
        context_length=min([spec.context_length, *limits]),
        qk_norm=True,
        softcap=None,  # transformers does not apply it here
        ropes=tuple(ropes[window is not None] for window in spec.windows),
    )
