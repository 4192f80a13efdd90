"""What the parsers of several families have in common: Llama, windows, experts. Needs no torch."""

from worker_proc.errors import ModelError
from worker_proc.models.config_fields import (
    Config,
    activation,
    boolean,
    divide,
    dual_chunk_limit,
    optional_int,
    positive_float,
    positive_int,
)
from worker_proc.models.rope_spec import parse_rope
from worker_proc.models.spec import DecoderSpec

DELTA_NETS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
GEMMA4 = ("gemma4_text", "gemma4_unified_text")
NATIVE_ON_CPUS = (*DELTA_NETS, "lfm2", "lfm2_moe", "ministral3", "granitemoehybrid", *GEMMA4)  # see hybrid_families
_MAY_HAVE_BIAS = (
    "gpt_oss", "llama", "qwen3", "qwen3_moe", "granite", "smollm3", "gemma", "gemma2", "gemma3_text",
    "granitemoehybrid", *GEMMA4, *DELTA_NETS,
)  # fmt: skip
_MAY_ROTATE_PARTS = ("phi3", *DELTA_NETS)
_ATTENTION = "full_attention", "sliding_attention"
_NORM_HEADS = ("qwen3", *DELTA_NETS, "lfm2", "lfm2_moe")
_MAY_HAVE_MLP_BIAS = ("llama", "granite", "smollm3")


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
    partial, tempered = model_type in _MAY_ROTATE_PARTS, model_type == "ministral3"
    rope = parse_rope(config, head_dim, context, partial=partial, tempered=tempered)
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


def experts(config: Config) -> tuple[int, int]:
    """How many experts there are, under either name, and how many a token goes through."""
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    count, each = positive_int(config, key), positive_int(config, "num_experts_per_tok")
    if each > count:
        raise ModelError("num_experts_per_tok", each, f"must be at most {key} = {count}")
    return count, each


def windows_of(
    config: Config, slides: list[bool], *, flag: bool = False, fixed: bool = False
) -> tuple[int | None, ...]:
    """The sliding window of each layer. `slides` says which have one where `layer_types` does not, and always if they
    are `fixed`; with `flag`, none has without `use_sliding_window`. Raises ModelError for what contradicts itself."""
    window = optional_int(config, "sliding_window")
    if flag and not boolean(config, "use_sliding_window", False):
        window = None
    if window is None and (flag or fixed):
        slides = [False] * len(slides)
    if config.get("layer_types") is not None:
        named = [kind == "sliding_attention" for kind in layer_types(config, len(slides))]
        if fixed and named != slides:
            reason = f"{config['model_type']} has the same sliding_window ({window}) in every layer"
            raise ModelError("layer_types", config["layer_types"], reason)
        slides = named
    if window is None and any(slides):
        key = "use_sliding_window" if flag and config.get("sliding_window") else "sliding_window"
        raise ModelError(key, config.get(key), "layers that slide need it")
    return tuple(window if slide else None for slide in slides)


def but_each(every: int, layers: int) -> list[bool]:
    """All layers but each `every`th one."""
    return [(layer + 1) % every != 0 for layer in range(layers)]


def layer_types(config: Config, layers: int, known: tuple[str, str] = _ATTENTION) -> list[str]:
    """Of all layers, each of a `known` kind. Raises ModelError for others."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelError("layer_types", kinds, f"must list {layers} layers")
    for kind in kinds:
        if kind not in known:
            raise ModelError("layer_types", kind, f"only {' and '.join(known)} are known")
    return kinds
