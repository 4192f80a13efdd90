"""Reads single fields of config.json, strictly: what has another type or range is refused by name. Needs no torch."""

from collections.abc import Mapping
from typing import Any

from worker_proc.errors import ModelError

Config = Mapping[str, Any]

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")


def activation(config: Config, key: str, default: str) -> str:
    """The name of an activation function that the decoders know; raises ModelError."""
    name = config.get(key, default)
    if name not in ACTIVATIONS:
        raise ModelError(key, name, f"activation is not one of {', '.join(ACTIVATIONS)}")
    return str(name)


def divide(whole: int, parts: int, whole_key: str, parts_key: str) -> int:
    """whole / parts; raises ModelError where it is not a whole number."""
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


def optional_float(config: Config, key: str) -> float | None:
    """As `positive_float`, or None if the key is absent or null."""
    return None if config.get(key) is None else positive_float(config, key, 1.0)


def dual_chunk_limit(config: Config) -> int | None:
    """Positions up to which dual chunk attention, which is not implemented, equals the plain one; None where a config
    does not ask for it. (An et al., 2024; beyond a chunk less its local part, it renumbers what is far away.)"""
    key = "dual_chunk_attention_config"
    settings = config.get(key)
    if not settings:
        return None
    if not isinstance(settings, dict):
        raise ModelError(key, settings, "must be an object")
    limit = positive_int(settings, "chunk_size") - positive_int(settings, "local_size")
    if limit < 1:
        raise ModelError(key, settings, "chunk_size must be more than local_size")
    return limit


def boolean(config: Config, key: str, default: bool) -> bool:
    """true, false or absent; raises ModelError."""
    value = config.get(key, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(key, value, "must be true or false")
    return value
