"""Reads what a checkpoint's config files say, without torch and, for most models, without transformers."""

from collections import Counter
from pathlib import Path
from typing import Any

from common.sampling_params import MAX_TOKEN_ID
from worker_proc.checkpoint import open_checkpoint
from worker_proc.errors import ModelError
from worker_proc.gguf.kinds import CODED
from worker_proc.gguf.names import gguf_files
from worker_proc.models.config_fields import Config, dual_chunk_limit, positive_int
from worker_proc.models.end_tokens import eos_token_ids
from worker_proc.models.families import check_servable, is_native, parse_spec
from worker_proc.models.interface import ModelInfo
from worker_proc.models.language_part import class_config, is_multimodal, language_config
from worker_proc.quantization.stored_config import parse_stored
from worker_proc.weights import Checkpoint, read_json

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_UNLIMITED = 2**18  # tokens of models without attention, which have no limit; what Codestral Mamba was tested with
_BLOOM = 2048  # tokens that it was trained with
_DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CODE_DTYPES = ("I64", "I32", "U8", "I8", "F8_E4M3")  # quantized weights, and what belongs to them
_SCALES = (".scales", "_scale", "_scale_inv")  # whose precision is not that of the model


def describe(path: str | Path) -> ModelInfo:
    """Raises ModelError naming the config key, file or tensor that is missing, malformed or not supported."""
    directory = Path(path)
    checkpoint = open_checkpoint(directory)
    config = read_config(directory)
    native, stored = is_native(config), parse_stored(config)
    if native:
        spec = parse_spec(config)
        vocab_size, context_length = spec.vocab_size, spec.context_length
    else:
        check_servable(config)
        if "vocab_size" not in config or not any(key in config for key in _CONTEXT_KEYS):
            config = _with_defaults(directory, config)
        vocab_size, context_length = positive_int(config, "vocab_size"), context_limit(config)
    if vocab_size > (most := min(MAX_TOKEN_ID, checkpoint.nbytes)):  # before anything is made that large
        raise ModelError("vocab_size", vocab_size, f"at most {most} tokens fit in messages and in these weights")
    if context_length < 2:
        reason = "a context window has at least 2 tokens, one of them for the answer"
        raise ModelError("max_position_embeddings", context_length, reason)
    return ModelInfo(
        architecture=_architecture(config),
        model_type=str(config.get("model_type")),
        backend="native" if native else "transformers",
        vocab_size=vocab_size,
        context_length=context_length,
        eos_token_ids=eos_token_ids(directory, config),
        parameter_bytes=checkpoint.nbytes,
        dtype="bfloat16" if not native and gguf_files(directory) else _dtype(checkpoint),  # else they are not read
        quantization=stored.method if stored is not None else None,
    )


def read_config(directory: Path) -> dict[str, Any]:
    """The directory's config.json, or of a multimodal model that of its language model; raises ModelError if it is not
    there or names no model type."""
    config = read_json(directory / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelError("model_type", config.get("model_type"), "config.json must name the model type")
    return language_config(directory, config) if is_multimodal(config) else config


def context_limit(config: Config) -> int:
    """Positions that a model outside the native set may be run at.

    Rotary variants that depend on the length of the longest sequence in the batch (longrope, dynamic) are limited to
    the lengths at which they do not, as is dual chunk attention to those at which it is the plain one.
    """
    limit = next((positive_int(config, key) for key in _CONTEXT_KEYS if config.get(key) is not None), None)
    if limit is None and config.get("num_attention_heads") is None:
        return _UNLIMITED
    if limit is None and config["model_type"] == "bloom":
        return _BLOOM  # some of its files say nothing
    if limit is None:
        raise ModelError("max_position_embeddings", None, "the context length is not known")
    limit = min(limit, dual_chunk_limit(config) or limit)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    variants = [rope, *(value for value in rope.values() if isinstance(value, dict))] if isinstance(rope, dict) else []
    for variant in variants:
        if variant.get("rope_type", variant.get("type")) in ("longrope", "su"):
            key = "original_max_position_embeddings"
            original = config.get(key) or variant.get(key)
            if original is not None:
                limit = min(limit, positive_int({key: original}, key))
    return limit


def _with_defaults(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    known = class_config(directory, config)  # only for configs that leave keys to their class
    keys = ("vocab_size", "eos_token_id", "num_attention_heads", *_CONTEXT_KEYS)
    return {key: getattr(known, key) for key in keys if getattr(known, key, None) is not None} | config


def _architecture(config: Config) -> str:
    names = config.get("architectures")
    if names is None:
        return str(config.get("model_type"))
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelError("architectures", names, "must be a list of one name")
    return names[0]


def _dtype(checkpoint: Checkpoint) -> str:
    sizes: Counter[str] = Counter()
    for entry in checkpoint.tensors.values():
        if entry.dtype in CODED:
            sizes["bfloat16"] += entry.nbytes
        elif entry.dtype not in _CODE_DTYPES and not entry.name.endswith(_SCALES):
            sizes[_DTYPES.get(entry.dtype, "float32")] += entry.nbytes
    return sizes.most_common(1)[0][0] if sizes else "float32"
