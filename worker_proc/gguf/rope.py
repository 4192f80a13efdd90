"""The scaling of rotations in Hugging Face's terms, from a GGUF file's settings and the tensors beside them."""

import math
from collections.abc import Iterator
from typing import Any

from worker_proc.errors import ModelError
from worker_proc.gguf.architectures import LONG_FACTORS, SHARED_FACTORS
from worker_proc.gguf.settings import Settings, shortest

Factors = dict[str, list[float]]  # what frequencies are divided by, by the tensor that says so
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_scaling(settings: Settings, factors: Factors, head_dim: int, theta: float) -> dict[str, Any] | None:
    """None where there is none. Raises ModelError for one that is unknown, or that tensors contradict."""
    kind = settings.get("rope.scaling.type", "none")
    original = settings.get("rope.scaling.original_context_length")
    factor = settings.get("rope.scaling.factor", settings.get("rope.scale_linear"))
    if not factors.keys().isdisjoint(LONG_FACTORS):
        if kind not in ("none", "longrope"):
            raise ModelError(LONG_FACTORS[0], kind, "beside another scaling of rotations")
        return _longrope(settings, factors)
    settings.must_be("rope.scaling.attn_factor", 1.0)
    if factors:
        (name,) = SHARED_FACTORS
        if kind not in ("none", "linear") or factor not in (None, 1.0):
            raise ModelError(name, kind, "beside another scaling of rotations")
        return _llama3(name, factors[name], head_dim, theta)
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


def _longrope(settings: Settings, factors: Factors) -> dict[str, Any]:
    """Phi-3's two sets of factors, up to its original context and beyond."""
    for name in LONG_FACTORS:
        if name not in factors:
            raise ModelError(name, None, "the file lacks this tensor")
    short, long = (factors[name] for name in LONG_FACTORS)
    found: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    found["original_max_position_embeddings"] = settings.whole("rope.scaling.original_context_length")
    if settings.get("rope.scaling.attn_factor") is not None:
        found["attention_factor"] = settings.number("rope.scaling.attn_factor")
    return found


def _llama3(name: str, factors: list[float], head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3's scaling, which files hold as what frequencies are divided by. Raises ModelError for other numbers."""
    rope = {"rope_type": "llama3", "factor": shortest(max(factors)), **_LLAMA3}
    expected = list(_llama3_factors(rope, head_dim, theta))
    near = len(expected) == len(factors) and all(map(lambda a, b: abs(a - b) < 1e-3 * b, factors, expected))
    if not near:
        raise ModelError(name, factors[:4], "not the factors of Llama 3 for this head size")
    return rope


def _llama3_factors(rope: dict[str, Any], head_dim: int, theta: float) -> Iterator[float]:
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for i in range(head_dim // 2):
        turns = original / (2 * math.pi * theta ** (2 * i / head_dim))
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        yield 1 / ((1 - share) / factor + share)
