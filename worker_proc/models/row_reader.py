"""A table whose rows are read from its file when they are wanted, so that it takes no memory of the process: of the
per-layer embeddings of Gemma 4, which are as large as the rest of the model, a token needs one row.
"""

import math
from io import FileIO

import torch
from torch import Tensor

from worker_proc.errors import ModelError
from worker_proc.gguf.blocks import dequantize
from worker_proc.gguf.kinds import CODED, KINDS
from worker_proc.models.loading import DTYPES, fill
from worker_proc.weights import TensorEntry


class RowReader:
    """The rows of one stored matrix. The file stays open, so that it may be moved or deleted meanwhile."""

    def __init__(self, entry: TensorEntry, dtype: torch.dtype) -> None:
        """`dtype` is that of the rows that are given. Raises ModelError where the file cannot be opened, or holds
        another type."""
        if entry.dtype not in DTYPES and entry.dtype not in CODED:
            raise ModelError(entry.name, entry.dtype, f"unexpected type of a tensor in {entry.file.name}")
        try:
            self._file = FileIO(str(entry.file))
        except OSError as error:
            raise ModelError(entry.name, str(entry.file), f"cannot be read ({error})") from None
        kind = KINDS[entry.dtype]
        self._row_bytes = math.prod(entry.shape[1:]) // kind.numbers * kind.nbytes
        self._entry, self._dtype, self._count = entry, dtype, entry.shape[0]

    def rows(self, indices: Tensor) -> Tensor:
        """Those rows of the table, int64 `[N]` to `[N, columns]`; zeros where it has none, as an embedding of several
        ranks gives. Raises OSError where they cannot be read."""
        raw = torch.zeros(len(indices), self._row_bytes, dtype=torch.uint8)
        for row, index in zip(raw, indices.tolist(), strict=True):
            if 0 <= index < self._count:
                fill(row, self._file, self._entry.begin + index * self._row_bytes)
        if self._entry.dtype in CODED:
            return dequantize(self._entry.dtype, raw).to(self._dtype)
        return raw.view(DTYPES[self._entry.dtype]).to(self._dtype)
