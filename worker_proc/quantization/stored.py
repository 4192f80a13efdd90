"""Reads projections that a checkpoint holds as codes. How they lie there is in stored_words.py (compressed-tensors,
GPTQ, AWQ), stored_bytes.py (FP8, int8) and stored_fp4.py (MXFP4).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from worker_proc.models.loading import OpenFile, Part, read_tensor
from worker_proc.quantization import stored_bytes, stored_fp4, stored_words
from worker_proc.quantization.rows import QuantizedRows
from worker_proc.quantization.scheme import MXFP4
from worker_proc.quantization.stored_config import StoredQuantization
from worker_proc.quantization.target import QuantizedTarget
from worker_proc.weights import Checkpoint, TensorEntry


class StoredLayout(Protocol):
    """What each of these modules has."""

    def holds(self, stored: StoredQuantization, checkpoint: Checkpoint, part: Part) -> bool:
        """Whether the checkpoint holds this projection as codes."""
        ...

    def find(self, stored: StoredQuantization, checkpoint: Checkpoint, part: Part) -> dict[str, TensorEntry]:
        """The tensors to read as `unpack` wants them, codes first. Raises ModelError for one that is missing or of
        another shape than expected."""
        ...

    def unpack(self, stored: StoredQuantization, part: Part, tensors: dict[str, Tensor]) -> QuantizedRows:
        """The whole projection. Raises ModelError for numbers that cannot be."""
        ...


@dataclass(slots=True)
class Unpacked:
    """The projection that was unpacked last: of some, many parts are read, one after another."""

    whole: Part | None = None
    rows: QuantizedRows | None = None


@dataclass(frozen=True, slots=True)
class StoredRead:
    """A planned read of a part of a projection, see `loading.Read`. All of its tensors are read at once, then cut."""

    last: Unpacked
    entries: dict[str, TensorEntry]
    stored: StoredQuantization
    part: Part
    target: QuantizedTarget
    unread: tuple[str, ...]  # names of tensors that belong to it, too

    @property
    def entry(self) -> TensorEntry:
        return next(iter(self.entries.values()))

    @property
    def nbytes(self) -> int:
        first, last = self.part.rows or (0, self.part.shape[0])
        return sum(entry.nbytes for entry in self.entries.values()) * (last - first) // self.part.shape[0]

    def run(self, open_file: OpenFile) -> Iterator[int]:
        outputs, inputs = self.part.shape
        rows = self._unpacked(open_file)
        self.target.copy_quantized(0, rows.select(self.part.rows or (0, outputs), self.part.cols or (0, inputs)))
        yield self.nbytes

    def _unpacked(self, open_file: OpenFile) -> QuantizedRows:
        whole, last = replace(self.part, rows=None, cols=None), self.last
        if last.rows is None or last.whole != whole:
            last.whole = last.rows = None
            tensors = {name: read_tensor(open_file(entry), entry) for name, entry in self.entries.items()}
            last.rows = _layout(self.stored).unpack(self.stored, self.part, tensors)
            last.rows.refuse_not_finite(self.part.name)
            last.whole = whole
        return last.rows


def is_stored(stored: StoredQuantization, checkpoint: Checkpoint, part: Part) -> bool:
    """Whether the checkpoint holds this projection as codes."""
    return _layout(stored).holds(stored, checkpoint, part)


def plan_read(
    stored: StoredQuantization, checkpoint: Checkpoint, part: Part, target: QuantizedTarget, last: Unpacked
) -> StoredRead:
    """Raises ModelError if a tensor is missing or has another shape than expected."""
    entries = _layout(stored).find(stored, checkpoint, part)
    unread = stored_bytes.unread_names(checkpoint, part) if stored.as_bytes is not None else ()
    return StoredRead(last, entries, stored, part, target, unread)


def _layout(stored: StoredQuantization) -> StoredLayout:
    if stored.as_bytes is not None:
        return stored_bytes
    return stored_fp4 if stored.scheme == MXFP4 else stored_words
