"""Has every Triton kernel that steps can need compiled before requests wait for one.

A kernel takes a second or more the first time on a machine, and some hundredths when Triton finds it on disk. Which
there are depends on the model and on what a step looks like: chunks and decodes, how decodes are cut into parts and
whether they share pages (`TritonAttention.decode_kinds`), how many rows products have (`few_rows.SIZES`,
`PackedWeight.row_counts`). `bench.gpu.compiles` and tests/worker/test_cuda_compile.py look for steps that need others.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from worker_proc.attention.interface import AttentionBackend
from worker_proc.cuda.attention import TritonAttention
from worker_proc.cuda.decoder import CudaDecoder
from worker_proc.cuda.few_rows import SIZES
from worker_proc.cuda.graphs import do_all
from worker_proc.cuda.overlap import MOST_ROWS
from worker_proc.cuda.quantized import PackedWeight
from worker_proc.idle_step import idle_step
from worker_proc.kv_cache import KVCache, KVSpec
from worker_proc.models.decoder import Decoder
from worker_proc.models.decoder_weights import DecoderWeights
from worker_proc.models.interface import LanguageModel
from worker_proc.models.layers import Linear

_CHUNK = 2  # tokens: the shortest
_LONGER = MOST_ROWS + 1  # too many to overlap


@torch.inference_mode()
def compile_kernels(
    model: LanguageModel,
    attention: AttentionBackend,
    spec: KVSpec,
    *,
    max_rows: int,
    max_tokens: int,
    context_len: int,
    page_size: int,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Launch every kernel that steps of `model` through `attention` need, of at most `max_rows` requests with at most
    `max_tokens` tokens in all; draws are `ModelRunner.warm_up`'s. All ranks must do so at the same time.

    Steps are computed on the scratch page of a small cache of `spec`. `progress(done, total)` counts launches.
    """
    cache = KVCache(spec, 1, page_size, device)
    columns = -(-max(context_len, _CHUNK) // page_size)
    step = partial(idle_step, cache)
    chunks = [_CHUNK] + [_LONGER] * (max_tokens > _LONGER)
    batches = [*(step(chunk, 1, -(-chunk // page_size)) for chunk in chunks), step(0, 1, 1)]
    if isinstance(model, CudaDecoder):
        # however few requests there may be: guesses and the last tokens of a prompt are rows, too
        batches += [step(0, rows, 1) for rows in SIZES if rows > 1]
    if isinstance(attention, TritonAttention) and spec.layers:
        kinds = attention.decode_kinds(max_rows, spec.num_kv_heads, page_size, columns)
        several = isinstance(model, CudaDecoder)  # others are not told of shared pages
        batches += [step(0, kind.rows, kind.columns, kind.shared) for kind in kinds if several or not kind.shared]
    tasks: list[Callable[[], object]] = [partial(model.forward, batch, cache) for batch in batches]
    if isinstance(model, CudaDecoder | Decoder):
        tasks += _products(model.weights, max_tokens, device)
    do_all(tasks, progress)


def _products(weights: DecoderWeights, most: int, device: torch.device) -> Iterator[Callable[[], Tensor]]:
    """A product with codes for each shape of matrix and each kernel that up to `most` rows need."""
    seen: set[tuple[object, ...]] = set()
    layers = [linear for layer in weights.layers for linear in (layer.qkv, layer.o, layer.up, layer.down)]
    experts = [linear for layer in weights.layers for mlp in layer.experts for linear in (mlp.up, mlp.down)]
    for linear in (*layers, *experts, weights.head):
        weight = linear.weight
        if not isinstance(weight, PackedWeight):
            continue
        shape = (weight.codes.shape, weight.inputs, weight.scheme, linear.bias is None)
        if shape not in seen:
            seen.add(shape)
            for rows in weight.row_counts(most):
                yield partial(_multiply, linear, rows, weight, device)


def _multiply(linear: Linear, rows: int, weight: PackedWeight, device: torch.device) -> Tensor:
    return linear(torch.zeros(rows, weight.inputs, dtype=weight.dtype, device=device))
