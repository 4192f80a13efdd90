"""Blocks of quantized weights, as GGUF files hold them, become numbers or codes.

The layouts are ggml's (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). Most are read by way of the
numbers that they stand for. Codes of 4 bits stay, and those of Q8_0. The kinds that most files have are read here, the
others by the package gguf, which knows all of them and takes several times as long.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from worker_proc.gguf.kinds import CODED, EXACT_IN_4_BITS
from worker_proc.quantization.rows import FACTOR_GROUPS, QuantizedRows, ScaleFactors, powers_of_two, steps_of
from worker_proc.quantization.scheme import MXFP4, ScaleForm, Scheme

GROUP = 32  # inputs with a scale of their own in all kinds whose codes stay
_FORMS = {"Q4_0": ScaleForm.FLOAT16, "Q4_K": ScaleForm.FACTORS}
_READ_HERE = ("Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0")
_LARGE_GROUPS = (128, 64)  # where codes are new ones anyway: fewer scales to read and to multiply with


def scheme_of(kinds: list[str], cuts: Collection[int] = ()) -> Scheme | None:
    """How a matrix that is stored in `kinds`, and whose columns are shared out at `cuts`, is held; None: plain. With 8
    bits, unless all have their codes in 4; in groups of 32 where blocks are of 32. Scales stay as they are where all
    are of one kind and ranks cut no block."""
    coded = [CODED[kind] for kind in kinds if kind in CODED]
    if not coded:
        return None
    if all(kind == "MXFP4" for kind in kinds):
        return MXFP4
    if all(kind in EXACT_IN_4_BITS for kind in kinds):
        whole = len(set(kinds)) == 1 and not any(cut % coded[0].numbers for cut in cuts)
        form = _FORMS.get(kinds[0], ScaleForm.FLOAT32) if whole else ScaleForm.FLOAT32
        return Scheme(4, GROUP, symmetric=all(kind == "Q4_0" for kind in kinds), scale_form=form)
    if all(kind == "Q8_0" for kind in kinds):
        return Scheme(8, GROUP, scale_form=ScaleForm.FLOAT16)
    large = _LARGE_GROUPS if all(kind.numbers > max(_LARGE_GROUPS) for kind in coded) else ()
    return Scheme(8, next((size for size in large if not any(cut % size for cut in cuts)), GROUP))


def dequantize(kind: str, raw: Tensor) -> Tensor:
    """float32 `[R, K]` of rows of blocks, uint8 `[R, bytes]`."""
    if kind in _READ_HERE:
        codes, scales, least, _ = _parts_of(kind, raw)
        groups = scales.shape[1]
        numbers = codes.float().view(len(raw), groups, codes.shape[1] // groups)
        return numbers.mul_(scales[..., None]).add_(least[..., None]).view(codes.shape)
    import gguf  # with numpy takes a tenth of a second, for such models only

    return torch.from_numpy(gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]))


def keeps_codes(kind: str, scheme: Scheme) -> bool:
    """Whether `codes_of` finds the codes of blocks of this kind in a matrix that is held so."""
    return scheme.bits == 4 or (kind == "Q8_0" and scheme.group_size == GROUP)


def codes_of(kind: str, raw: Tensor, scheme: Scheme) -> QuantizedRows:
    """Codes `[R, K]` of rows of blocks, uint8 `[R, bytes]`, in groups of 32: the same numbers."""
    if kind == "MXFP4":
        blocks = _blocks(kind, raw)
        codes = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), 2)
        return QuantizedRows(scheme, codes.view(len(raw), -1), powers_of_two(blocks[..., 0]))
    codes, scales, least, factors = _parts_of(kind, raw)
    if scheme.symmetric:
        return QuantizedRows(scheme, codes, scales)
    flat = scales == 0
    if bool(flat.any()):
        codes = torch.where(flat.repeat_interleave(GROUP, 1), 0, codes)
    factors = factors if scheme.scale_form == ScaleForm.FACTORS else None
    return QuantizedRows(scheme, codes, *steps_of(scales, least), factors=factors)


def _parts_of(kind: str, raw: Tensor) -> tuple[Tensor, Tensor, Tensor, ScaleFactors | None]:
    """Codes uint8 `[R, K]`, float32 `[R, G]` scales and numbers of code 0, and what both are made of if they are."""
    blocks, factors = _blocks(kind, raw), None
    if kind == "Q4_K":
        codes, factors = _codes_of_k(blocks)
        scales, least = factors.products()
    elif kind == "Q6_K":
        codes, scales = _codes_of_six(blocks)
        least = -32 * scales
    elif kind == "Q8_0":
        codes, scales = blocks[..., 2:] ^ 128, _halfs(blocks[..., 0:2])
        least = -128 * scales
    else:
        codes, scales, least = _codes_of_32(kind, blocks)
    return codes.reshape(len(raw), blocks.shape[1] * CODED[kind].numbers), scales, least, factors


def _blocks(kind: str, raw: Tensor) -> Tensor:
    """uint8 `[R, blocks, bytes]`."""
    nbytes = CODED[kind].nbytes
    return raw.view(len(raw), raw.shape[1] // nbytes, nbytes)


def _codes_of_32(kind: str, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q4_0: a scale, and codes around 8; Q4_1: a scale and the number of code 0. Of a byte, the lower half is one of
    the first 16 inputs, the higher one of the last 16."""
    first = CODED[kind].nbytes - 16
    halves = blocks[..., first:]
    codes = torch.cat((halves & 15, halves >> 4), 2)
    scales = _halfs(blocks[..., 0:2])
    least = _halfs(blocks[..., 2:4]) if kind == "Q4_1" else -8 * scales
    return codes, scales, least


def _codes_of_k(blocks: Tensor) -> tuple[Tensor, ScaleFactors]:
    """Q4_K: eight groups of 32, whose scales and numbers of code 0 are six bits each, times one of two numbers."""
    count, per_row, _ = blocks.shape
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 2)
    mins = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 2)
    halves = blocks[..., 16:].reshape(count, per_row, FACTOR_GROUPS // 2, 1, GROUP)
    codes = torch.cat((halves & 15, halves >> 4), 3)
    large = blocks[..., 0:4].contiguous().view(torch.float16)
    return codes, ScaleFactors(large, torch.stack((scales, mins), 3).flatten(1, 2))


def _codes_of_six(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Q6_K: twice 128 numbers, with lower halves of codes in 64 bytes and the upper two bits of four codes in each of
    32; 16 scales of a byte, times one number."""
    count, per_row, _ = blocks.shape
    lower = blocks[..., :128].view(count, per_row, 2, 64)
    upper = blocks[..., 128:192].view(count, per_row, 2, 32)
    twos = torch.cat([(upper >> shift & 3) << 4 for shift in (0, 2, 4, 6)], 3)
    small = blocks[..., 192:208].contiguous().view(torch.int8)
    scales = _halfs(blocks[..., 208:210])[..., None] * small
    return torch.cat((lower & 15, lower >> 4), 3) | twos, scales.flatten(1)


def _halfs(raw: Tensor) -> Tensor:
    """float32 `[R, blocks]` of float16 in two bytes each."""
    return raw.contiguous().view(torch.float16)[..., 0].float()
