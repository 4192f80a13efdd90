"""Model families that the native decoder computes on CPUs, where its kernels know them: those with recurrent layers,
Ministral 3, which scales queries by their positions, and Gemma 4, whose layers differ. Elsewhere (on GPUs, in float32)
they run through transformers. Needs no torch."""

from dataclasses import replace

from worker_proc.errors import ModelError
from worker_proc.models.config_fields import Config, boolean, divide, positive_float, positive_int
from worker_proc.models.families import Family, parse_family
from worker_proc.models.family_parts import but_each, experts, layer_types, parse_llama, windows_of
from worker_proc.models.gemma4_family import GEMMA4, GEMMA4_UNIFIED, parse_gemma4
from worker_proc.models.granite_family import GRANITE_HYBRID, parse_granite_hybrid
from worker_proc.models.language_part import without_sections
from worker_proc.models.spec import ConvSpec, DecoderSpec, DeltaSpec, MixtureSpec

_LINEAR, _FULL, _CONV = "linear_attention", "full_attention", "conv"


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
    """Gated DeltaNets, and attention with gates, whose heads are rotated in part."""
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
        tiled=boolean(config, "linear_value_heads_tiled", False) and values > keys,  # as we say of GGUF files
    )
    return replace(spec, norm_offset=1.0, gated_attention=True, delta=delta)


def _parse_qwen3_5_moe(config: Config) -> DecoderSpec:
    """A mixture in place of every MLP, with an expert that all tokens go through."""
    spec = _parse_qwen3_5({**config, "intermediate_size": positive_int(config, "moe_intermediate_size")})
    shared = positive_int(config, "shared_expert_intermediate_size")
    return replace(spec, mixture=MixtureSpec(*experts(config), renormalizes=True, shared=shared))


def _parse_qwen3_next(config: Config) -> DecoderSpec:
    for key, only in (("decoder_sparse_step", (None, 1)), ("mlp_only_layers", (None, []))):
        if config.get(key) not in only:
            raise ModelError(key, config[key], "every layer must be a mixture")
    spec = _parse_qwen3_5_moe(config)
    assert spec.delta is not None and spec.mixture is not None
    mixture = replace(spec.mixture, renormalizes=boolean(config, "norm_topk_prob", True))
    return replace(spec, delta=replace(spec.delta, by_key_heads=True), mixture=mixture)


def _linear_layers(config: Config, layers: int) -> tuple[bool, ...]:
    if config.get("layer_types") is None:
        return tuple(but_each(positive_int(config, "full_attention_interval"), layers))
    return _layers_of_kind(config, layers, _LINEAR)


def _layers_of_kind(config: Config, layers: int, kind: str) -> tuple[bool, ...]:
    """The others have attention, and there are such."""
    kinds = layer_types(config, layers, (_FULL, kind))
    if _FULL not in kinds:
        raise ModelError("layer_types", kinds, f"some layers must be {_FULL}")
    return tuple(each == kind for each in kinds)


def _parse_lfm2(config: Config) -> DecoderSpec:
    """Gated short convolutions, and attention with norms of heads."""
    channels = positive_int(config, "block_ff_dim" if config.get("block_ff_dim") else "intermediate_size")
    if boolean(config, "block_auto_adjust_ff_dim", True):
        channels = int(2 * channels / 3)
        if config.get("block_ffn_dim_multiplier") is not None:
            channels = int(positive_float(config, "block_ffn_dim_multiplier", 1.0) * channels)
            channels += -channels % positive_int(config, "block_multiple_of")
    return _with_convolutions(config, channels)


def _parse_lfm2_moe(config: Config) -> DecoderSpec:
    """The same with mixtures in all but the first layers."""
    spec = _with_convolutions(config, positive_int(config, "moe_intermediate_size"))
    dense = config.get("num_dense_layers")
    if not isinstance(dense, int) or isinstance(dense, bool) or not 0 <= dense < spec.num_layers:
        raise ModelError("num_dense_layers", dense, f"must be fewer than the {spec.num_layers} layers, at least 0")
    mixture = MixtureSpec(
        *experts(config),
        renormalizes=boolean(config, "norm_topk_prob", True),
        sigmoid=True,
        choice_bias=boolean(config, "use_expert_bias", True),
        scale=positive_float(config, "routed_scaling_factor", 1.0),
        dense=dense,
        dense_size=positive_int(config, "intermediate_size") if dense else 0,
    )
    return replace(spec, mixture=mixture)


def _with_convolutions(config: Config, channels: int) -> DecoderSpec:
    """LFM2 with so many channels in its MLPs or experts."""
    tied = boolean(config, "tie_embedding", boolean(config, "tie_word_embeddings", True))
    same = {"intermediate_size": channels, "rms_norm_eps": config.get("norm_eps"), "tie_word_embeddings": tied}
    spec = replace(parse_llama({**config, **same}), layout="lfm2")
    attending = config.get("full_attn_idxs")
    if config.get("layer_types") is None and attending is not None:  # as older files say it
        if not isinstance(attending, list):
            raise ModelError("full_attn_idxs", attending, "must list the layers with attention")
        kinds = [_FULL if layer in attending else _CONV for layer in range(spec.num_layers)]
        config = {**config, "layer_types": kinds}
    elif config.get("layer_types") is None:
        return spec
    layers = _layers_of_kind(config, spec.num_layers, _CONV)
    if not any(layers):
        return spec
    kernel = positive_int(config, "conv_L_cache")
    return replace(spec, conv=ConvSpec(layers, kernel, boolean(config, "conv_bias", False)))


def _parse_ministral3(config: Config) -> DecoderSpec:
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = {**config, "rope_parameters": _MINISTRAL3_ROPE}
    spec = parse_llama(config)
    return replace(spec, windows=windows_of(config, [True] * spec.num_layers, fixed=True))


_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MINISTRAL3 = {
    "max_position_embeddings": 262144,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
_QWEN = {
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
}
_LFM2 = {
    "max_position_embeddings": 128_000,
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "eos_token_id": 2,
}
_LFM2_MOE = _LFM2 | {
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
_MIXTURE = _QWEN | {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}

HYBRID_FAMILIES = {
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", _parse_qwen3_5, _QWEN),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", _parse_qwen3_5_moe, _MIXTURE),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM", _parse_qwen3_next, _MIXTURE | {"num_experts": 512, "num_experts_per_tok": 10}
    ),
    "lfm2": Family("Lfm2ForCausalLM", _parse_lfm2, _LFM2),
    "ministral3": Family("Ministral3ForCausalLM", _parse_ministral3, _MINISTRAL3),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", _parse_lfm2_moe, _LFM2_MOE),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", parse_granite_hybrid, GRANITE_HYBRID),
    "gemma4_text": Family("Gemma4ForCausalLM", parse_gemma4, GEMMA4),
    "gemma4_unified_text": Family("Gemma4UnifiedForCausalLM", parse_gemma4, GEMMA4_UNIFIED),
}
