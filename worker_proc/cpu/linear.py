"""Weights packed for the native kernels, see `native/linear.h`."""

import ctypes
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from worker_proc.cpu.library import NativeLibrary

PANEL = 32  # outputs that are packed together


class Finish(IntEnum):
    """What becomes of the sums, as in `native/linear.h`."""

    STORE = 0
    STORE_FLOAT = 1
    ADD = 2
    SILU_MUL = 3
    GELU_MUL = 4
    CLAMPED_MUL = 5


class Format(IntEnum):
    """How the weights are stored, as in `native/linear.h`."""

    BFLOAT16 = 0
    INT8_CHANNEL = 1
    INT8 = 2
    INT4 = 3
    COMPRESSED = 4
    FLOAT8_CHANNEL = 5
    FLOAT8 = 6
    FLOAT4 = 7
    INT8_BOTH = 8
    INT4_SEGMENTS = 9
    INT8_SEGMENTS = 10
    FLOAT4_SEGMENTS = 11


class Pairing(IntEnum):
    """Which rows of a packed matrix are filled: any, or the gates or ups of a gated MLP, which lie side by side."""

    NONE = 0
    GATE = 1
    UP = 2


class MatrixStruct(ctypes.Structure):
    """`PackedMatrix` of `native/linear.h`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("high_bytes", ctypes.c_void_p),
        ("exception_starts", ctypes.c_void_p),
        ("exceptions", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("scale_form", ctypes.c_int32),
    )


class PackedMatrix:
    """A weight matrix `[outputs, inputs]`, which is filled with `pack` in pieces of rows. `outputs` counts the
    gates and the ups of a paired matrix."""

    def __init__(
        self, native: NativeLibrary, memory: Tensor, outputs: int, inputs: int, *, paired: bool = False
    ) -> None:
        """`memory` is zeroed, of `packed_size` bfloat16 elements, aligned to 64 bytes."""
        self.native = native
        self.memory = memory
        self.outputs = outputs
        self.inputs = inputs
        self.paired = paired
        self.bias: Tensor | None = None
        self.struct = MatrixStruct(data=memory.data_ptr(), inputs=inputs, outputs=outputs)

    @property
    def nbytes(self) -> int:
        """What a product reads."""
        return self.memory.nbytes

    @staticmethod
    def packed_size(outputs: int, inputs: int, *, paired: bool = False) -> int:
        """Elements that the packed form takes: full panels of 32 outputs, 16 of each kind if `paired`."""
        per_panel = PANEL // 2 if paired else PANEL
        panels = -(-(outputs // 2 if paired else outputs) // per_panel)
        return panels * PANEL * (-(-inputs // 32) * 32)

    def pack(self, rows: Tensor, first: int, pairing: Pairing = Pairing.NONE) -> None:
        """Put `rows` (`[R, inputs]`) in place, rounded to bfloat16, the first one as output `first` (of its kind)."""
        source = rows.to(torch.bfloat16)
        self._pack(source if source.stride(1) == 1 else source.contiguous(), first, pairing)

    def _pack(self, source: Tensor, first: int, pairing: Pairing) -> None:
        """`pack` for bfloat16 with the inputs of a row side by side."""
        self.native.functions.rhizome_pack(
            self.memory.data_ptr(), self.inputs, source.data_ptr(), source.stride(0), len(source), first, pairing
        )

    def set_bias(self, bias: Tensor) -> None:
        """`bias` `[outputs]`: for a paired matrix, all gates and then all ups."""
        values = bias.float()
        if self.paired:
            halves = [torch.nn.functional.pad(part, (0, -len(part) % 16)).view(-1, 16) for part in values.chunk(2)]
            values = torch.cat(halves, dim=1).view(-1)
        self.bias = torch.nn.functional.pad(values, (0, -len(values) % PANEL)).contiguous()
        self.struct.bias = self.bias.data_ptr()

    def linear(self, x: Tensor, finish: Finish, out: Tensor) -> Tensor:
        """Run the kernel on bfloat16 `x` `[rows, inputs]`, see `native/linear.h`; for tests and benchmarks."""
        padded = self._whole_blocks(x)
        self.native.functions.rhizome_linear(
            ctypes.addressof(self.struct), padded.data_ptr(), padded.stride(0), len(padded), out.data_ptr(),
            out.stride(0), finish,
        )  # fmt: skip
        return out

    def argmax(self, x: Tensor, screen: ctypes.Structure | None = None) -> tuple[Tensor, Tensor]:
        """The smallest index (int64 `[rows]`) of the largest output of each row, and that output (float32); with the
        `struct` of a `HeadScreen` of this matrix the same, sooner."""
        padded = self._whole_blocks(x)
        index, best = torch.empty(len(x), dtype=torch.int64), torch.empty(len(x))
        self.native.functions.rhizome_find_largest(
            ctypes.addressof(self.struct), None if screen is None else ctypes.addressof(screen), padded.data_ptr(),
            padded.stride(0), len(padded), index.data_ptr(), best.data_ptr(),
        )  # fmt: skip
        return index, best

    def filtered(
        self, x: Tensor, screen: ctypes.Structure | None, params: Tensor, out: Tensor, *, part: bool = False
    ) -> Tensor:
        """What `linear` gives as float32, but minus infinity where no draw by `params` (float64 `[4, rows]`, see
        `ForwardBatch.filters`) keeps it; all of it without a `struct` of a `HeadScreen`. `part`: of more outputs."""
        padded = self._whole_blocks(x)
        self.native.functions.rhizome_filtered_outputs(
            ctypes.addressof(self.struct), None if screen is None else ctypes.addressof(screen), padded.data_ptr(),
            padded.stride(0), len(padded), params.data_ptr(), part, out.data_ptr(), out.stride(0),
        )  # fmt: skip
        return out

    def _whole_blocks(self, x: Tensor) -> Tensor:
        """`x` as the kernels read it: the inputs of a row side by side, and zeros up to a multiple of 32."""
        if self.inputs % 32 == 0 and x.stride(1) == 1:
            return x
        return torch.nn.functional.pad(x, (0, -self.inputs % 32)).contiguous()

    def unpack(self, outputs: Tensor) -> Tensor:
        """Rows `outputs` (int64) of a matrix that is not paired, bfloat16 `[len(outputs), inputs]`."""
        rows = torch.empty(len(outputs), self.inputs, dtype=torch.bfloat16)
        self.native.functions.rhizome_unpack_rows(
            ctypes.addressof(self.struct), outputs.data_ptr(), len(outputs), rows.data_ptr(), self.inputs
        )
        return rows


def side_by_side(matrices: Sequence[PackedMatrix]) -> ctypes.Array[MatrixStruct]:
    """Their structs one after another, as native functions take several. The matrices must be filled, and live on."""
    return (MatrixStruct * len(matrices))(*(matrix.struct for matrix in matrices))
