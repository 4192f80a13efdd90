"""Model families with recurrent layers that the native decoder computes on CPUs, where its kernels know them. Elsewhere
(on GPUs, in float32) they run through transformers. Needs no torch."""

from dataclasses import replace

from worker_proc.errors import ModelError
from worker_proc.models.config_fields import Config, boolean, divide, positive_int
from worker_proc.models.families import Family, parse_family, parse_llama
from worker_proc.models.language_part import without_sections
from worker_proc.models.spec import DecoderSpec, DeltaSpec

_LINEAR, _FULL = "linear_attention", "full_attention"


def hybrid_spec(config: Config) -> DecoderSpec | None:
    """Of a config.json; None where it is of no such family, or asks for what the native decoder does not know."""
    family = HYBRID_FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    try:
        return parse_family(family, config)
    except ModelError:
        return None


def _parse_qwen3_5(config: Config) -> DecoderSpec:
    """Three Gated DeltaNets, then attention with gates, whose heads are rotated in part."""
    if not boolean(config, "attn_output_gate", True):
        raise ModelError("attn_output_gate", False, "attention is known with gates only")
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):  # three kinds of positions, which are the same in text
        config = {**config, "rope_parameters": without_sections(rope)}
    spec = parse_llama(config)
    keys, values = positive_int(config, "linear_num_key_heads"), positive_int(config, "linear_num_value_heads")
    divide(values, keys, "linear_num_value_heads", "linear_num_key_heads")
    delta = DeltaSpec(
        layers=_linear_layers(config, spec.num_layers),
        key_heads=keys,
        value_heads=values,
        key_dim=positive_int(config, "linear_key_head_dim"),
        value_dim=positive_int(config, "linear_value_head_dim"),
        kernel=positive_int(config, "linear_conv_kernel_dim"),
    )
    return replace(spec, norm_offset=1.0, gated_attention=True, delta=delta)


def _linear_layers(config: Config, layers: int) -> tuple[bool, ...]:
    kinds = config.get("layer_types")
    if kinds is None:
        every = positive_int(config, "full_attention_interval")
        return tuple((layer + 1) % every != 0 for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not {_FULL} <= set(kinds) <= {_LINEAR, _FULL}:
        raise ModelError("layer_types", kinds, f"must list {layers} layers, {_LINEAR} or {_FULL}, some of these")
    return tuple(kind == _LINEAR for kind in kinds)


HYBRID_FAMILIES = {
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        _parse_qwen3_5,
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        },
    ),
}
