"""Where quantized rows go while a checkpoint is read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker_proc.quantization.rows import QuantizedRows, QuantizedWeight
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


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Rows of a `QuantizedWeight` from `start` on."""

    weight: QuantizedWeight
    start: int

    def copy_quantized(self, first: int, rows: QuantizedRows) -> None:
        self.weight.put(self.start + first, rows)
