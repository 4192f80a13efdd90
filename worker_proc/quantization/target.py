"""Where quantized rows go while a checkpoint is read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker_proc.quantization.rows import QuantizedRows
from worker_proc.quantization.scheme import Scheme

Quantize = Callable[[Tensor, Scheme], QuantizedRows]


class QuantizedTarget(Protocol):
    """As `loading.Target`, for rows in codes."""

    def copy_quantized(self, first: int, rows: QuantizedRows) -> None: ...


@dataclass(frozen=True, slots=True)
class QuantizingTarget:
    """Takes whole plain rows, so that every rank finds the same codes, and keeps the columns of the rank."""

    target: QuantizedTarget
    scheme: Scheme
    cols: tuple[int, int]
    quantize: Quantize

    def copy_rows(self, first: int, rows: Tensor) -> None:
        quantized = self.quantize(rows, self.scheme)
        self.target.copy_quantized(first, quantized.select((0, len(rows)), self.cols))


class QuantizedMatrix(Protocol):
    """A matrix `[out, in]` in codes: `rows.QuantizedWeight`, or what a device has in its place."""

    @property
    def nbytes(self) -> int:
        """What a product reads."""
        ...

    def put(self, first: int, rows: QuantizedRows) -> None:
        """Fill the rows from `first` on."""
        ...

    def rows(self, indices: Tensor | None = None) -> Tensor:
        """Rows `indices`, or all, `[R, in]`, as plain numbers."""
        ...

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`, with `x` `[T, in]`."""
        ...


MakeMatrix = Callable[[int, int, Scheme, torch.dtype, torch.device], QuantizedMatrix]
"""Of outputs, inputs, scheme, the precision of `x`, and the device; to be filled."""


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Rows of a `QuantizedMatrix` from `start` on."""

    weight: QuantizedMatrix
    start: int

    def copy_quantized(self, first: int, rows: QuantizedRows) -> None:
        self.weight.put(self.start + first, rows)
