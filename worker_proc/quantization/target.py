"""Where quantized rows go while a checkpoint is read."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker_proc.quantization.rows import QuantizedRows, QuantizedWeight, quantize_rows
from worker_proc.quantization.scheme import Scheme


class QuantizedTarget(Protocol):
    """As `loading.Target`, for rows in codes."""

    def copy_quantized(self, first: int, rows: QuantizedRows) -> None: ...


@dataclass(frozen=True, slots=True)
class QuantizingTarget:
    """Takes whole plain rows, so that every rank finds the same codes, and keeps the columns of the rank."""

    target: QuantizedTarget
    scheme: Scheme
    cols: tuple[int, int]

    def copy_rows(self, first: int, rows: Tensor) -> None:
        quantized = quantize_rows(rows, self.scheme)
        self.target.copy_quantized(first, quantized.select((0, len(rows)), self.cols))


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Rows of a `QuantizedWeight` from `start` on."""

    weight: QuantizedWeight
    start: int

    def copy_quantized(self, first: int, rows: QuantizedRows) -> None:
        self.weight.put(self.start + first, rows)
