"""Copies the slices that one rank needs out of a checkpoint, straight into its final (often fused) tensors.

Reads are planned first and executed afterwards in file order: every name and shape is checked before a byte is read,
progress is exact, and no rank holds more than its own tensors and one slice.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker_proc.errors import ModelError
from worker_proc.weights import Checkpoint, TensorEntry

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a stored matrix or vector: rows (and columns) `start..stop` of the tensor in its logical layout,
    `[out, in]` for a projection. `transposed` says that the file stores `[in, out]` (GPT-2's Conv1D)."""

    name: str
    shape: tuple[int, ...]  # logical shape of the whole tensor, over all ranks
    rows: tuple[int, int] | None = None
    cols: tuple[int, int] | None = None
    transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transposed else self.shape

    def local_shape(self) -> tuple[int, ...]:
        start, stop = self.rows or (0, self.shape[0])
        if len(self.shape) == 1:
            return (stop - start,)
        left, right = self.cols or (0, self.shape[1])
        return (stop - start, right - left)


@dataclass(frozen=True, slots=True)
class _Read:
    entry: TensorEntry
    part: Part
    target: Tensor


class WeightLoader:
    """Plans reads with `tensor`, then does them all in `run`."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self._reads: list[_Read] = []

    def tensor(self, *parts: Part, rows: int | None = None) -> Tensor:
        """A tensor that will hold `parts` stacked along the first dimension, zero-padded to `rows` if given.

        Raises ModelError if a tensor is missing or has another shape than expected.
        """
        shapes = [part.local_shape() for part in parts]
        filled = sum(shape[0] for shape in shapes)
        full = (filled if rows is None else rows, *shapes[0][1:])
        target = torch.empty(full, dtype=self.dtype, device=self.device)
        target[filled:].zero_()
        start = 0
        for part, shape in zip(parts, shapes, strict=True):
            entry = self.checkpoint.entry(part.name)
            if entry.shape != part.stored_shape:
                expected = list(part.stored_shape)
                raise ModelError(part.name, list(entry.shape), f"shape in {entry.file.name} should be {expected}")
            if shape[0]:
                self._reads.append(_Read(entry, part, target[start : start + shape[0]]))
            start += shape[0]
        return target

    def used(self) -> set[str]:
        """Names of the tensors that are planned to be read."""
        return {read.entry.name for read in self._reads}

    def run(self, progress: Progress | None = None) -> None:
        """Execute the plan. `progress(done, total)` is called with bytes of this rank's slices."""
        reads = sorted(self._reads, key=lambda read: (read.entry.file, read.entry.begin))
        total = sum(_bytes(read) for read in reads)
        done = 0
        if progress is not None:
            progress(done, total)
        with ExitStack() as stack:
            files: dict[str, Any] = {}
            for read in reads:
                path = str(read.entry.file)
                with _naming(read.entry):
                    if path not in files:
                        files[path] = stack.enter_context(safe_open(path, framework="pt"))
                    read.target.copy_(_slice(files[path], read.part))
                done += _bytes(read)
                if progress is not None:
                    progress(done, total)
        self._reads.clear()


def _bytes(read: _Read) -> int:
    stored = 1
    for length in read.entry.shape:
        stored *= length
    return read.entry.nbytes // max(stored, 1) * read.target.numel()


def _slice(file: Any, part: Part) -> Tensor:
    stored = file.get_slice(part.name)
    rows = slice(*(part.rows or (0, part.shape[0])))
    if len(part.shape) == 1:
        return stored[rows]  # type: ignore[no-any-return]
    cols = slice(*(part.cols or (0, part.shape[1])))
    if part.transposed:
        return stored[cols, rows].t()  # type: ignore[no-any-return]
    return stored[rows, cols]  # type: ignore[no-any-return]


@contextmanager
def _naming(entry: TensorEntry) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(entry.name, str(entry.file), f"cannot be read ({error})") from None
