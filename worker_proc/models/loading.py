"""Copies the slices that one rank needs out of a checkpoint, straight into their final (often fused or packed) place.

Reads are planned first and executed afterwards in file order: every name and shape is checked before a byte is read,
progress is exact, and no rank holds more than its own tensors and one piece. Files are read, not mapped: pages of a
mapped file count as memory of the process.
"""

import ctypes
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from io import FileIO
from typing import Protocol

import torch
from torch import Tensor

from worker_proc.errors import ModelError
from worker_proc.gguf.blocks import dequantize
from worker_proc.gguf.kinds import CODED, KINDS
from worker_proc.weights import Checkpoint, TensorEntry

Progress = Callable[[int, int], None]

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CODE_DTYPES = {  # of quantized weights
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.uint8
}  # fmt: skip
_PIECE_BYTES = 2**24  # that are read at once


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a stored matrix or vector: rows (and columns) `start..stop` of the tensor in its logical layout,
    `[out, in]` for a projection. `transposed` says that the file stores `[in, out]` (GPT-2's Conv1D). The tensor may be
    a `stack` of several matrices, and may hold the rows of one by turns with those of others."""

    name: str
    shape: tuple[int, ...]  # logical shape of the whole tensor, over all ranks; of one matrix of a stack
    rows: tuple[int, int] | None = None
    cols: tuple[int, int] | None = None
    transposed: bool = False
    stack: tuple[int, int] | None = None  # which matrix, of how many
    turn: tuple[int, int] = (0, 1)  # which rows, of how many by turns

    @property
    def stored_shape(self) -> tuple[int, ...]:
        shape = self.matrix_shape
        return shape if self.stack is None else (self.stack[1], *shape)

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """As stored, of one matrix of a stack, with all rows that lie there by turns."""
        shape = (self.shape[0] * self.turn[1], *self.shape[1:])
        return shape[::-1] if self.transposed else shape

    def stored_slices(self) -> tuple[slice, ...]:
        """What of the stored matrix (or vector) this is."""
        first, step = self.turn
        start, stop = self.rows or (0, self.shape[0])
        slices = [slice(first + start * step, first + (stop - 1) * step + 1, step)]
        if len(self.shape) > 1:
            slices.append(slice(*(self.cols or (0, self.shape[1]))))
        return tuple(slices[::-1] if self.transposed else slices)

    def local_shape(self) -> tuple[int, ...]:
        start, stop = self.rows or (0, self.shape[0])
        if len(self.shape) == 1:
            return (stop - start,)
        left, right = self.cols or (0, self.shape[1])
        return (stop - start, right - left, *self.shape[2:])


class Target(Protocol):
    """Where the rows of a part go: `copy_rows` is called once per piece, in order, with rows from `first` on."""

    def copy_rows(self, first: int, rows: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class _TensorTarget:
    tensor: Tensor

    def copy_rows(self, first: int, rows: Tensor) -> None:
        self.tensor[first : first + len(rows)].copy_(rows)


class Read(Protocol):
    """Something that is planned to be read. `entry` says where it begins, and is named in errors."""

    @property
    def entry(self) -> TensorEntry: ...

    @property
    def nbytes(self) -> int: ...

    def run(self, open_file: "OpenFile") -> Iterator[int]:
        """Read it piece by piece, giving the bytes of each."""
        ...


OpenFile = Callable[[TensorEntry], FileIO]


@dataclass(frozen=True, slots=True)
class _PartRead:
    entry: TensorEntry
    part: Part
    target: Target

    @property
    def nbytes(self) -> int:
        kind = KINDS[self.entry.dtype]
        return math.prod(self.part.local_shape()) * kind.nbytes // kind.numbers

    def run(self, open_file: OpenFile) -> Iterator[int]:
        done, given = 0, 0
        outputs = self.part.local_shape()[0]
        for first, rows in _pieces(open_file(self.entry), self):
            self.target.copy_rows(first, rows)
            done += len(rows)
            now = self.nbytes * done // outputs - given  # numbers of codes take more bytes than was read
            given += now
            yield now


class WeightLoader:
    """Plans reads with `tensor`, then does them all in `run`."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self._reads: list[Read] = []
        self._used: set[str] = set()

    def tensor(self, *parts: Part, rows: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor that will hold `parts` stacked along the first dimension, zero-padded to `rows` if given; in
        `dtype`, or that of the model.

        Raises ModelError if a tensor is missing or has another shape than expected.
        """
        shapes = [part.local_shape() for part in parts]
        filled = sum(shape[0] for shape in shapes)
        full = (filled if rows is None else rows, *shapes[0][1:])
        target = torch.empty(full, dtype=dtype or self.dtype, device=self.device)
        target[filled:].zero_()
        start = 0
        for part, shape in zip(parts, shapes, strict=True):
            self.into(part, _TensorTarget(target[start : start + shape[0]]))
            start += shape[0]
        return target

    def into(self, part: Part, target: Target) -> None:
        """Plan to copy `part` to `target`. Raises ModelError as `tensor` does."""
        entry = self.find(part)
        self.add(_PartRead(entry.of_stack(part.stack), part, target), [entry.name])

    def stays(self, part: Part) -> TensorEntry:
        """A whole stored tensor that is not read now. Raises ModelError as `tensor` does."""
        self._used.add(part.name)
        return self.find(part)

    def find(self, part: Part) -> TensorEntry:
        """The stored tensor. Raises ModelError as `tensor` does."""
        entry = self.checkpoint.entry(part.name)
        if entry.shape != part.stored_shape:
            expected = list(part.stored_shape)
            raise ModelError(part.name, list(entry.shape), f"shape in {entry.file.name} should be {expected}")
        return entry

    def add(self, read: Read, names: Iterable[str]) -> None:
        """Plan any kind of read, which uses the tensors `names`. A rank may have nothing of them."""
        if read.nbytes:
            self._reads.append(read)
        self._used.update(names)

    def used(self) -> set[str]:
        """Names of the tensors that are planned to be read."""
        return self._used

    def run(self, progress: Progress | None = None) -> None:
        """Execute the plan. `progress(done, total)` is called with bytes of this rank's slices."""
        reads = sorted(self._reads, key=lambda read: (read.entry.file, read.entry.begin))
        total = sum(read.nbytes for read in reads)
        done = 0
        if progress is not None:
            progress(done, total)
        with ExitStack() as stack:
            files: dict[str, FileIO] = {}

            def open_file(entry: TensorEntry) -> FileIO:
                path = str(entry.file)
                if path not in files:
                    files[path] = stack.enter_context(FileIO(path))
                    _read_ahead(files[path])
                return files[path]

            for read in reads:
                with _naming(read.entry):
                    for count in read.run(open_file):
                        done += count
                        if progress is not None:
                            progress(done, total)
        self._reads.clear()


def read_tensor(file: FileIO, entry: TensorEntry) -> Tensor:
    """A whole stored tensor, codes in integers included. Raises ModelError for another type."""
    dtype = (DTYPES | _CODE_DTYPES).get(entry.dtype)
    if dtype is None or math.prod(entry.shape) * dtype.itemsize != entry.nbytes:
        raise ModelError(entry.name, entry.dtype, f"unexpected type or size of a tensor in {entry.file.name}")
    tensor = torch.empty(entry.shape, dtype=dtype)
    fill(tensor, file, entry.begin)
    return tensor


def same_data(first: TensorEntry, second: TensorEntry) -> bool:
    """Whether two stored tensors are equal, byte for byte. Raises ModelError when one cannot be read."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with _naming(first), FileIO(str(first.file)) as a, FileIO(str(second.file)) as b:
        for at in range(0, first.nbytes, _PIECE_BYTES):
            count = min(_PIECE_BYTES, first.nbytes - at)
            a.seek(first.begin + at)
            b.seek(second.begin + at)
            if a.read(count) != b.read(count):
                return False
    return True


def is_zero(entry: TensorEntry) -> bool:
    """Whether a stored tensor is all zeros. Raises ModelError when it cannot be read."""
    with _naming(entry), FileIO(str(entry.file)) as file:
        return not bool(read_tensor(file, entry).any())


def _read_ahead(file: FileIO) -> None:
    """Let the system read on while pieces are copied."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _pieces(file: FileIO, read: _PartRead) -> Iterator[tuple[int, Tensor]]:
    """The rows of a part in pieces that are worth one read each, with the number of the first of them."""
    part = read.part
    if part.transposed:  # a row is a column of the file: all of it at once
        yield 0, _slice(file, read.entry, part).t()
        return
    begin, end = part.rows or (0, part.shape[0])
    numbers = 4 if read.entry.dtype in CODED else KINDS[read.entry.dtype].nbytes  # become float32
    row_bytes = max(1, math.prod(part.shape[1:])) * part.turn[1] * numbers
    at_once = max(1, _PIECE_BYTES // row_bytes)
    if read.entry.heads:  # whole heads, and so whatever a rank has
        at_once = end - begin
    for first in range(begin, end, at_once):
        rows = (first, min(end, first + at_once))
        yield first - begin, _slice(file, read.entry, replace(part, rows=rows))


def _slice(file: FileIO, entry: TensorEntry, part: Part) -> Tensor:
    """A part in the order of the file. Whole rows are read, then what is wanted of them is cut out."""
    rows, *columns = part.stored_slices()
    if entry.dtype in CODED:
        numbers = dequantize(entry.dtype, read_blocks(file, entry, (rows.start, rows.stop)))
        if not all(math.isfinite(edge) for edge in numbers.aminmax()):
            raise ModelError(entry.name, "infinity or NaN", "a scale is not a finite number")
        return in_order(entry, numbers)[(slice(None, None, rows.step), *columns)] + entry.shift
    read = torch.empty((rows.stop - rows.start, *part.matrix_shape[1:]), dtype=DTYPES[entry.dtype])
    row_bytes = read.nbytes // max(1, len(read))
    fill(read, file, entry.begin + rows.start * row_bytes)
    if entry.shift:
        read = read.float() + entry.shift
    if entry.logarithm:
        read = read.float().neg_().log_()
        if bool(read.isnan().any()):
            raise ModelError(entry.name, "a number above 0", f"in {entry.file.name} these are negative")
    return in_order(entry, read)[(slice(None, None, rows.step), *columns)]


def read_blocks(file: FileIO, entry: TensorEntry, rows: tuple[int, int]) -> Tensor:
    """Rows of a matrix in blocks (GGUF), uint8 `[rows, bytes]`."""
    kind = CODED[entry.dtype]
    width = entry.shape[-1] // kind.numbers * kind.nbytes
    raw = torch.empty((rows[1] - rows[0], width), dtype=torch.uint8)
    fill(raw, file, entry.begin + rows[0] * width)
    return raw


def in_order(entry: TensorEntry, rows: Tensor) -> Tensor:
    """Rows of whole heads, half after half, where they are stored by turns (see `TensorEntry.heads`)."""
    if not entry.heads:
        return rows
    size = entry.shape[0] // entry.heads
    return rows.view(-1, size // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def fill(tensor: Tensor, file: FileIO, begin: int) -> None:
    """Read all bytes of a contiguous tensor. Raises OSError where the file ends before."""
    buffer = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    file.seek(begin)
    while len(buffer):
        count = file.readinto(buffer)
        if not count:
            raise OSError("the file ends too early")
        buffer = buffer[count:]


@contextmanager
def _naming(entry: TensorEntry) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(entry.name, str(entry.file), f"cannot be read ({error})") from None
