"""What `quantization_config` of a checkpoint says, for the formats that are read. Needs no torch.

Every setting that would change the numbers and is not implemented is refused by name. Which modules are quantized is
seen from their tensors, so lists of exceptions (`ignore`, `modules_to_not_convert`, `dynamic`) need no reading.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from worker_proc.errors import ModelError
from worker_proc.quantization.scheme import GROUP_MULTIPLE, Scheme

Method = Literal["compressed-tensors", "gptq", "awq"]
METHODS: tuple[Method, ...] = ("compressed-tensors", "gptq", "awq")


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """`zero_offset` is what stored zeros lack to the real ones (1 in GPTQ's first format)."""

    method: Method
    scheme: Scheme
    zero_offset: int = 0


def parse_stored(config: Mapping[str, Any]) -> StoredQuantization | None:
    """From a checkpoint's config.json; None where its weights are plain. Raises ModelError naming what is not
    supported."""
    stored = config.get("quantization_config")
    if not stored:
        return None
    if not isinstance(stored, dict):
        raise ModelError("quantization_config", stored, "must be an object")
    method = stored.get("quant_method")
    if method == "gptq":
        return _gptq(stored)
    if method == "awq":
        return _awq(stored)
    if method == "compressed-tensors":
        return _compressed_tensors(stored)
    raise ModelError("quantization_config: quant_method", method, f"only {', '.join(METHODS)} are supported")


def _gptq(stored: Mapping[str, Any]) -> StoredQuantization:
    _require(stored, "desc_act", (False, None), "inputs in the order of activations are not supported")
    _require(stored, "static_groups", (False, None), "not supported")
    layout = stored.get("checkpoint_format", stored.get("format")) or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise ModelError("quantization_config: checkpoint_format", layout, "only gptq and gptq_v2 are supported")
    bits = _require(stored, "bits", (4, 8), "only 4 and 8 bits are supported")
    symmetric = stored.get("sym", True)
    if not isinstance(symmetric, bool):
        raise ModelError("quantization_config: sym", symmetric, "must be true or false")
    return StoredQuantization("gptq", Scheme(bits, _group_size(stored), symmetric), int(layout == "gptq"))


def _awq(stored: Mapping[str, Any]) -> StoredQuantization:
    version = str(stored.get("version", "gemm")).lower()
    if version != "gemm":
        raise ModelError("quantization_config: version", version, "only gemm is supported")
    bits = _require(stored, "bits", (4,), "only 4 bits are supported")
    _require(stored, "zero_point", (True, None), "only weights with zero points are supported")
    return StoredQuantization("awq", Scheme(bits, _group_size(stored), symmetric=False))


def _compressed_tensors(stored: Mapping[str, Any]) -> StoredQuantization:
    _require(stored, "format", ("pack-quantized",), "only pack-quantized is supported")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        _require(stored, key, (None, {}), "not supported")
    groups = stored.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not all(isinstance(g, dict) for g in groups.values()):
        raise ModelError("quantization_config: config_groups", groups, "one group of modules is supported")
    (group,) = groups.values()
    for key in ("input_activations", "output_activations"):
        _require(group, key, (None,), "only weights may be quantized")
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise ModelError("quantization_config: weights", weights, "must be an object")
    bits = _require(weights, "num_bits", (4, 8), "only 4 and 8 bits are supported")
    _require(weights, "type", ("int", None), "only int is supported")
    _require(weights, "dynamic", (False, None), "weights have fixed scales")
    _require(weights, "actorder", (None, "weight", "static", False), "only order by weight is supported")
    strategy = _require(weights, "strategy", ("group", "channel"), "only group and channel are supported")
    size = _group_size(weights) if strategy == "group" else None
    return StoredQuantization("compressed-tensors", Scheme(bits, size, bool(weights.get("symmetric", True))))


def _require(stored: Mapping[str, Any], key: str, allowed: tuple[Any, ...], reason: str) -> Any:
    value = stored.get(key)
    if not any(value == other and isinstance(value, type(other)) for other in allowed):
        raise ModelError(f"quantization_config: {key}", value, reason)
    return value


def _group_size(stored: Mapping[str, Any]) -> int | None:
    """-1 is a group of all inputs."""
    size = stored.get("group_size", 128)
    if size == -1:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0 or size % GROUP_MULTIPLE:
        raise ModelError("quantization_config: group_size", size, f"must be -1 or a multiple of {GROUP_MULTIPLE}")
    return size
