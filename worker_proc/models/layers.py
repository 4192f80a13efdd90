"""The few operations that a decoder layer consists of, on plain tensors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from worker_proc.quantization.target import QuantizedMatrix

Table = Tensor | QuantizedMatrix  # a matrix [rows, columns]


def look_up(table: Table, rows: Tensor) -> Tensor:
    """Rows of a table, `[len(rows), columns]`."""
    return F.embedding(rows, table) if isinstance(table, Tensor) else table.rows(rows)


@dataclass(frozen=True, slots=True)
class Linear:
    """`x @ weight.T + bias`, with `weight` `[out, in]`."""

    weight: Table
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, Tensor):
            return F.linear(x, self.weight, self.bias)
        return self.weight.linear(x, self.bias)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Zhang and Sennrich, 2019, over the last dimension."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# The names of transformers' ACT2FN; the three tanh forms of GELU are the same function.
ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}
