"""What the native decoder needs to know about a model, parsed from config.json. Needs no torch.

One parser per family, all of them strict: a value that would make the output wrong is refused by name, and absent
keys take the defaults of the family's configuration class in `transformers`, because checkpoints omit them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from worker_proc.errors import ModelError
from worker_proc.models.rope_spec import RopeSpec, parse_rope
from worker_proc.quantization.stored_config import parse_stored

Config = Mapping[str, Any]

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A pre-norm decoder-only transformer."""

    layout: Literal["llama", "gpt2"]  # tensor names and their storage order
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: str
    gated_mlp: bool  # down(act(gate(x)) * up(x)) rather than down(act(up(x)))
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each query and key head, before the rotation (Qwen3)
    tied: bool  # the output head is the embedding matrix
    rope: RopeSpec | None  # None: learned absolute positions
    scales: tuple[float, ...]  # of attention scores, per layer
    windows: tuple[int | None, ...]  # sliding window in tokens, per layer


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "gpt2": {"n_positions": 1024, "activation_function": "gelu_new", "tie_word_embeddings": True},
}


def is_native(config: Config) -> bool:
    """Whether the native decoder is meant for this model type (it may still refuse details in `parse_spec`)."""
    return config.get("model_type") in _ARCHITECTURES


def check_servable(config: Config) -> None:
    """Refuse what no backend serves, by name: remote code, unknown codes, models that are not decoders only."""
    if config.get("auto_map"):
        raise ModelError("auto_map", config["auto_map"], "the model brings its own code, which is never run")
    stored = parse_stored(config)
    if stored is not None and (not is_native(config) or config.get("model_type") == "gpt2"):
        known = ", ".join(name for name in _ARCHITECTURES if name != "gpt2")
        raise ModelError("quantization_config", stored.method, f"quantized weights are read for {known} only")
    if config.get("is_encoder_decoder"):
        raise ModelError("is_encoder_decoder", True, "only decoder-only models are served")
    for key in ("vision_config", "audio_config", "text_config", "thinker_config"):
        if config.get(key):
            raise ModelError(key, "...", "multimodal models are not served")


def parse_spec(config: Config) -> DecoderSpec:
    """Parse config.json of a native model type. Raises ModelError naming the key."""
    check_servable(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
        raise ModelError("model_type", model_type, "not a native architecture")
    architectures = config.get("architectures")
    if architectures is not None and architectures != [_ARCHITECTURES[model_type]]:
        raise ModelError("architectures", architectures, f"expected [{_ARCHITECTURES[model_type]!r}]")
    merged = {**_DEFAULTS[model_type], **config}
    return _parse_gpt2(merged) if model_type == "gpt2" else _parse_llama(merged, model_type)


def _parse_llama(config: Config, model_type: str) -> DecoderSpec:
    hidden = positive_int(config, "hidden_size")
    heads = positive_int(config, "num_attention_heads")
    layers = positive_int(config, "num_hidden_layers")
    head_dim = optional_int(config, "head_dim") or _divide(hidden, heads, "hidden_size", "num_attention_heads")
    kv_heads = optional_int(config, "num_key_value_heads") or heads
    _divide(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
    context = positive_int(config, "max_position_embeddings")
    rope = parse_rope(config, head_dim, context)
    bias = model_type in ("llama", "qwen3") and boolean(config, "attention_bias", False)
    return DecoderSpec(
        layout="llama",
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive_int(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=min(context, rope.max_positions or context),
        norm="rms",
        norm_eps=positive_float(config, "rms_norm_eps", 1e-6),
        activation=_activation(config, "hidden_act", "silu"),
        gated_mlp=True,
        qkv_bias=bias or model_type == "qwen2",
        o_bias=bias,
        mlp_bias=model_type == "llama" and boolean(config, "mlp_bias", False),
        qk_norm=model_type == "qwen3",
        tied=boolean(config, "tie_word_embeddings", False),
        rope=rope,
        scales=(head_dim**-0.5,) * layers,
        windows=_windows(config, model_type, layers),
    )


def _parse_gpt2(config: Config) -> DecoderSpec:
    if boolean(config, "add_cross_attention", False):
        raise ModelError("add_cross_attention", True, "only decoder-only models are served")
    hidden = positive_int(config, "n_embd")
    heads = positive_int(config, "n_head")
    layers = positive_int(config, "n_layer")
    head_dim = _divide(hidden, heads, "n_embd", "n_head")
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
        activation=_activation(config, "activation_function", "gelu_new"),
        gated_mlp=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm=False,
        tied=boolean(config, "tie_word_embeddings", True),
        rope=None,
        scales=tuple(scale / (layer + 1) if by_layer else scale for layer in range(layers)),
        windows=(None,) * layers,
    )


def _windows(config: Config, model_type: str, layers: int) -> tuple[int | None, ...]:
    window = optional_int(config, "sliding_window")
    if model_type == "llama":
        window = None  # transformers' Llama ignores the key
    if model_type.startswith("qwen") and not boolean(config, "use_sliding_window", False):
        window = None
    kinds = config.get("layer_types")
    if model_type.startswith("qwen") and kinds is None:
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool):
            raise ModelError("max_window_layers", first, "must be an integer")
        return tuple(window if layer >= first else None for layer in range(layers))
    if kinds is None:
        return (window,) * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelError("layer_types", kinds, f"must list {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError("layer_types", kind, "only full_attention and sliding_attention are known")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if model_type.startswith("qwen"):
        if window is None and "sliding_attention" in kinds:
            raise ModelError("layer_types", kinds, "sliding_attention needs use_sliding_window and sliding_window")
    elif windows != (window,) * layers:
        raise ModelError("layer_types", kinds, f"{model_type} has the same sliding_window ({window}) in every layer")
    return windows


def _activation(config: Config, key: str, default: str) -> str:
    name = config.get(key, default)
    if name not in ACTIVATIONS:
        raise ModelError(key, name, f"activation is not one of {', '.join(ACTIVATIONS)}")
    return str(name)


def _divide(whole: int, parts: int, whole_key: str, parts_key: str) -> int:
    if whole % parts:
        raise ModelError(whole_key, whole, f"must be a multiple of {parts_key} = {parts}")
    return whole // parts


def positive_int(config: Config, key: str) -> int:
    """A required integer above 0; raises ModelError."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(key, value, "must be a positive integer")
    return value


def optional_int(config: Config, key: str) -> int | None:
    """As `positive_int`, or None if the key is absent or null."""
    return None if config.get(key) is None else positive_int(config, key)


def positive_float(config: Config, key: str, default: float) -> float:
    """A finite number above 0; raises ModelError."""
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ModelError(key, value, "must be a positive number")
    return float(value)


def boolean(config: Config, key: str, default: bool) -> bool:
    """true, false or absent; raises ModelError."""
    value = config.get(key, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(key, value, "must be true or false")
    return value
