"""The rotary-embedding part of config.json, in both spellings: `rope_parameters` (transformers 5) and the older
`rope_scaling` beside `rope_theta`. Needs no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from worker_proc.errors import ModelError

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_QUERY_BETA = "llama_4_scaling_beta"
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
    "proportional": {"factor"},
}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A rotary embedding. Fields beyond `theta` matter to the kinds that name them."""

    kind: str
    dim: int  # the first numbers of a head, which are rotated
    theta: float
    factor: float = 1.0
    original_context: int = 0  # yarn, llama3, longrope: context length before scaling
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    turning: int = 0  # proportional: so many of the frequencies are not 0
    query_beta: float = 0.0  # yarn: queries are multiplied by 1 + this * log(1 + position // original_context)
    max_positions: int | None = None  # beyond this many positions the frequencies would depend on the length


def parse_rope(
    config: Mapping[str, Any], head_dim: int, context: int, *, partial: bool = False, tempered: bool = False
) -> RopeSpec:
    """`partial` says that the model knows rotations of the first part of a head, `tempered` that with yarn it scales
    queries by their positions. Raises ModelError naming a key that is unknown, missing or impossible."""
    # transformers lets rope_scaling win when both are given, and keeps rope_theta inside rope_parameters
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(field) or {}
    if not isinstance(given, dict):
        raise ModelError(field, given, "must be an object")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _KEYS:
        raise ModelError(f"{field}.rope_type", kind, f"not one of {', '.join(_KEYS)}")
    scaled_from_original = kind in ("yarn", "llama3", "longrope")
    allowed = _COMMON | _KEYS[kind] | ({"original_max_position_embeddings"} if scaled_from_original else set())
    tempered = tempered and kind == "yarn"
    if tempered:
        allowed |= {_QUERY_BETA, "max_position_embeddings"}
    for key in given:
        # a leftover of another kind that is null changes nothing
        if key not in allowed and given[key] is not None:
            raise ModelError(f"{field}.{key}", given[key], f"unknown for rope type {kind!r}")
    part = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    proportional = kind == "proportional"
    if part not in (None, 1, 1.0) and not partial and not proportional:
        raise ModelError("partial_rotary_factor", part, "this model rotates whole heads")
    part = 1.0 if part is None else part
    if not isinstance(part, int | float) or isinstance(part, bool) or not 0 < part <= 1:
        raise ModelError("partial_rotary_factor", part, "must be a number above 0, at most 1")
    dim = head_dim if proportional else int(head_dim * part)
    if dim % 2 or not dim:
        reason = f"rotary embeddings need an even number of dimensions, not {dim}"
        raise ModelError("head_dim", head_dim, reason)
    theta = _number(given, "rope_theta", config.get("rope_theta") or 10000.0, field)
    original = _original_context(config, given, context, field) if scaled_from_original else context
    spec = RopeSpec(kind=kind, dim=dim, theta=theta, original_context=original)
    if proportional:
        spec = replace(spec, turning=int(part * head_dim // 2))
    if tempered and given.get(_QUERY_BETA) not in (None, 0):
        spec = replace(spec, query_beta=_number(given, _QUERY_BETA, None, field))
    return _with_kind(spec, given, context, field)


def _with_kind(spec: RopeSpec, given: Mapping[str, Any], context: int, field: str) -> RopeSpec:
    if spec.kind == "default":
        return spec
    stretched = context / spec.original_context
    default_factor = stretched if spec.kind in ("yarn", "longrope") else 1.0 if spec.kind == "proportional" else None
    factor = _number(given, "factor", default_factor, field)
    spec = replace(spec, factor=factor)
    match spec.kind:
        case "dynamic":
            # Within the trained context the frequencies are the plain ones. Beyond it they change with the length of
            # the sequence, which keys that are already cached cannot follow.
            return replace(spec, max_positions=context)
        case "yarn":
            beta_fast = _number(given, "beta_fast", 32.0, field)
            beta_slow = _number(given, "beta_slow", 1.0, field)
            truncate = given.get("truncate", True)
            if not isinstance(truncate, bool):
                raise ModelError(f"{field}.truncate", truncate, "must be true or false")
            attention = _yarn_attention_factor(given, factor, field)
            return replace(
                spec, attention_factor=attention, beta_fast=beta_fast, beta_slow=beta_slow, truncate=truncate
            )
        case "llama3":
            low = _number(given, "low_freq_factor", None, field)
            high = _number(given, "high_freq_factor", None, field)
            if high <= low:
                raise ModelError(f"{field}.high_freq_factor", high, f"must be above low_freq_factor = {low}")
            return replace(spec, low_freq_factor=low, high_freq_factor=high)
        case "longrope":
            short = given.get("short_factor")
            numbers = isinstance(short, list) and all(isinstance(x, int | float) and x > 0 for x in short)
            if not numbers or not isinstance(short, list) or len(short) != spec.dim // 2:
                raise ModelError(f"{field}.short_factor", short, f"must list {spec.dim // 2} positive numbers")
            default = math.sqrt(1 + math.log(factor) / math.log(spec.original_context)) if factor > 1 else 1.0
            attention = _number(given, "attention_factor", default, field)
            # Sequences that outgrow the original context switch to other factors for all of their positions.
            return replace(
                spec, attention_factor=attention, short_factor=tuple(short), max_positions=spec.original_context
            )
    return spec


def _yarn_attention_factor(given: Mapping[str, Any], factor: float, field: str) -> float:
    """The paper's 0.1 ln(s) + 1, or DeepSeek's ratio of two of them when both mscale keys are set."""

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("attention_factor") is not None:
        return _number(given, "attention_factor", None, field)
    if given.get("mscale") and given.get("mscale_all_dim"):
        mscale, all_dim = (_number(given, key, None, field) for key in ("mscale", "mscale_all_dim"))
        return temperature(mscale) / temperature(all_dim)
    return temperature(1.0)


def _original_context(config: Mapping[str, Any], given: Mapping[str, Any], context: int, field: str) -> int:
    key = "original_max_position_embeddings"
    value = config.get(key) or given.get(key) or context
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        raise ModelError(f"{field}.{key}", value, "must be an integer above 1")
    return value


def _number(given: Mapping[str, Any], key: str, default: float | None, field: str) -> float:
    value = given.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ModelError(f"{field}.{key}", value, "must be a positive number")
    return float(value)
