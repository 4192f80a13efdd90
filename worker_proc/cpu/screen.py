"""The output head once more in int8, so that greedy tokens, and the likely ones that filters keep, are found with less
work, see `native/screen.h`."""

import ctypes

import torch
from torch import Tensor

from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.linear import PANEL, Format, MatrixStruct
from worker_proc.cpu.memory import HugePages
from worker_proc.cpu.quantized import CodeSizes, NativeQuantizer, QuantizedMatrix
from worker_proc.quantization.scheme import Scheme

_FROM = 2**24  # weights of a head: fewer may stay in a cache, where there is little to gain
_IN_SEGMENTS = Scheme(8, 128, dynamic=True)  # rows in int8, too
_BY_CHANNEL = Scheme(8)


class _ScreenStruct(ctypes.Structure):
    """`HeadScreen` of native/screen.h."""

    _fields_ = (("codes", MatrixStruct), *((name, ctypes.c_void_p) for name in ("norms", "errors", "rest")))


def screen_scheme(native: NativeLibrary, outputs: int, inputs: int, *, least: int = _FROM) -> Scheme | None:
    """How a head of at least `least` weights is screened; None if it is smaller, or if products in int8 are not faster
    here than those of bfloat16."""
    if outputs * inputs < least:
        return None
    if native.knows(Format.INT8_SEGMENTS):
        return _IN_SEGMENTS
    return _BY_CHANNEL if native.exact(Format.INT8_CHANNEL) or native.integers else None


class HeadScreen:
    """Filled with `pack`, beside the head itself, and sealed when it is full."""

    def __init__(self, native: NativeLibrary, memory: HugePages, outputs: int, inputs: int, scheme: Scheme) -> None:
        """Takes what `room` says of `memory`. `scheme` is one that `screen_scheme` gives."""
        self._native = native
        self._scheme = scheme
        self._quantizer = NativeQuantizer(native)
        self._codes = QuantizedMatrix(native, memory, outputs, inputs, scheme)
        self._norms, self._errors = (torch.zeros(-(-outputs // PANEL) * PANEL) for _ in range(2))  # of each output
        self._rests = torch.tensor([[0, 1], [0, 1]], dtype=torch.int32)
        self.rest, self.rest_of_filtered = self._rests
        self.struct = _ScreenStruct()

    @staticmethod
    def room(outputs: int, inputs: int, scheme: Scheme) -> int:
        """Bytes that a screen takes of a block."""
        return CodeSizes.of(outputs, inputs, scheme).room()

    @property
    def nbytes(self) -> int:
        """What a look reads."""
        return self._codes.nbytes

    def pack(self, rows: Tensor, first: int) -> None:
        """Put `rows` (`[R, inputs]`) in place, rounded to bfloat16, the first one as output `first`."""
        source = rows.to(torch.bfloat16)
        source = source if source.stride(1) == 1 else source.contiguous()
        made = self._quantizer(source, self._scheme)
        self._codes.pack_rows(made, first)
        count, inputs = source.shape
        norms, errors = (numbers[first : first + count] for numbers in (self._norms, self._errors))
        self._native.functions.rhizome_code_errors(
            source.data_ptr(), source.stride(0), count, inputs, self._scheme.group_size or inputs,
            made.codes.data_ptr(), made.scales.data_ptr(), norms.data_ptr(), errors.data_ptr(),
        )  # fmt: skip

    def seal(self) -> None:
        """All rows are in place."""
        self._norms, self._errors = (
            numbers.view(-1, PANEL).amax(dim=1).contiguous() for numbers in (self._norms, self._errors)
        )
        struct, pointers = self.struct, [part.data_ptr() for part in (self._norms, self._errors, self._rests)]
        struct.codes, (struct.norms, struct.errors, struct.rest) = self._codes.struct, pointers
