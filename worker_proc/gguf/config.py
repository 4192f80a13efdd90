"""The configuration of a model in Hugging Face's terms, from the settings of its GGUF file. Every setting of an
architecture that is unknown here is refused by name, as it might change the numbers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from worker_proc.errors import ModelError
from worker_proc.gguf.header import Header
from worker_proc.gguf.kinds import CODED


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of llama.cpp's architectures. `turned` says that the rows of queries and keys lie as its rotation of pairs
    wants them, `norm_offset` what is added to norms, `experts` where those of a layer are."""

    model_type: str
    class_name: str
    turned: bool = False
    norm_offset: float = 0.0
    output_norms: bool = False
    experts: str | None = None
    more: dict[str, Any] = field(default_factory=dict)  # of config.json

    def heads(self, header: Header, *, keys: bool) -> int:
        settings = _Settings(header)
        count = settings.whole("attention.head_count")
        return settings.whole("attention.head_count_kv", count) if keys else count


_GEMMA: dict[str, Any] = {"norm_offset": 1.0, "output_norms": True}
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", turned=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        experts="mlp.experts.{expert}.{projection}",
        more={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", **_GEMMA),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", **_GEMMA),
}
_HARMLESS = ("vocab_size", "rope.scaling.finetuned", "rope.scaling.yarn_log_multiplier")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def architecture_of(header: Header) -> Architecture:
    """Raises ModelError for one that is not read."""
    name = header.settings.get("general.architecture")
    if name not in ARCHITECTURES:
        reason = f"of GGUF files, only {', '.join(ARCHITECTURES)} are read"
        raise ModelError("general.architecture", name, reason)
    return ARCHITECTURES[name]


