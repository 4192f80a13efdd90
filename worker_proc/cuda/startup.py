"""Getting a GPU ready to serve: what a step needs beside weights and cache, and the graphs."""

import logging
from itertools import accumulate

import torch

from common.config import ClusterConfig
from worker_proc.attention.interface import AttentionBackend, ForwardBatch
from worker_proc.cuda.decoder import CudaDecoder
from worker_proc.cuda.graphs import GraphedDecoder, kept_bytes
from worker_proc.cuda.warm_up import compile_kernels
from worker_proc.kv_cache import KVCache, KVSpec
from worker_proc.models.interface import LanguageModel
from worker_proc.models.loading import Progress

log = logging.getLogger(__name__)


def prepare_steps(
    model: LanguageModel,
    attention: AttentionBackend,
    spec: KVSpec,
    config: ClusterConfig,
    context_len: int,
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
    largest = measure_activations(model, spec, steps.max_batch_tokens, page_size, steps.max_running, device)
    return largest + (graph_memory(model, steps.max_running) if config.model.cuda_graphs else 0)


def with_graphs(
    model: LanguageModel,
    cache: KVCache,
    max_rows: int,
    max_tokens: int,
    context_len: int,
    progress: Progress | None,
) -> LanguageModel:
    """The same model with its steps captured as CUDA graphs, where it can be."""
    if not isinstance(model, CudaDecoder):
        return model
    graphed = GraphedDecoder(model, max_rows, context_len, max_tokens=max_tokens)
    graphed.capture(cache, progress)
    return graphed


def cuda_decoder(model: LanguageModel) -> CudaDecoder | GraphedDecoder | None:
    """A model that runs through the GPU's own decoder, with or without graphs: it reads pages that several decodes have
    in common once, where its attention can, and says which layer it has reached."""
    return model if isinstance(model, CudaDecoder | GraphedDecoder) else None


def graph_memory(model: LanguageModel, max_running: int) -> int:
    """Bytes that the graphs of decodes will keep; 0 for a model that gets none."""
    if not isinstance(model, CudaDecoder):
        return 0
    shares = model.attention.shares_pages
    return kept_bytes(max_running, model.vocab_size, model.kv_spec.dtype, shares_pages=shares)


@torch.inference_mode()
def measure_activations(
    model: LanguageModel, spec: KVSpec, tokens: int, page_size: int, rows: int, device: torch.device
) -> int:
    """Bytes that the largest step takes beside weights and a cache of `spec`: prompts of `tokens` tokens in all, over
    `rows` rows.

    It also loads cuBLAS and compiles kernels, whose memory is then no longer free when the cache is sized.
    """
    rows = max(1, min(rows, tokens))
    lengths = [tokens // rows + (row < tokens % rows) for row in range(rows)]
    pages = [-(-length // page_size) for length in lengths]
    starts = [0, *accumulate(pages)]
    cache = KVCache(spec, starts[-1], page_size, device)
    table = torch.zeros(rows, max(pages), dtype=torch.int64)
    for row, count in enumerate(pages):
        table[row, :count] = torch.arange(starts[row], starts[row] + count)
    positions = torch.cat([torch.arange(length) for length in lengths])
    row_of_token = torch.repeat_interleave(torch.arange(rows), torch.tensor(lengths))
    slots = table[row_of_token, positions // page_size] * page_size + positions % page_size
    batch = ForwardBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
        positions=positions.to(device),
        slot_mapping=slots.to(device),
        page_table=table.to(device),
        kv_lens=torch.tensor(lengths, device=device),
        q_lens=lengths,
        kv_lens_host=lengths,
        num_prefill_rows=rows,
        logit_rows=torch.tensor(lengths, device=device).cumsum(0) - 1,
    )
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    logits = model.forward(batch, cache)
    if len(logits):
        (logits.log_softmax(-1), logits.clone())  # what log probabilities and draws take
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del logits, batch, cache
    torch.cuda.empty_cache()
    log.info("a step of %d tokens takes %.2f GiB beside weights and cache", tokens, peak / 2**30)
    return peak
