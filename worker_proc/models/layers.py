"""The few operations that a decoder layer consists of, on plain tensors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.models.spec import CLAMPED_SWIGLU, SWIGLU_ALPHA, SWIGLU_LIMIT, DecoderSpec
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
    offset: float = 0.0  # is added to the weight, in float32

    def __call__(self, x: Tensor) -> Tensor:
        if not self.offset:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide) + self.offset, self.eps).to(x.dtype)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


Norm = RMSNorm | LayerNorm


def embedding_scale(spec: DecoderSpec, dtype: torch.dtype) -> float:
    """What embeddings are multiplied with in a model of this precision."""
    scale = torch.tensor(spec.embedding_scale, dtype=torch.float64)
    return float(scale.to(dtype) if spec.rounds_embedding_scale else scale)


def cap(x: Tensor, most: float) -> Tensor:
    """Soft cap: `most * tanh(x / most)` (Gemma 2)."""
    return torch.tanh(x / most) * most


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


def gated(activation: str) -> Callable[[Tensor, Tensor], Tensor]:
    """What makes gates and ups of a gated MLP one: `act(gate) * up`, or gpt-oss's clamped form of it."""
    if activation == CLAMPED_SWIGLU:
        return _clamped_swiglu
    function = ACTIVATION_FUNCTIONS[activation]
    return lambda gate, up: function(gate) * up


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
