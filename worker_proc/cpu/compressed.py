"""Weights in bfloat16 that take 12 bits without loss, see `native/linear_compressed.h`."""

import ctypes

import torch
from torch import Tensor

from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.linear import PANEL, Format, PackedMatrix, Pairing
from worker_proc.cpu.memory import HugePages

_CODES = 16
_SAMPLE = 2**18  # weights whose high bytes are counted: four times as many take 0.3 s longer for 600 million weights
_RARE = 64  # one of so many weights at most may have a high byte without a code: it takes four bytes and some time
_BLOCK = 32 * PANEL  # weights


class CompressedMatrix(PackedMatrix):
    """A `PackedMatrix` whose high bytes are codes; results are the same to the last bit. To be sealed when it is full.

    The first rows decide which high bytes get a code. Where too many weights have others, the matrix is plain.
    """

    def __init__(
        self, native: NativeLibrary, memory: HugePages, outputs: int, inputs: int, *, paired: bool = False
    ) -> None:
        """Takes what `room` says of `memory`. `native` must know such weights (`compresses`)."""
        self._weights = PackedMatrix.packed_size(outputs, inputs, paired=paired)
        data = memory.take(_compressed_bytes(self._weights), torch.uint8)
        super().__init__(native, data, outputs, inputs, paired=paired)
        self._high_bytes: Tensor | None = None
        self._entries: list[Tensor] = []  # of `rhizome_compress`
        self._exceptions: tuple[Tensor, Tensor] | None = None  # where those of a block begin, and all of them

    @staticmethod
    def room(outputs: int, inputs: int, *, paired: bool = False) -> int:
        """Bytes that a matrix takes of a block."""
        return HugePages.room(_compressed_bytes(PackedMatrix.packed_size(outputs, inputs, paired=paired)))

    @property
    def compressed(self) -> bool:
        """Whether it is, which is known when there are rows."""
        return bool(self.struct.format == Format.COMPRESSED)

    def _pack(self, source: Tensor, first: int, pairing: Pairing) -> None:
        if self._high_bytes is None and len(source):
            self._high_bytes, other = frequent_high_bytes(source)
            if other * _RARE <= 1:
                self.struct.format, self.struct.high_bytes = Format.COMPRESSED, self._high_bytes.data_ptr()
            else:
                self._use(self._plain_memory())
        if not self.compressed:
            super()._pack(source, first, pairing)
            return
        room = torch.empty(source.numel() // _RARE, dtype=torch.int64)
        found = self._compress(source, first, pairing, room)
        if found > len(room):
            room = torch.empty(found, dtype=torch.int64)
            self._compress(source, first, pairing, room)
        self._entries.append(room[:found].clone())

    def _compress(self, source: Tensor, first: int, pairing: Pairing, entries: Tensor) -> int:
        """How many weights have no code; as many as `entries` has room for are listed there."""
        found = self.native.functions.rhizome_compress(
            ctypes.addressof(self.struct), source.data_ptr(), source.stride(0), len(source), first, pairing,
            entries.data_ptr(), len(entries),
        )  # fmt: skip
        return int(found)

    def seal(self) -> None:
        """All rows are in place."""
        if not self.compressed:
            return
        entries = torch.cat(self._entries).sort().values
        self._entries.clear()
        blocks = torch.bincount(entries >> 32, minlength=self._weights // _BLOCK)
        starts = torch.nn.functional.pad(blocks.cumsum(0), (1, 0)).int()
        self._exceptions = starts, entries.view(torch.int32)[::2].contiguous()  # the lower halves
        self.struct.exception_starts, self.struct.exceptions = (part.data_ptr() for part in self._exceptions)
        if len(entries) * _RARE > self._weights:  # later rows are not like the first ones
            plain = self._plain_memory()
            self.native.functions.rhizome_inflate(ctypes.addressof(self.struct), plain.data_ptr())
            self._use(plain)

    def _plain_memory(self) -> Tensor:
        return HugePages(HugePages.room(2 * self._weights)).take(self._weights, torch.bfloat16)

    def _use(self, plain: Tensor) -> None:
        self.memory, self._exceptions = plain, None
        self.struct.data, self.struct.format = plain.data_ptr(), Format.BFLOAT16


def frequent_high_bytes(rows: Tensor) -> tuple[Tensor, float]:
    """Zero and the fifteen most frequent other high bytes in a sample of bfloat16 `rows` `[R, inputs]`, uint8 `[16]`,
    and which share of the sample has none of them. Zero is the first, as memory without rows holds zeros."""
    step = max(1, rows.numel() // _SAMPLE)
    bits = rows[::step].contiguous().view(torch.int16).int()
    counts = torch.bincount((bits >> 8 & 255).flatten(), minlength=256)
    frequent = counts[1:].topk(_CODES - 1)
    codes = torch.cat((torch.zeros(1, dtype=torch.int64), frequent.indices + 1)).to(torch.uint8)
    return codes, 1.0 - float((counts[0] + frequent.values.sum()) / counts.sum())


def _compressed_bytes(weights: int) -> int:
    return weights * 3 // 2
