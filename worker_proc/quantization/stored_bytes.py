"""Reads projections that a checkpoint holds with a byte for each weight: FP8, and int8 of compressed-tensors.

`weight` [out, in] is F8_E4M3 or I8. A number of `weight_scale` (or `weight_scale_inv`, which multiplies as well) is for
a block of outputs and inputs: [blocks of outputs, blocks of inputs], [out, 1] or [out] where a block is an output, one
number where it is everything. What would round activations (`input_scale` and the like) is not read: they stay as they
are.
"""

import torch
from torch import Tensor

from worker_proc.errors import ModelError
from worker_proc.models.loading import Part
from worker_proc.quantization.rows import QuantizedRows
from worker_proc.quantization.stored_config import StoredBytes, StoredQuantization
from worker_proc.quantization.stored_entries import SCALE_DTYPES, find_entry, module_of
from worker_proc.weights import Checkpoint, TensorEntry

_SCALES = ("weight_scale", "weight_scale_inv")
_UNREAD = ("input_scale", "input_zero_point", "activation_scale")


def holds(stored: StoredQuantization, checkpoint: Checkpoint, part: Part) -> bool:
    """See `stored.StoredLayout`."""
    entry = checkpoint.tensors.get(f"{module_of(part)}.weight")
    return entry is not None and entry.dtype == _bytes(stored).dtype


def find(stored: StoredQuantization, checkpoint: Checkpoint, part: Part) -> dict[str, TensorEntry]:
    """See `stored.StoredLayout`."""
    as_bytes = _bytes(stored)
    module, blocks = module_of(part), as_bytes.blocks(part.shape)
    shapes: tuple[tuple[int, ...], ...] = (blocks,)
    if blocks[1] == 1:
        shapes += ((blocks[0],), ()) if blocks[0] == 1 else ((blocks[0],),)
    names = [f"{module}.{suffix}" for suffix in _SCALES]
    scale = names[1] if names[1] in checkpoint.tensors else names[0]
    return {
        "weight": find_entry(checkpoint, f"{module}.weight", (part.shape,), (as_bytes.dtype,)),
        "scale": find_entry(checkpoint, scale, shapes, SCALE_DTYPES),
    }


def unread_names(checkpoint: Checkpoint, part: Part) -> tuple[str, ...]:
    """Tensors of such a projection that are known, but not needed."""
    names = (f"{module_of(part)}.{suffix}" for suffix in _UNREAD)
    return tuple(name for name in names if name in checkpoint.tensors)


def unpack(stored: StoredQuantization, part: Part, tensors: dict[str, Tensor]) -> QuantizedRows:
    """See `stored.StoredLayout`. Refuses FP8 that is not a number, and numbers of more bits than there should be."""
    as_bytes, scheme, outputs = _bytes(stored), stored.scheme, part.shape[0]
    codes = tensors["weight"].view(torch.uint8)
    if not scheme.floating:
        codes = codes + scheme.middle  # two's complement
        if bool((codes > 2**scheme.bits - 1).any()):
            raise ModelError(f"{module_of(part)}.weight", "a code", f"does not fit into {scheme.bits} bits")
    elif bool(((codes & 127) == 127).any()):
        raise ModelError(f"{module_of(part)}.weight", "NaN", "a weight is not a number")
    scales = tensors["scale"].float().reshape(as_bytes.blocks(part.shape))
    scales = scales.repeat_interleave(as_bytes.block[0] or outputs, 0)[:outputs]
    return QuantizedRows(scheme, codes, scales.contiguous())


def _bytes(stored: StoredQuantization) -> StoredBytes:
    assert stored.as_bytes is not None
    return stored.as_bytes
