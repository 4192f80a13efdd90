"""The kernels of sampling_kernels.py on tensors. Nothing here waits for the GPU."""

import torch
import triton
from torch import Tensor

from worker_proc.cuda.sampling_kernels import draw_kernel, weights_kernel
from worker_proc.sampler import NEVER, UNIT

_BLOCK = 4096
_WARPS = 16
_WEIGHTS_BLOCK = 2048


def draw_rows(logits: Tensor, best: Tensor, params: Tensor, seeds: Tensor, index: Tensor, tokens: Tensor) -> None:
    """See `DrawRows`: for each column of `index`, a token for that row of `logits` (float32 `[S, vocab]`, unchanged),
    whose largest is in `best` float32 `[S]`. The other arguments are those of `draw`."""
    draw(make_weights(logits, best, params, index), params, seeds, index, tokens)


def make_weights(logits: Tensor, best: Tensor, params: Tensor, index: Tensor) -> Tensor:
    """`worker_proc.sampler.weights_of`, exact, for rows `index[0]` of `logits` with the temperatures of slots
    `index[1]`: float32 `[R, vocab]`, the same bits."""
    rows, vocab = index.shape[1], logits.shape[1]
    weights = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    weights_kernel[rows, triton.cdiv(vocab, _WEIGHTS_BLOCK)](
        logits, best, params, index, weights,
        vocab, logits.stride(0), index.stride(0), NEVER, UNIT, _WEIGHTS_BLOCK,
    )  # fmt: skip
    return weights


def draw(weights: Tensor, params: Tensor, seeds: Tensor, index: Tensor, tokens: Tensor) -> None:
    """Write a token for every row of `weights` (float32 `[R, vocab]`, whole numbers up to `UNIT`) to `tokens` int64
    `[S]`.

    `params` float64 `[4, max_slots]` (temperature, top_k, top_p, min_p) and `seeds` int64 `[max_slots]` are those of
    all slots; `index` int64 `[3, R]` says a row's place in `tokens`, its slot and its position.
    """
    rows, vocab = weights.shape
    draw_kernel[(rows,)](
        weights, params, seeds, index, tokens,
        vocab, weights.stride(0), params.stride(0), index.stride(0), UNIT, _BLOCK, num_warps=_WARPS,
    )  # fmt: skip
