"""Reads projections that a GGUF file holds in blocks whose codes stay. Those of other kinds are read as numbers (see
`loading`) and become codes of 8 bits like plain ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from worker_proc.gguf.blocks import codes_of, scheme_of
from worker_proc.models.loading import OpenFile, Part, in_order, read_blocks
from worker_proc.quantization.scheme import Scheme
from worker_proc.quantization.target import QuantizedTarget
from worker_proc.weights import Checkpoint, TensorEntry


@dataclass(frozen=True, slots=True)
class BlocksRead:
    """A planned read of one projection, see `loading.Read`. Of its rows (whole heads where those lie by turns), all
    columns are read, then cut."""

    entry: TensorEntry
    part: Part
    scheme: Scheme
    target: QuantizedTarget

    @property
    def rows(self) -> tuple[int, int]:
        return self.part.rows or (0, self.part.shape[0])

    @property
    def nbytes(self) -> int:
        first, last = self.rows
        return self.entry.nbytes // self.part.shape[0] * (last - first)

    def run(self, open_file: OpenFile) -> Iterator[int]:
        raw = in_order(self.entry, read_blocks(open_file(self.entry), self.entry, self.rows))
        found = codes_of(self.entry.dtype, raw, self.scheme)
        found.refuse_not_finite(self.part.name)
        cols = self.part.cols or (0, self.part.shape[1])
        self.target.copy_quantized(0, found.select((0, len(raw)), cols))
        yield self.nbytes


def scheme_of_parts(checkpoint: Checkpoint, parts: tuple[Part, ...]) -> Scheme | None:
    """How the matrix that they make together is held; None: plain. Raises ModelError as `Checkpoint.entry` does."""
    cuts = {cut for part in parts for cut in part.cols or ()}
    return scheme_of([checkpoint.entry(part.name).dtype for part in parts], cuts)
