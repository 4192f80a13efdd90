"""Reads projections whose codes lie 32 / bits to an int32, the first one in the lowest bits: compressed-tensors, GPTQ
and AWQ.

- compressed-tensors (pack-quantized): `weight_packed` [out, in / n] along the inputs, `weight_scale` [out, groups],
  with zero points `weight_zero_point` [out / n, groups] along the outputs, `weight_shape`, and, with actorder "group",
  `weight_g_idx` [in], the group of each input.
- GPTQ: `qweight` [in / n, out] along the inputs, `qzeros` [groups, out / n] along the outputs, `scales` [groups, out],
  `g_idx` [in], the group of each input: in turn, but with desc_act. Its first format stores words of zeros less one in
  each place, with borrows from one place to the next (`convert_gptq_v2_to_v1_format` of GPTQModel).
- AWQ: `qweight` [in, out / n] and `qzeros` [groups, out / n] along the outputs, whose eight codes are in the order
  0, 2, 4, 6, 1, 3, 5, 7, and `scales` [groups, out].
"""

import torch
from torch import Tensor

from worker_proc.errors import ModelError
from worker_proc.models.loading import Part
from worker_proc.quantization.rows import QuantizedRows
from worker_proc.quantization.stored_config import StoredQuantization
from worker_proc.quantization.stored_entries import SCALE_DTYPES, find_entry, module_of
from worker_proc.weights import Checkpoint, TensorEntry

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where the codes 0, 1, ... of an int32 are
_MAIN = {"compressed-tensors": "weight_packed", "gptq": "qweight", "awq": "qweight"}
_CODE_DTYPES = ("I32", "I64")


def holds(stored: StoredQuantization, checkpoint: Checkpoint, part: Part) -> bool:
    """See `stored.StoredLayout`."""
    return f"{module_of(part)}.{_MAIN[stored.method]}" in checkpoint.tensors


def find(stored: StoredQuantization, checkpoint: Checkpoint, part: Part) -> dict[str, TensorEntry]:
    """See `stored.StoredLayout`."""
    entries = {}
    for suffix, shape in _shapes(stored, part).items():
        name = f"{module_of(part)}.{suffix}"
        optional = suffix == "weight_shape" or (suffix == "g_idx" and not stored.scheme.ordered)
        if name not in checkpoint.tensors and optional:
            continue
        allowed = SCALE_DTYPES if "scale" in suffix else _CODE_DTYPES
        entries[suffix] = find_entry(checkpoint, name, (shape,), allowed)
    return entries


def unpack(stored: StoredQuantization, part: Part, tensors: dict[str, Tensor]) -> QuantizedRows:
    """See `stored.StoredLayout`."""
    outputs, inputs = part.shape
    scheme, bits = stored.scheme, stored.scheme.bits
    zeros = None
    if stored.method == "compressed-tensors":
        if "weight_shape" in tensors and tensors["weight_shape"].tolist() != [outputs, inputs]:
            raise ModelError(
                f"{module_of(part)}.weight_shape", tensors["weight_shape"].tolist(), f"should be {part.shape}"
            )
        codes = _unpack(tensors["weight_packed"], bits)[:, :inputs]
        scales = tensors["weight_scale"]
        if not scheme.symmetric:
            zeros = _unpack(tensors["weight_zero_point"].t(), bits)[:, :outputs].t()
    else:
        places = _AWQ_PLACES if stored.method == "awq" else None
        if stored.method == "awq":
            codes = _unpack(tensors["qweight"], bits, places).t()
        else:
            codes = _unpack(tensors["qweight"].t(), bits)
        scales = tensors["scales"].t()
        if not scheme.symmetric:
            less = sum(stored.zero_offset << place for place in range(0, 32, bits))
            zeros = _unpack(tensors["qzeros"] + less, bits, places).t()
    groups = tensors.get("g_idx", tensors.get("weight_g_idx"))
    order = _order(stored, part, groups) if groups is not None else None
    return QuantizedRows(
        scheme,
        codes.contiguous() if order is None else codes[:, order],
        scales.float().contiguous(),
        zeros.float().contiguous() if zeros is not None else None,
        order,
    )


def _unpack(packed: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """int32 `[R, C]` to codes uint8 `[R, C * 32 / bits]`."""
    order = places or tuple(range(32 // bits))
    shifts = torch.tensor([bits * place for place in order], dtype=torch.int32)
    codes: Tensor = (packed[:, :, None] >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(1)


def _shapes(stored: StoredQuantization, part: Part) -> dict[str, tuple[int, ...]]:
    outputs, inputs = part.shape
    scheme, per_word = stored.scheme, 32 // stored.scheme.bits
    groups = scheme.num_groups(inputs)
    words = -(-outputs // per_word)
    if stored.method == "compressed-tensors":
        shapes: dict[str, tuple[int, ...]] = {
            "weight_packed": (outputs, -(-inputs // per_word)), "weight_scale": (outputs, groups), "weight_shape": (2,)
        }  # fmt: skip
        if scheme.ordered:
            shapes["weight_g_idx"] = (inputs,)
        return shapes if scheme.symmetric else shapes | {"weight_zero_point": (words, groups)}
    zeros = {"qzeros": (groups, words), "scales": (groups, outputs)}
    if stored.method == "awq":
        return {"qweight": (inputs, words), **zeros}
    return {"qweight": (-(-inputs // per_word), outputs), "g_idx": (inputs,), **zeros}


def _order(stored: StoredQuantization, part: Part, groups: Tensor) -> Tensor | None:
    """The inputs (int64) by their groups; None where the scheme has no order. Raises ModelError where groups have other
    sizes than the scheme says, and for an order that nothing announced."""
    inputs = part.shape[1]
    in_turn = torch.arange(inputs) // (stored.scheme.group_size or inputs)
    order = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[order], in_turn):
        raise ModelError(f"{module_of(part)}.g_idx", "...", f"groups must be of {stored.scheme.group_size} inputs each")
    if stored.scheme.ordered:
        return order
    if not torch.equal(groups.long(), in_turn):
        raise ModelError(f"{module_of(part)}.g_idx", "...", "inputs are in the order of activations without desc_act")
    return None
