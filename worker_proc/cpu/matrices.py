"""Makes a matrix in the form in which it is held: in codes, in 12 bits, or plain."""

from dataclasses import dataclass

import torch

from worker_proc.cpu.compressed import CompressedMatrix
from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.linear import PackedMatrix
from worker_proc.cpu.memory import HugePages
from worker_proc.cpu.quantized import CodeSizes, QuantizedMatrix
from worker_proc.quantization.scheme import Scheme


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """Codes by `scheme` where there is one, else 12 bits where `compress` says so."""

    outputs: int  # gates and ups, if `paired`
    inputs: int
    scheme: Scheme | None = None
    compress: bool = False
    paired: bool = False

    def room(self) -> int:
        """Bytes that `make` takes of a block."""
        if self.scheme is not None:
            return CodeSizes.of(self.outputs, self.inputs, self.scheme, paired=self.paired).room()
        if self.compress:
            return CompressedMatrix.room(self.outputs, self.inputs, paired=self.paired)
        return HugePages.room(torch.bfloat16.itemsize * self._size())

    def make(self, native: NativeLibrary, memory: HugePages) -> PackedMatrix:
        """An empty one, to be filled (a `CompressedMatrix` is to be sealed then)."""
        if self.scheme is not None:
            return QuantizedMatrix(native, memory, self.outputs, self.inputs, self.scheme, paired=self.paired)
        if self.compress:
            return CompressedMatrix(native, memory, self.outputs, self.inputs, paired=self.paired)
        plain = memory.take(self._size(), torch.bfloat16)
        return PackedMatrix(native, plain, self.outputs, self.inputs, paired=self.paired)

    def _size(self) -> int:
        return PackedMatrix.packed_size(self.outputs, self.inputs, paired=self.paired)
