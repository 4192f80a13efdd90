"""Reads projections that a checkpoint holds in MXFP4: FP4 (E2M1) in groups of 32 inputs with a power of two as scale
(OCP Microscaling Formats, 2023).

Two codes are a byte, the first one in the lower half; a scale is a byte e, for 2^(e - 127).

- gpt-oss: the experts of a layer are one tensor, `..._blocks` [experts, out, in / 32, 16] and `..._scales` [experts,
  out, in / 32].
- compressed-tensors (mxfp4-pack-quantized): `weight_packed` [out, in / 2] and `weight_scale` [out, in / 32].
"""

from torch import Tensor

from worker_proc.errors import ModelError
from worker_proc.models.loading import Part
from worker_proc.quantization.rows import QuantizedRows, powers_of_two
from worker_proc.quantization.stored_config import StoredQuantization
from worker_proc.quantization.stored_entries import find_entry, module_of
from worker_proc.weights import Checkpoint, TensorEntry

_GROUP = 32
_NAN = 255


def holds(stored: StoredQuantization, checkpoint: Checkpoint, part: Part) -> bool:
    """See `stored.StoredLayout`."""
    return _names(stored, part)[0] in checkpoint.tensors


def find(stored: StoredQuantization, checkpoint: Checkpoint, part: Part) -> dict[str, TensorEntry]:
    """See `stored.StoredLayout`. Of one matrix each; refuses inputs that are no whole groups."""
    outputs, inputs = part.shape[0] * part.turn[1], part.shape[1]
    if inputs % _GROUP:
        raise ModelError(part.name, list(part.shape), f"MXFP4 needs inputs in whole groups of {_GROUP}")
    codes, scales = _names(stored, part)
    groups = inputs // _GROUP
    in_blocks = (outputs, groups, _GROUP // 2) if stored.method == "mxfp4" else (outputs, inputs // 2)
    stack = () if part.stack is None else (part.stack[1],)
    found = {
        "codes": find_entry(checkpoint, codes, ((*stack, *in_blocks),), ("U8",)),
        "scales": find_entry(checkpoint, scales, ((*stack, outputs, groups),), ("U8",)),
    }
    return {name: entry.of_stack(part.stack) for name, entry in found.items()}


def unpack(stored: StoredQuantization, part: Part, tensors: dict[str, Tensor]) -> QuantizedRows:
    """See `stored.StoredLayout`. Refuses a scale that is not a number."""
    first, step = part.turn
    codes = tensors["codes"].flatten(1)[first::step]
    exponents = tensors["scales"][first::step]
    if int(exponents.max()) == _NAN:
        raise ModelError(part.name, "NaN", "a scale is not a number")
    scales = powers_of_two(exponents)
    return QuantizedRows(stored.scheme, codes, scales, halved=True)


def _names(stored: StoredQuantization, part: Part) -> tuple[str, str]:
    """Of the tensors with codes and with scales."""
    if stored.method == "mxfp4":
        return part.name + "_blocks", part.name + "_scales"
    return module_of(part) + ".weight_packed", module_of(part) + ".weight_scale"
