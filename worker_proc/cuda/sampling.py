"""The kernels of sampling_kernels.py on tensors. Nothing here waits for the GPU."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from worker_proc.cuda.overlap import options
from worker_proc.cuda.sampling_kernels import RANGES, draw_kernel, gather_kernel, weights_kernel
from worker_proc.sampler import NEVER, UNIT

_SUMMED = 2048  # weights of a block that is added up where it is made
_GATHERED = 8  # blocks of a program that lays tokens together
_SEARCHED = 4096  # weights that are looked at together where thresholds are searched for among all of them
_ROOM = 4096  # tokens that are drawn from in registers
_WARPS = 16


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of rows (float32 `[R, vocab]`, whole numbers up to `UNIT`), and what `draw_kernel` wants to know of their
    blocks."""

    weights: Tensor
    masses: Tensor
    ranges: Tensor


def draw_rows(logits: Tensor, best: Tensor, params: Tensor, seeds: Tensor, index: Tensor, tokens: Tensor) -> None:
    """See `DrawRows`: for each column of `index`, a token for that row of `logits` (float32 `[S, vocab]`, unchanged),
    whose largest is in `best` float32 `[S]`. The other arguments are those of `draw`."""
    draw(make_weights(logits, best, params, index), params, seeds, index, tokens)


def make_weights(logits: Tensor, best: Tensor, params: Tensor, index: Tensor) -> Weights:
    """`worker_proc.sampler.weights_of`, exact, for rows `index[0]` of `logits` with the parameters of slots `index[1]`:
    the same bits."""
    rows, vocab = index.shape[1], logits.shape[1]
    summed, device = _at_most(_SUMMED, vocab), logits.device
    blocks = triton.cdiv(vocab, summed)
    made = Weights(
        torch.empty(rows, vocab, dtype=torch.float32, device=device),
        torch.empty(rows, blocks, dtype=torch.float64, device=device),
        torch.empty(rows, blocks, 2, RANGES.value, dtype=torch.float64, device=device),
    )
    weights_kernel[rows, blocks](
        logits, best, params, index, made.weights, made.masses, made.ranges,
        vocab, logits.stride(0), params.stride(0), index.stride(0), NEVER, UNIT, summed,
        **options(device),
    )  # fmt: skip
    return made


def draw(made: Weights, params: Tensor, seeds: Tensor, index: Tensor, tokens: Tensor) -> None:
    """Write a token for every row of weights, made for the same `params` and `index`, to `tokens` int64 `[S]`.

    `params` float64 `[4, max_slots]` (temperature, top_k, top_p, min_p) and `seeds` int64 `[max_slots]` are those of
    all slots; `index` int64 `[3, R]` says a row's place in `tokens`, its slot and its position.
    """
    (rows, vocab), blocks, device = made.weights.shape, made.masses.shape[1], tokens.device
    summed, searched, room = (_at_most(size, vocab) for size in (_SUMMED, _SEARCHED, _ROOM))
    few = torch.empty(rows, room, dtype=torch.float32, device=device)
    names = torch.empty(rows, room, dtype=torch.int32, device=device)
    wide = triton.next_power_of_2(blocks)
    gather_kernel[rows, triton.cdiv(blocks, _GATHERED)](
        made.weights, made.masses, made.ranges, few, names, params, index,
        vocab, blocks, made.weights.stride(0), params.stride(0), index.stride(0), summed, wide, _GATHERED, room,
        **options(device),
    )  # fmt: skip
    draw_kernel[(rows,)](
        made.weights, made.masses, made.ranges, few, names, params, seeds, index, tokens,
        vocab, blocks, made.weights.stride(0), params.stride(0), index.stride(0), UNIT,
        summed, wide, searched, room, num_warps=_WARPS, **options(device),
    )  # fmt: skip


def _at_most(size: int, vocab: int) -> int:
    """A block of `size`, or less for a small vocabulary."""
    return min(size, int(triton.next_power_of_2(vocab)))
