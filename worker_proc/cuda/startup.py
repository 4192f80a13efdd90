"""Getting a GPU ready to serve: what a step needs beside weights and cache, and the graphs."""

import logging

import torch

from common.config import ClusterConfig
from worker_proc.attention.interface import AttentionBackend
from worker_proc.cuda.attention import TritonAttention
from worker_proc.cuda.decoder import CudaDecoder
from worker_proc.cuda.graphed_model import GraphedModel, never_waits, shared_bytes
from worker_proc.cuda.graphs import GraphedDecoder, kept_bytes
from worker_proc.cuda.interface import CudaAttention
from worker_proc.cuda.warm_up import compile_kernels
from worker_proc.kv_cache import KVCache, KVSpec
from worker_proc.models.interface import LanguageModel
from worker_proc.models.loading import Progress
from worker_proc.parallel import TensorParallel

log = logging.getLogger(__name__)


def prepare_steps(
    model: LanguageModel,
    attention: AttentionBackend,
    spec: KVSpec,
    config: ClusterConfig,
    context_len: int,
    tp: TensorParallel,
    device: torch.device,
    progress: Progress | None,
) -> int:
    """Have the kernels of all steps compiled. Returns the bytes that the largest step and the graphs will take beside
    weights and a cache of `spec`."""
    steps, page_size = config.scheduler, config.cache.page_size
    compile_kernels(
        model,
        attention,
        spec,
        max_rows=steps.max_running,
        max_tokens=steps.max_batch_tokens + steps.max_running,  # some have logits for a draw and for a score
        context_len=context_len,
        page_size=page_size,
        device=device,
        progress=progress,
    )
    from worker_proc.cuda.largest_steps import measure_steps  # needs what grammars need, which benchmarks do without

    largest = measure_steps(
        model, spec, steps, context_len=context_len, page_size=page_size, tp=tp, device=device,
        whole_context=isinstance(attention, CudaAttention),  # plain torch has the scores of a whole row in memory
    )  # fmt: skip
    columns = -(-context_len // page_size)
    if not config.model.cuda_graphs:
        return largest
    return largest + graph_memory(model, attention, tp, steps.max_running, columns)


def with_graphs(
    model: LanguageModel,
    attention: AttentionBackend,
    cache: KVCache,
    max_rows: int,
    max_tokens: int,
    context_len: int,
    tp: TensorParallel,
    progress: Progress | None,
) -> LanguageModel:
    """The same model with its steps captured as CUDA graphs, where it can be."""
    if isinstance(model, CudaDecoder):
        graphed = GraphedDecoder(model, max_rows, context_len, max_tokens=max_tokens)
        graphed.capture(cache, progress)
        return graphed
    if not _may_capture(model, attention, tp) or not never_waits(model, cache):
        return model
    replayed = GraphedModel(model, max_rows, context_len)
    try:
        replayed.capture(cache, progress)
    except RuntimeError as error:
        log.warning("decodes of this model are launched kernel by kernel, as they do not become CUDA graphs: %s", error)
        return model
    return replayed


def _may_capture(model: LanguageModel, attention: AttentionBackend, tp: TensorParallel) -> bool:
    """Whether a model that is computed layer by layer in torch may be tried: on one GPU, and not where attention begins
    anew after some tokens (Llama 4), which is laid out on the host in every step."""
    return isinstance(attention, TritonAttention) and tp.size == 1 and model.kv_spec.chunk is None


def cuda_decoder(model: LanguageModel) -> CudaDecoder | GraphedDecoder | None:
    """A model that runs through the GPU's own decoder, with or without graphs: it reads pages that several decodes have
    in common once, where its attention can, and says which layer it has reached."""
    return model if isinstance(model, CudaDecoder | GraphedDecoder) else None


def graph_memory(
    model: LanguageModel, attention: AttentionBackend, tp: TensorParallel, max_running: int, columns: int
) -> int:
    """Bytes that the graphs of decodes with up to `columns` pages each will keep; 0 for a model that gets none."""
    if isinstance(model, CudaDecoder):
        shares = model.attention.shares_pages
        return kept_bytes(max_running, model.vocab_size, model.kv_spec.dtype, columns, shares_pages=shares)
    return shared_bytes(max_running, model.vocab_size, columns) if _may_capture(model, attention, tp) else 0
