"""Quantized weights packed for the native kernels, see `native/linear_quantized.h`."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.linear import PANEL, Format, PackedMatrix, Pairing
from worker_proc.cpu.memory import HugePages
from worker_proc.errors import ModelError
from worker_proc.quantization.rows import FACTOR_GROUPS, QuantizedRows, empty_order, keep_order
from worker_proc.quantization.scheme import GROUP_MULTIPLE, ScaleForm, Scheme

_BLOCK = 32  # inputs
_TILE = 64  # of inputs, where a tile takes two blocks
_MOST_INPUTS = 2**16  # whose products have sums of 32 bits (native/plane_rows.h)
_SEGMENT = 256  # inputs of a row that are rounded together, at most
_EXACT_GROUP = 64  # kExactGroup of native/linear.h
_FACTOR_BYTES = (2 + FACTOR_GROUPS) * 2 * PANEL  # of 256 inputs and a panel (native/scale_forms.h)
_FP8_SCALE = 2.0**8  # by which the kernels' scales of FP8 are larger, as their numbers are smaller


@dataclass(frozen=True, slots=True)
class CodeSizes:
    """What a matrix takes: bytes of codes, numbers for scales and for zeros, and bytes of a scale. Factors of scales
    are counted in bytes, and those of zeros with them."""

    codes: int
    scales: int
    zeros: int
    of_scale: int

    @classmethod
    def of(cls, outputs: int, inputs: int, scheme: Scheme, *, paired: bool = False) -> "CodeSizes":
        padded = -(-inputs // _BLOCK) * _BLOCK
        rows = PackedMatrix.packed_size(outputs, inputs, paired=paired) // padded
        held = -(-inputs // _TILE) * _TILE if scheme.by_channel else padded
        codes = rows * held * scheme.bits // 8
        if scheme.scale_form == ScaleForm.FACTORS:
            return cls(codes, rows // PANEL * _num_factors(scheme, inputs) * _FACTOR_BYTES, 0, 1)
        scales = rows * scheme.num_groups(padded)
        return cls(codes, scales, 0 if scheme.symmetric else scales, _scale_dtype(scheme).itemsize)

    def room(self) -> int:
        """What `take` needs of a block."""
        return HugePages.room(self.codes) + HugePages.room(self.of_scale * self.scales) + HugePages.room(4 * self.zeros)


class QuantizedMatrix(PackedMatrix):
    """A `PackedMatrix` in codes, which is filled with `pack_rows` instead of `pack`."""

    def __init__(
        self,
        native: NativeLibrary,
        memory: HugePages,
        outputs: int,
        inputs: int,
        scheme: Scheme,
        *,
        paired: bool = False,
    ) -> None:
        """Takes what `CodeSizes.room` says of `memory`."""
        group = scheme.group_size
        if group is not None and group % GROUP_MULTIPLE:
            raise ModelError("quantization group size", group, f"must be a multiple of {GROUP_MULTIPLE}")
        if scheme.scale_form and not keeps_scales(native, scheme):
            raise ValueError("these kernels take scales in float32")
        if scheme.by_channel and inputs > _MOST_INPUTS:
            raise ModelError("inputs of a matrix", inputs, f"with one scale per output, up to {_MOST_INPUTS} are known")
        sizes = CodeSizes.of(outputs, inputs, scheme, paired=paired)
        super().__init__(native, memory.take(sizes.codes, torch.uint8), outputs, inputs, paired=paired)
        self.scheme = scheme
        padded = -(-inputs // _BLOCK) * _BLOCK
        shape = (-1, scheme.num_groups(padded), PANEL)
        scales = memory.take(sizes.scales, _scale_dtype(scheme))
        factors = scheme.scale_form == ScaleForm.FACTORS
        self.scales = scales.view((-1, _num_factors(scheme, inputs), _FACTOR_BYTES) if factors else shape)
        self.zeros = memory.take(sizes.zeros, torch.float32).view(shape) if sizes.zeros else None
        self.struct.format = _format(native, scheme)
        self.struct.group = group or padded
        self.struct.scales = self.scales.data_ptr()
        self.struct.scale_form = scheme.scale_form
        zeros = self.zeros if self.zeros is not None else self.scales if factors else None
        self.struct.zeros = zeros.data_ptr() if zeros is not None else None
        self._order = empty_order(scheme, inputs)

    @property
    def nbytes(self) -> int:
        """What a product reads."""
        return self.memory.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def pack_rows(self, rows: QuantizedRows, first: int, pairing: Pairing = Pairing.NONE) -> None:
        """Put `rows` in place, the first one as output `first` (of its kind). Raises as `keep_order` does."""
        keep_order(self._order, rows)
        if self._order is not None:
            self._places = self._order.int()  # as the kernels read it
            self.struct.order = self._places.data_ptr()
        codes = rows.codes if rows.codes.stride(1) == 1 else rows.codes.contiguous()
        self.native.functions.rhizome_pack_codes(
            ctypes.addressof(self.struct), codes.data_ptr(), codes.stride(0), len(codes), rows.halved, first, pairing
        )
        at = torch.arange(first, first + len(codes))
        half = PANEL // 2
        panel, place = (at // PANEL, at % PANEL) if pairing is Pairing.NONE else (at // half, at % half)
        if pairing is Pairing.UP:
            place = place + half
        if self.scheme.scale_form == ScaleForm.FACTORS:
            self._put_factors(rows, panel, place)
            return
        self._put(self.scales, self._as_held(rows.scales), panel, place)
        if self.zeros is not None and rows.zeros is not None:
            self._check_zeros(rows.zeros)
            self._put(self.zeros, rows.zeros, panel, place)

    def _as_held(self, scales: Tensor) -> Tensor:
        """Scales as the kernels take them: of FP4 exponents, where 2^-126 and less is nothing. Raises ValueError for
        others than powers of two there, and than those of float16 where they are held as such."""
        if self.scheme.scale_form == ScaleForm.FLOAT16:
            halves = scales.half()
            if bool((~scales.isnan() & (halves.float() != scales)).any()):
                raise ValueError("scales are not of float16")
            return halves
        if not self.scheme.floating:
            return scales
        if self.scheme.bits == 8:
            return scales * _FP8_SCALE
        bits = torch.where(scales.abs() > 2.0**-126, scales * 0.5, 0).view(torch.int32)
        if bool((bits & ~0x7F800000).any()):
            raise ValueError("scales of FP4 are powers of two, and held as their exponents")
        return (bits >> 23).to(torch.uint8)

    def _put_factors(self, rows: QuantizedRows, panel: Tensor, place: Tensor) -> None:
        if rows.factors is None:
            raise ValueError("scales come without their factors")
        large, small = rows.factors.large, rows.factors.small
        counts = self.scales.shape[:2]
        of_panel = self.scales[..., : 4 * PANEL].view(torch.float16).view(*counts, 2, PANEL)
        of_group = self.scales[..., 4 * PANEL :].view(*counts, FACTOR_GROUPS, 2, PANEL)
        of_panel[panel, :, :, place] = large
        small = torch.nn.functional.pad(small, (0, 0, 0, -small.shape[1] % FACTOR_GROUPS))
        of_group[panel, :, :, :, place] = small.view(*large.shape[:2], FACTOR_GROUPS, 2)

    def _check_zeros(self, zeros: Tensor) -> None:
        """Raises ValueError for others than whole numbers, where sums are not exact with them."""
        small = self.scheme.bits == 4 and self.scheme.group_size is not None and self.scheme.group_size <= _EXACT_GROUP
        if not small and not torch.equal(zeros, zeros.round()):
            raise ValueError(f"zeros are whole numbers, except for 4 bits in groups up to {_EXACT_GROUP}")

    @staticmethod
    def _put(to: Tensor, values: Tensor, panel: Tensor, place: Tensor) -> None:
        to[panel, : values.shape[1], place] = values


def _scale_dtype(scheme: Scheme) -> torch.dtype:
    if scheme.scale_form == ScaleForm.FACTORS or (scheme.floating and scheme.bits == 4):
        return torch.uint8
    return torch.float16 if scheme.scale_form == ScaleForm.FLOAT16 else torch.float32


def _num_factors(scheme: Scheme, inputs: int) -> int:
    """Of a row, that groups have in common."""
    return -(-scheme.num_groups(inputs) // FACTOR_GROUPS)


def _format(native: NativeLibrary, scheme: Scheme) -> Format:
    if scheme.floating and scheme.bits == 8:
        return Format.FLOAT8_CHANNEL if scheme.by_channel else Format.FLOAT8
    if scheme.by_channel:
        return Format.INT8_BOTH if scheme.dynamic else Format.INT8_CHANNEL
    plain, rounded = (Format.INT4, Format.INT4_SEGMENTS) if scheme.bits == 4 else (Format.INT8, Format.INT8_SEGMENTS)
    if scheme.floating:
        plain, rounded = Format.FLOAT4, Format.FLOAT4_SEGMENTS
    return rounded if scheme.dynamic and native.knows(rounded) and _whole_segments(scheme.group_size) else plain


def keeps_scales(native: NativeLibrary, scheme: Scheme) -> bool:
    """Whether scales may be held in the form of the scheme: where they multiply sums, which leaves time for it."""
    format = _format(native, scheme)
    in_segments = format in (Format.INT4_SEGMENTS, Format.INT8_SEGMENTS)
    known = format == Format.INT4 or (format == Format.INT8 and scheme.scale_form != ScaleForm.FACTORS)
    return in_segments or (known and native.scales_sums(format))


def _whole_segments(group_size: int | None) -> bool:
    """Whether the segments in which rows are rounded (native/segment_rows.h) do not cross the groups of weights."""
    return group_size is None or group_size % _SEGMENT == 0 or _SEGMENT % group_size == 0


@dataclass(frozen=True, slots=True)
class NativeQuantizer:
    """`rows.quantize_rows`, with the same results."""

    native: NativeLibrary

    def __call__(self, rows: Tensor, scheme: Scheme) -> QuantizedRows:
        wide = rows.dtype != torch.bfloat16
        source = rows.float() if wide else rows
        source = source if source.stride(1) == 1 else source.contiguous()
        count, inputs = source.shape
        codes = torch.empty(count, inputs, dtype=torch.uint8)
        scales = torch.empty(count, scheme.num_groups(inputs))
        self.native.functions.rhizome_quantize(
            source.data_ptr(), wide, source.stride(0), count, inputs, scheme.group_size or inputs, scheme.bits,
            scheme.floating, codes.data_ptr(), scales.data_ptr(),
        )  # fmt: skip
        return QuantizedRows(scheme, codes, scales)


@dataclass(frozen=True, slots=True)
class PackedCodesTarget:
    """A `QuantizedTarget`: rows of a matrix from output `output` on."""

    matrix: QuantizedMatrix
    output: int
    pairing: Pairing

    def copy_quantized(self, first: int, rows: QuantizedRows) -> None:
        self.matrix.pack_rows(rows, self.output + first, self.pairing)
