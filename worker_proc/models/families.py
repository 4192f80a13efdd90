"""Model families that the native decoder knows, parsed from config.json into a `DecoderSpec`. Needs no torch.

One parser per family, all of them strict: a value that would make the output wrong is refused by name, and absent
keys take the defaults of the family's configuration class in `transformers`, because checkpoints omit them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from worker_proc.errors import ModelError
from worker_proc.models import language_part
from worker_proc.models.config_fields import (
    Config,
    activation,
    boolean,
    divide,
    optional_int,
    positive_float,
    positive_int,
)
from worker_proc.models.family_parts import NATIVE_ON_CPUS, but_each, experts, parse_llama, windows_of
from worker_proc.models.gemma_families import parse_gemma, parse_gemma2, parse_gemma3
from worker_proc.models.spec import CLAMPED_SWIGLU, SWIGLU_ALPHA, SWIGLU_LIMIT, DecoderSpec, MixtureSpec
from worker_proc.quantization.stored_config import parse_stored


def is_native(config: Config) -> bool:
    """Whether the native decoder is meant for this model (it may still refuse details in `parse_spec`)."""
    return config.get("model_type") in FAMILIES and not _lacks_experts(config)


def _lacks_experts(config: Config) -> bool:
    """Whether some layers of a mixture have an MLP instead, which the native decoder does not know."""
    step, named = config.get("decoder_sparse_step"), config.get("mlp_only_layers")
    return config.get("model_type") == "qwen3_moe" and (step not in (None, 1) or named not in (None, []))


def check_servable(config: Config) -> None:
    """Refuse what no backend serves, by name: remote code, unknown codes, models that are not decoders only."""
    if config.get("auto_map") and not _has_another_copy(config.get("model_type")):
        raise ModelError("auto_map", config["auto_map"], "the model brings its own code, which is never run")
    stored = parse_stored(config)
    known_natively = is_native(config) or config.get("model_type") in NATIVE_ON_CPUS
    if stored is not None and (not known_natively or config.get("model_type") == "gpt2"):
        known = ", ".join(name for name in (*FAMILIES, *NATIVE_ON_CPUS) if name != "gpt2")
        raise ModelError("quantization_config", stored.method, f"quantized weights are read for {known} only")
    if config.get("is_encoder_decoder"):
        raise ModelError("is_encoder_decoder", True, "only decoder-only models are served")
    for key in ("vision_config", "audio_config", "text_config", "thinker_config"):
        if config.get(key):
            reason = f"of multimodal models, the text of these is served: {', '.join(sorted(language_part.KINDS))}"
            raise ModelError(key, "...", reason)


def _has_another_copy(model_type: object) -> bool:
    """Whether the code that a checkpoint brings is one of which transformers has its own, as many are that are older
    than that (DeepSeek, MiniMax M2, Nemotron-H). With the name of a native family it is rather a changed one."""
    if model_type in FAMILIES:
        return model_type in _CARRY_A_COPY
    from transformers import CONFIG_MAPPING  # takes a second, and few need it

    return model_type in CONFIG_MAPPING


def parse_spec(config: Config) -> DecoderSpec:
    """Parse config.json of a native model type. Raises ModelError naming the key."""
    check_servable(config)
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError("model_type", model_type, "not a native architecture")
    return parse_family(family, config)


def parse_family(family: "Family", config: Config) -> DecoderSpec:
    """Parse config.json of a model of this family. Raises ModelError naming the key."""
    architectures = config.get("architectures")
    if architectures is not None and architectures != [family.architecture]:
        raise ModelError("architectures", architectures, f"expected [{family.architecture!r}]")
    return family.parse({**family.defaults, **config})


def _parse_mistral(config: Config) -> DecoderSpec:
    spec = parse_llama(config)
    return replace(spec, windows=windows_of(config, [True] * spec.num_layers, fixed=True))


def _parse_qwen(config: Config) -> DecoderSpec:
    """Qwen2 and Qwen3. Windows, where they are used, begin at a layer or are in those that are named."""
    spec = parse_llama(config)
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int) or isinstance(first, bool):
        raise ModelError("max_window_layers", first, "must be an integer")
    slides = [layer >= first for layer in range(spec.num_layers)]
    return replace(spec, windows=windows_of(config, slides, flag=True))


def _parse_gpt2(config: Config) -> DecoderSpec:
    if boolean(config, "add_cross_attention", False):
        raise ModelError("add_cross_attention", True, "only decoder-only models are served")
    hidden = positive_int(config, "n_embd")
    heads = positive_int(config, "n_head")
    layers = positive_int(config, "n_layer")
    head_dim = divide(hidden, heads, "n_embd", "n_head")
    scale = head_dim**-0.5 if boolean(config, "scale_attn_weights", True) else 1.0
    by_layer = boolean(config, "scale_attn_by_inverse_layer_idx", False)
    return DecoderSpec(
        layout="gpt2",
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=optional_int(config, "n_inner") or 4 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        context_length=positive_int(config, "n_positions"),
        norm="layer",
        norm_eps=positive_float(config, "layer_norm_epsilon", 1e-5),
        activation=activation(config, "activation_function", "gelu_new"),
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm=False,
        tied=boolean(config, "tie_word_embeddings", True),
        learned_positions=True,
        ropes=(None,) * layers,
        scales=tuple(scale / (layer + 1) if by_layer else scale for layer in range(layers)),
        windows=(None,) * layers,
    )


def _parse_phi3(config: Config) -> DecoderSpec:
    """Projections that are stored as one, rotations of a part of each head (Phi-4-mini)."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):  # older names of it
        rest = {key: value for key, value in rope.items() if key != "type"}
        config = {**config, "rope_scaling": {**rest, "rope_type": "longrope"}}
    return replace(_parse_mistral(config), layout="phi3")


