"""What `quantization_config` of a checkpoint says, for the formats that are read. Needs no torch.

Every setting that would change the numbers and is not implemented is refused by name. Which modules are quantized is
seen from their tensors, so lists of exceptions (`ignore`, `modules_to_not_convert`) need no reading. All that are have
the same settings: GPTQ's `dynamic` may exclude modules, and change nothing of others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from worker_proc.errors import ModelError
from worker_proc.quantization.scheme import GROUP_MULTIPLE, MXFP4, Scheme

Method = Literal["compressed-tensors", "gptq", "awq", "fp8", "mxfp4", "gguf"]
METHODS: tuple[Method, ...] = ("compressed-tensors", "gptq", "awq", "fp8", "mxfp4", "gguf")
_COMPRESSED_FORMATS = (
    "pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "mxfp4-pack-quantized"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Weights with a byte each, in safetensors' `dtype`. A `block` of outputs by inputs has one scale; None: all. Where
    `dynamic`, rows of activations are to be rounded to int8, too. Codes may have 4 `bits` of their byte."""

    dtype: Literal["F8_E4M3", "I8"]
    block: tuple[int | None, int | None]
    dynamic: bool = False
    bits: int = 8

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.bits, self.block[1], floating=self.dtype == "F8_E4M3", dynamic=self.dynamic)

    def blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of outputs and of inputs in a matrix, the last ones perhaps smaller."""
        return tuple(-(-size // (block or size)) for size, block in zip(shape, self.block, strict=True))


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """`zero_offset` is what stored zeros lack to the real ones (1 in GPTQ's first format); `as_bytes` says how weights
    lie that are not packed into words."""

    method: Method
    scheme: Scheme
    zero_offset: int = 0
    as_bytes: StoredBytes | None = None

    def fits(self, scheme: Scheme) -> bool:
        """Whether the option of this scheme may say how the codes are multiplied: where they have as many bits, and in
        GGUF files, whose matrices differ."""
        alike = self.scheme.bits == scheme.bits and (not self.scheme.floating or scheme.bits == 4)
        return scheme.dynamic and (self.method == "gguf" or alike)


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
    if method == "fp8":
        return _fp8(stored)
    if method == "mxfp4":
        return StoredQuantization("mxfp4", MXFP4)
    if method == "gguf":  # tensors say how they are held, each for itself
        return StoredQuantization("gguf", Scheme(8, GROUP_MULTIPLE))
    raise ModelError("quantization_config: quant_method", method, f"only {', '.join(METHODS)} are supported")


def _gptq(stored: Mapping[str, Any]) -> StoredQuantization:
    common, rules = _gptq_layout(stored), stored.get("dynamic") or {}
    if not isinstance(rules, dict):
        raise ModelError("quantization_config: dynamic", rules, "must be an object")
    for pattern, settings in rules.items():
        if pattern.startswith("-:"):  # not quantized
            continue
        # not all of it shows in the tensors: symmetric codes are stored with zeros, too
        if not isinstance(settings, dict) or _gptq_layout({**stored, **settings}) != common:
            reason = "settings of single modules are not supported"
            raise ModelError(f"quantization_config: dynamic: {pattern}", settings, reason)
    return common


def _gptq_layout(stored: Mapping[str, Any]) -> StoredQuantization:
    by_activations = _require(stored, "desc_act", (False, True, None), "must be true or false")
    layout = stored.get("checkpoint_format", stored.get("format")) or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise ModelError("quantization_config: checkpoint_format", layout, "only gptq and gptq_v2 are supported")
    bits = _require(stored, "bits", (4, 8), "only 4 and 8 bits are supported")
    symmetric = stored.get("sym", True)
    if not isinstance(symmetric, bool):
        raise ModelError("quantization_config: sym", symmetric, "must be true or false")
    size = _group_size(stored)
    scheme = Scheme(bits, size, symmetric, ordered=bool(by_activations) and size is not None)
    return StoredQuantization("gptq", scheme, int(layout == "gptq"))


def _awq(stored: Mapping[str, Any]) -> StoredQuantization:
    version = str(stored.get("version", "gemm")).lower()
    if version != "gemm":
        raise ModelError("quantization_config: version", version, "only gemm is supported")
    bits = _require(stored, "bits", (4,), "only 4 bits are supported")
    _require(stored, "zero_point", (True, None), "only weights with zero points are supported")
    return StoredQuantization("awq", Scheme(bits, _group_size(stored), symmetric=False))


def _fp8(stored: Mapping[str, Any]) -> StoredQuantization:
    _require(stored, "fmt", ("e4m3", None), "only e4m3 is supported")
    _require(stored, "activation_scheme", ("dynamic", "static", None), "must be dynamic or static")
    _require(stored, "scale_fmt", ("float", None), "only float is supported")
    _require(stored, "expert_dtype", ("fp8", None), "only fp8 is supported")
    _require(stored, "kv_cache_scheme", (None,), "not supported")
    in_blocks = stored.get("weight_block_size") is not None
    layout = StoredBytes("F8_E4M3", _block(stored, "weight_block_size") if in_blocks else (None, None))
    return StoredQuantization("fp8", layout.scheme, as_bytes=layout)


def _compressed_tensors(stored: Mapping[str, Any]) -> StoredQuantization:
    layout = _require(stored, "format", _COMPRESSED_FORMATS, f"only {', '.join(_COMPRESSED_FORMATS)} are supported")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        _require(stored, key, (None, {}), "not supported")
    groups = stored.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not all(isinstance(g, dict) for g in groups.values()):
        raise ModelError("quantization_config: config_groups", groups, "one group of modules is supported")
    (group,) = groups.values()
    _require(group, "output_activations", (None,), "not supported")
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise ModelError("quantization_config: weights", weights, "must be an object")
    if layout == "mxfp4-pack-quantized":
        return _compressed_mxfp4(weights)
    if layout != "pack-quantized":
        return _compressed_bytes(layout, weights, group.get("input_activations"))
    bits = _require(weights, "num_bits", (4, 8), "only 4 and 8 bits are supported")
    rounds = _rounds_rows(group.get("input_activations"))
    if not rounds:
        _require(group, "input_activations", (None,), "only int8 per token is supported")
    _require(weights, "type", ("int", None), "only int is supported")
    _require(weights, "dynamic", (False, None), "weights have fixed scales")
    known = (None, "weight", "static", "group", False)
    order = _require(weights, "actorder", known, "only weight, static and group are supported")
    strategy = _require(weights, "strategy", ("group", "channel"), "only group and channel are supported")
    size = _group_size(weights) if strategy == "group" else None
    symmetric, ordered = bool(weights.get("symmetric", True)), order == "group" and size is not None
    scheme = Scheme(bits, size, symmetric, ordered=ordered, dynamic=rounds)
    return StoredQuantization("compressed-tensors", scheme)


def _compressed_mxfp4(weights: Mapping[str, Any]) -> StoredQuantization:
    _require(weights, "num_bits", (4,), "only 4 bits are supported")
    _require(weights, "type", ("float",), "must be float")
    _require(weights, "strategy", ("group", None), "must be group")
    _require(weights, "group_size", (32, None), "must be 32")
    _require(weights, "symmetric", (True, None), "only weights without zero points are supported")
    _require(weights, "dynamic", (False, None), "weights have fixed scales")
    _require(weights, "actorder", (None, False), "not supported")
    _require(weights, "scale_dtype", ("torch.uint8", "uint8", None), "only uint8 is supported")
    return StoredQuantization("compressed-tensors", MXFP4)


def _compressed_bytes(layout: str, weights: Mapping[str, Any], activations: object) -> StoredQuantization:
    bits = _require(weights, "num_bits", (4, 8) if layout == "int-quantized" else (8,), "not supported in this format")
    kinds = {"float-quantized": ("float",), "int-quantized": ("int",)}.get(layout, ("float", "int"))
    kind = _require(weights, "type", kinds, f"must be {' or '.join(kinds)} with {layout}")
    _require(weights, "symmetric", (True, None), "only weights without zero points are supported")
    _require(weights, "dynamic", (False, None), "weights have fixed scales")
    _require(weights, "actorder", (None, False), "not supported")
    strategies = ("tensor", "channel", "group", "block")
    strategy = _require(weights, "strategy", strategies, f"must be one of {', '.join(strategies)}")
    block: tuple[int | None, int | None] = (None, None) if strategy == "tensor" else (1, None)
    if strategy == "group":
        block = 1, _group_size(weights)
    elif strategy == "block":
        block = _block(weights, "block_structure")
    dynamic = kind == "int" and _rounds_rows(activations)
    as_bytes = StoredBytes("F8_E4M3" if kind == "float" else "I8", block, dynamic, bits)
    return StoredQuantization("compressed-tensors", as_bytes.scheme, as_bytes=as_bytes)


def _rounds_rows(activations: object) -> bool:
    """Whether they are rounded to int8 by rows, with scales of their own making. What else is said of them is left
    out: it rounds them to what GPUs multiply, and here nothing does."""
    if not isinstance(activations, dict):
        return False
    rounded = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}
    return all(activations.get(key) == value for key, value in rounded.items())


def _block(stored: Mapping[str, Any], key: str) -> tuple[int, int]:
    """Outputs and inputs that have a scale in common."""
    block = stored.get(key)
    sizes = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if not isinstance(block, list) or not sizes or block[1] % GROUP_MULTIPLE:
        reason = f"must be two numbers, of outputs and of inputs, the second a multiple of {GROUP_MULTIPLE}"
        raise ModelError(f"quantization_config: {key}", block, reason)
    return block[0], block[1]


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
