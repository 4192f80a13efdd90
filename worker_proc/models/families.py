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
    dual_chunk_limit,
    optional_float,
    optional_int,
    positive_float,
    positive_int,
)
from worker_proc.models.rope_spec import parse_rope
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


def parse_llama(config: Config) -> DecoderSpec:
    """Llama, and what the others begin with."""
    model_type = str(config["model_type"])
    hidden = positive_int(config, "hidden_size")
    heads = positive_int(config, "num_attention_heads")
    layers = positive_int(config, "num_hidden_layers")
    head_dim = optional_int(config, "head_dim") or divide(hidden, heads, "hidden_size", "num_attention_heads")
    kv_heads = optional_int(config, "num_key_value_heads") or heads
    divide(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
    context = positive_int(config, "max_position_embeddings")
    rope = parse_rope(config, head_dim, context, partial=model_type in _MAY_ROTATE_PARTS)
    bias = model_type in _MAY_HAVE_BIAS and boolean(config, "attention_bias", False)
    return DecoderSpec(
        layout="llama",
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive_int(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=min(context, rope.max_positions or context, dual_chunk_limit(config) or context),
        norm="rms",
        norm_eps=positive_float(config, "rms_norm_eps", 1e-6),
        activation=activation(config, "hidden_act", "silu"),
        gated_mlp=True,
        qkv_bias=bias or model_type == "qwen2",
        o_bias=bias,
        mlp_bias=model_type in _MAY_HAVE_MLP_BIAS and boolean(config, "mlp_bias", False),
        qk_norm=model_type in _NORM_HEADS,
        tied=boolean(config, "tie_word_embeddings", False),
        learned_positions=False,
        ropes=(rope,) * layers,
        scales=(head_dim**-0.5,) * layers,
        windows=(None,) * layers,
    )


def _parse_mistral(config: Config) -> DecoderSpec:
    spec = parse_llama(config)
    return replace(spec, windows=_windows(config, [True] * spec.num_layers, fixed=True))


def _parse_qwen(config: Config) -> DecoderSpec:
    """Qwen2 and Qwen3. Windows, where they are used, begin at a layer or are in those that are named."""
    spec = parse_llama(config)
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int) or isinstance(first, bool):
        raise ModelError("max_window_layers", first, "must be an integer")
    slides = [layer >= first for layer in range(spec.num_layers)]
    return replace(spec, windows=_windows(config, slides, flag=True))


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
        windows=_windows(config, [not mark for mark in rotated[:layers]], flag=True),
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
    windows = _windows(config, [True] * spec.num_layers, flag=True, fixed=True)
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
        windows=_windows(config, _but_each(2, spec.num_layers)),
        mixture=MixtureSpec(*experts(config), renormalizes=True, router_bias=True),
        sinks=True,
    )


def experts(config: Config) -> tuple[int, int]:
    """How many experts there are, under either name, and how many a token goes through."""
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    count, each = positive_int(config, key), positive_int(config, "num_experts_per_tok")
    if each > count:
        raise ModelError("num_experts_per_tok", each, f"must be at most {key} = {count}")
    return count, each


def _parse_gemma(config: Config) -> DecoderSpec:
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


def _parse_gemma2(config: Config) -> DecoderSpec:
    spec = _parse_gemma(config)
    layers, every = spec.num_layers, 2
    if config["model_type"] == "gemma3_text" and config.get("layer_types") is None:
        every = positive_int(config, "sliding_window_pattern")
    return replace(
        spec,
        output_norms=True,
        scales=(positive_float(config, "query_pre_attn_scalar", 256.0) ** -0.5,) * layers,
        windows=_windows(config, _but_each(every, layers)),
        softcap=optional_float(config, "attn_logit_softcapping"),
        logit_softcap=optional_float(config, "final_logit_softcapping"),
    )


def _parse_gemma3(config: Config) -> DecoderSpec:
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
    spec = _parse_gemma2(rest)
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


def _windows(config: Config, slides: list[bool], *, flag: bool = False, fixed: bool = False) -> tuple[int | None, ...]:
    """The sliding window of each layer. `slides` says which have one where `layer_types` does not, and always if they
    are `fixed`; with `flag`, none has without `use_sliding_window`. Raises ModelError for what contradicts itself."""
    window = optional_int(config, "sliding_window")
    if flag and not boolean(config, "use_sliding_window", False):
        window = None
    if window is None and (flag or fixed):
        slides = [False] * len(slides)
    if config.get("layer_types") is not None:
        named = [kind == "sliding_attention" for kind in _layer_types(config, len(slides))]
        if fixed and named != slides:
            reason = f"{config['model_type']} has the same sliding_window ({window}) in every layer"
            raise ModelError("layer_types", config["layer_types"], reason)
        slides = named
    if window is None and any(slides):
        key = "use_sliding_window" if flag and config.get("sliding_window") else "sliding_window"
        raise ModelError(key, config.get(key), "layers that slide need it")
    return tuple(window if slide else None for slide in slides)


def _but_each(every: int, layers: int) -> list[bool]:
    """All layers but each `every`th one."""
    return [(layer + 1) % every != 0 for layer in range(layers)]


def _layer_types(config: Config, layers: int) -> list[str]:
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelError("layer_types", kinds, f"must list {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError("layer_types", kind, "only full_attention and sliding_attention are known")
    return kinds


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
    "gemma": Family("GemmaForCausalLM", _parse_gemma, _GEMMA | {"num_key_value_heads": 16}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _parse_gemma2,
        _GEMMA2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", _parse_gemma3, _GEMMA2 | {"max_position_embeddings": 131072, "sliding_window_pattern": 6}
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

NATIVE_ON_CPUS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")  # see hybrid_families
_MAY_HAVE_BIAS = (
    "gpt_oss", "llama", "qwen3", "qwen3_moe", "granite", "smollm3", "gemma", "gemma2", "gemma3_text", *NATIVE_ON_CPUS
)  # fmt: skip
_MAY_ROTATE_PARTS = ("phi3", *NATIVE_ON_CPUS)
_NORM_HEADS = ("qwen3", *NATIVE_ON_CPUS)
_MAY_HAVE_MLP_BIAS = ("llama", "granite", "smollm3")
EXCEED_FLOAT16 = ("gemma2", "gemma3_text")  # whose hidden states grow beyond 65504
_CARRY_A_COPY = ("phi3",)  # of what transformers has for them, too; as always, none of it is run