def _parse_granite(config: Config) -> DecoderSpec:
    spec = parse_llama(config)
    return replace(
        spec,
        scales=(positive_float(config, "attention_multiplier", 1.0),) * spec.num_layers,
        embedding_scale=positive_float(config, "embedding_multiplier", 1.0),
        residual_scale=positive_float(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / positive_float(config, "logits_scaling", 1.0),
    )


def _parse_smollm3(config: Config) -> DecoderSpec:
    """Every fourth layer, or those that are named, without rotation (NoPE: Yang et al., 2025)."""
    spec = parse_llama(config)
    layers, rotated = spec.num_layers, config.get("no_rope_layers")
    if rotated is None:
        every = positive_int(config, "no_rope_layer_interval")
        rotated = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or any(mark not in (0, 1) for mark in rotated):
        raise ModelError("no_rope_layers", rotated, f"must list 0 or 1 for each of {layers} layers")
    return replace(
        spec,
        ropes=tuple(rope if mark else None for rope, mark in zip(spec.ropes, rotated, strict=False)),
        windows=windows_of(config, [not mark for mark in rotated[:layers]], flag=True),
    )


def _parse_mixtral(config: Config) -> DecoderSpec:
    mixture = MixtureSpec(*experts(config), renormalizes=True)
    return replace(_parse_mistral(config), layout="mixtral", mixture=mixture)


def _parse_qwen3_moe(config: Config) -> DecoderSpec:
    if config.get("mlp_only_layers") not in (None, []):
        raise ModelError("mlp_only_layers", config["mlp_only_layers"], "every layer must be a mixture")
    if config.get("decoder_sparse_step") not in (None, 1):
        raise ModelError("decoder_sparse_step", config["decoder_sparse_step"], "every layer must be a mixture")
    spec = parse_llama({**config, "intermediate_size": positive_int(config, "moe_intermediate_size")})
    windows = windows_of(config, [True] * spec.num_layers, flag=True, fixed=True)
    mixture = MixtureSpec(*experts(config), boolean(config, "norm_topk_prob", False))
    return replace(spec, qk_norm=True, windows=windows, mixture=mixture)


def _parse_gpt_oss(config: Config) -> DecoderSpec:
    """Sinks in the softmax of every head, every other layer with a window, experts with biases and clamped gates."""
    for key, only in (("hidden_act", "silu"), ("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if config[key] != only:
            raise ModelError(key, config[key], f"only {only} is supported")
    if not config.get("rope_scaling") and not config.get("rope_parameters"):
        config = {**config, "rope_scaling": _GPT_OSS_ROPE}
    spec = parse_llama(config)
    return replace(
        spec,
        layout="gpt_oss",
        activation=CLAMPED_SWIGLU,
        mlp_bias=True,
        windows=windows_of(config, but_each(2, spec.num_layers)),
        mixture=MixtureSpec(*experts(config), renormalizes=True, router_bias=True),
        sinks=True,
    )


@dataclass(frozen=True, slots=True)
class Family:
    """A model type: the one class of `transformers` that it may name, its parser, and defaults of its configuration."""

    architecture: str
    parse: Callable[[Config], DecoderSpec]
    defaults: dict[str, Any] = field(default_factory=dict)


_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GEMMA = {"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True, "eos_token_id": 1}
_GEMMA2 = _GEMMA | {"num_key_value_heads": 4, "sliding_window": 4096}

FAMILIES = {
    "llama": Family("LlamaForCausalLM", parse_llama, {"max_position_embeddings": 2048, "eos_token_id": 2}),
    "mistral": Family(
        "MistralForCausalLM",
        _parse_mistral,
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2},
    ),
    "qwen2": Family("Qwen2ForCausalLM", _parse_qwen, _QWEN),
    "qwen3": Family("Qwen3ForCausalLM", _parse_qwen, _QWEN | {"head_dim": 128}),
    "gemma": Family("GemmaForCausalLM", parse_gemma, _GEMMA | {"num_key_value_heads": 16}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        parse_gemma2,
        _GEMMA2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", parse_gemma3, _GEMMA2 | {"max_position_embeddings": 131072, "sliding_window_pattern": 6}
    ),
    "granite": Family("GraniteForCausalLM", _parse_granite, {"max_position_embeddings": 2048, "eos_token_id": 2}),
    "mixtral": Family(
        "MixtralForCausalLM",
        _parse_mixtral,
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "eos_token_id": 2,
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _parse_qwen3_moe,
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _parse_gpt_oss,
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "rope_theta": 150_000.0,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "hidden_act": "silu",
            "swiglu_alpha": SWIGLU_ALPHA,
            "swiglu_limit": SWIGLU_LIMIT,
        },
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        _parse_phi3,
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32000,
        },
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _parse_smollm3,
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
            "eos_token_id": 128001,
        },
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        _parse_gpt2,
        {"n_positions": 1024, "activation_function": "gelu_new", "tie_word_embeddings": True, "eos_token_id": 50256},
    ),
}

EXCEED_FLOAT16 = ("gemma2", "gemma3_text")  # whose hidden states grow beyond 65504
_CARRY_A_COPY = ("phi3",)  # of what transformers has for them, too; as always, none of it is run
