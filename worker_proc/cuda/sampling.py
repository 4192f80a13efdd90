"""The kernel of sampling_kernels.py on tensors."""

from torch import Tensor

from worker_proc.cuda.sampling_kernels import draw_kernel

_BLOCK = 4096
_WARPS = 16


def draw(weights: Tensor, params: Tensor, seeds: Tensor, index: Tensor, tokens: Tensor, unit: float) -> None:
    """Write a token for every row of `weights` (float32 `[R, vocab]`, whole numbers up to `unit`) to `tokens` int64
    `[S]`. Nothing waits for the GPU.

    `params` float64 `[4, max_slots]` (temperature, top_k, top_p, min_p) and `seeds` int64 `[max_slots]` are those of
    all slots; `index` int64 `[3, R]` says a row's place in `tokens`, its slot and its position.
    """
    rows, vocab = weights.shape
    draw_kernel[(rows,)](
        weights, params, seeds, index, tokens,
        vocab, weights.stride(0), params.stride(0), index.stride(0), unit, _BLOCK, num_warps=_WARPS,
    )  # fmt: skip