class _Settings:
    """Those of the file's architecture, by their names behind it."""

    def __init__(self, header: Header) -> None:
        self.prefix = f"{header.settings.get('general.architecture')}."
        start = len(self.prefix)
        found = header.settings.items()
        self.values = {key[start:]: value for key, value in found if key.startswith(self.prefix)}
        self.used: set[str] = set(_HARMLESS)

    def get(self, key: str, default: Any = None) -> Any:
        self.used.add(key)
        return self.values.get(key, default)

    def whole(self, key: str, default: int | None = None) -> int:
        """Of a list with a number for each layer, the one that all have."""
        value = self.get(key, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(self.prefix + key, value, "must be a whole number, the same in all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, float | int) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ModelError(self.prefix + key, value, "must be a positive number")
        return _shortest(value)

    def must_be(self, key: str, *allowed: Any) -> None:
        if (value := self.get(key)) is not None and value not in allowed:
            raise ModelError(self.prefix + key, value, "not supported")

    def refuse_others(self) -> None:
        for key in sorted(set(self.values) - self.used):
            raise ModelError(self.prefix + key, self.values[key], "an unknown setting of this architecture")


def config_of(header: Header, rope_factors: list[float] | None = None) -> dict[str, Any]:
    """What config.json would say; `rope_factors` are those of the tensor rope_freqs.weight. Raises ModelError naming a
    setting that is missing, impossible or unknown."""
    architecture, settings = architecture_of(header), _Settings(header)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelError("token_embd.weight", None, "the file lacks this tensor")
    hidden, heads = settings.whole("embedding_length"), settings.whole("attention.head_count")
    head_dim = settings.whole("attention.key_length", hidden // heads)
    settings.must_be("attention.value_length", head_dim)
    settings.must_be("rope.dimension_count", head_dim)
    settings.must_be("attention.causal", True)
    config = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "num_hidden_layers": settings.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": settings.whole("context_length"),
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_theta": settings.number("rope.freq_base", 10000.0),
        **architecture.more,
    }
    config |= (
        _experts(settings) if architecture.experts else {"intermediate_size": settings.whole("feed_forward_length")}
    )
    settings.must_be("expert_count", 0, *([config["num_experts"]] if "num_experts" in config else []))
    settings.must_be("expert_used_count", 0, *([config["num_experts_per_tok"]] if "num_experts" in config else []))
    if scaling := _rope_scaling(settings, rope_factors, head_dim, config["rope_theta"]):
        config["rope_scaling"] = scaling
    config |= _of_biases(architecture, shapes)
    if architecture.norm_offset:
        config |= _gemma(architecture, settings, config)
    else:
        settings.must_be("attention.sliding_window", 0)
    settings.refuse_others()
    if any(tensor.kind in CODED for tensor in header.tensors):
        config["quantization_config"] = {"quant_method": "gguf"}
    return config


def eos_token_ids(header: Header) -> list[int]:
    """Tokens that end an answer, as far as the file names them."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    values = (header.settings.get(f"tokenizer.ggml.{key}") for key in keys)
    return sorted({value for value in values if isinstance(value, int)})


def _experts(settings: _Settings) -> dict[str, Any]:
    settings.get("feed_forward_length")  # of layers without experts, which there are none of
    settings.must_be("expert_weights_norm", True)
    settings.must_be("expert_weights_scale", 1.0, 0.0)
    settings.must_be("expert_shared_count", 0)
    settings.must_be("expert_gating_func", 1)
    return {
        "num_experts": settings.whole("expert_count"),
        "num_experts_per_tok": settings.whole("expert_used_count"),
        "moe_intermediate_size": settings.whole("expert_feed_forward_length"),
    }


def _of_biases(architecture: Architecture, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    if architecture.model_type != "llama":
        return {}
    return {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_up.bias" in shapes}


def _gemma(architecture: Architecture, settings: _Settings, config: dict[str, Any]) -> dict[str, Any]:
    more: dict[str, Any] = {"sliding_window": settings.whole("attention.sliding_window")}
    # llama.cpp scores by the head size, but for the largest ones, which have hidden / heads
    layers = config["num_hidden_layers"]
    largest = (architecture.model_type, layers) in (("gemma2", 46), ("gemma3_text", 62))
    more["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    )
    settings.must_be("attention.sliding_window_pattern", 6 if architecture.model_type == "gemma3_text" else 2)
    if architecture.model_type == "gemma2":
        more["attn_logit_softcapping"] = settings.number("attn_logit_softcapping", 50.0)
        more["final_logit_softcapping"] = settings.number("final_logit_softcapping", 30.0)
        return more
    more["sliding_window_pattern"] = 6
    far = {"rope_type": "default", "rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
    near = {"rope_type": "default", "rope_theta": settings.number("rope.freq_base_swa", 10000.0)}
    more["rope_parameters"] = {"full_attention": far, "sliding_attention": near}
    return more | {"rope_scaling": None}


def _rope_scaling(
    settings: _Settings, factors: list[float] | None, head_dim: int, theta: float
) -> dict[str, Any] | None:
    kind = settings.get("rope.scaling.type", "none")
    original = settings.get("rope.scaling.original_context_length")
    factor = settings.get("rope.scaling.factor", settings.get("rope.scale_linear"))
    settings.must_be("rope.scaling.attn_factor", 1.0)
    if factors is not None:
        if kind not in ("none", "linear") or factor not in (None, 1.0):
            raise ModelError("rope_freqs.weight", kind, "beside another scaling of rotations")
        return _llama3(factors, head_dim, theta)
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": settings.number("rope.scaling.factor", factor)}
    if kind != "yarn" or not isinstance(original, int):
        raise ModelError(settings.prefix + "rope.scaling.type", kind, "only linear, and yarn with its original context")
    found = {"rope_type": "yarn", "factor": settings.number("rope.scaling.factor")}
    found["original_max_position_embeddings"] = original
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if settings.get(f"rope.scaling.{key}") is not None:
            found[name] = settings.number(f"rope.scaling.{key}")
    return found


def _llama3(factors: list[float], head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3's scaling, which files hold as what frequencies are divided by. Raises ModelError for other numbers."""
    rope = {"rope_type": "llama3", "factor": _shortest(max(factors)), **_LLAMA3}
    expected = list(_llama3_factors(rope, head_dim, theta))
    near = len(expected) == len(factors) and all(map(lambda a, b: abs(a - b) < 1e-3 * b, factors, expected))
    if not near:
        raise ModelError("rope_freqs.weight", factors[:4], "not the factors of Llama 3 for this head size")
    return rope


def _llama3_factors(rope: dict[str, Any], head_dim: int, theta: float) -> Iterator[float]:
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for i in range(head_dim // 2):
        turns = original / (2 * math.pi * theta ** (2 * i / head_dim))
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        yield 1 / ((1 - share) / factor + share)


def _shortest(value: float) -> float:
    """The number that float32 stands for: 1e-06 rather than 9.999999974752427e-07."""
    return float(f"{value:.7g}")
