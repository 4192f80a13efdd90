"""The kernel of few_rows_kernels.py on tensors."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from worker_proc.cuda.few_rows_kernels import few_rows_kernel
from worker_proc.cuda.overlap import options
from worker_proc.models.layers import Linear

SIZES = (1, 2, 4)  # rows that there are kernels for: others take the next larger one
MOST = SIZES[-1]
_TILE = 4096  # weights that a program has under way, where it has all inputs of some outputs
_PART = 2048  # where it has not, or where four rows need the registers
_LONGEST = 1024  # inputs of a part; twice as many of several rows
_SMALL = 1 << 23  # weights beyond which cuBLAS is as quick with several rows


@dataclass(frozen=True, slots=True)
class Cut:
    """Outputs and inputs of a program's tile."""

    block_n: int
    block_k: int

    @classmethod
    def of(cls, rows: int, inputs: int, gated: bool) -> "Cut":
        """Sizes are from `python -m bench.gpu.few_rows`."""
        whole, parts = triton.next_power_of_2(inputs), 2 if gated else 1
        most = _TILE if rows <= 2 else _PART
        if whole * parts <= most:
            return cls(most // whole // parts, whole)
        return cls(_PART // _LONGEST // parts, _LONGEST) if rows == 1 else cls(most // _PART, _PART)


def suits_few_rows(x: Tensor, linear: Linear, *, gated: bool = False) -> bool:
    """Whether `few_rows_linear` is the quickest way to multiply `x`."""
    weight = linear.weight
    if not isinstance(weight, Tensor) or weight.dtype == torch.float32 or not x.is_contiguous():
        return False
    return len(x) == 1 or (1 < len(x) <= MOST and not gated and weight.numel() <= _SMALL)


def few_rows_linear(x: Tensor, linear: Linear, *, gated: bool = False, cut: Cut | None = None) -> Tensor:
    """`linear` of `x` `[T, inputs]`, contiguous, 1 to `MOST` rows. With `gated`, for one row, its outputs are gates,
    then as many others, and `silu(gate) * other` is returned."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    rows, inputs = x.shape
    outputs = len(weight) // (2 if gated else 1)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    cut = cut or Cut.of(rows, inputs, gated)
    few_rows_kernel[(triton.cdiv(outputs, cut.block_n),)](
        x, weight, x if linear.bias is None else linear.bias, out, rows, inputs, outputs,
        triton.next_power_of_2(rows), linear.bias is not None, gated, inputs % cut.block_k == 0,
        cut.block_n, cut.block_k, num_warps=1, **options(x.device),
    )  # fmt: skip
    return out
