"""Which attention a GPU computes with."""

import importlib
from typing import Any

import torch

from common.config import ConfigError
from worker_proc.attention.interface import AttentionBackend, ForwardBatch
from worker_proc.attention.reference import ReferenceAttention
from worker_proc.cuda.attention import TritonAttention
from worker_proc.cuda.flashinfer_attention import DTYPES, HEAD_DIMS, FlashInferAttention
from worker_proc.kv_cache import KVCache, KVSpec


def choose_attention(
    name: str,
    dtype: torch.dtype,
    head_dim: int | None,
    device: torch.device,
    *,
    int8_kv: bool = False,
    sinks: bool = False,
) -> AttentionBackend:
    """The backend `name` of `common.config.GPU_ATTENTIONS`, for heads of `head_dim` numbers, None if it is not known,
    with `sinks` or without, and a cache in the model's precision or in int8.

    "auto" is Triton, whose decodes take up to a tenth longer than FlashInfer's, but read prefixes that rows share once,
    and are compiled in seconds. Raises ConfigError if "flashinfer" cannot be had.
    """
    if name == "sdpa":
        return ReferenceAttention()
    return _flashinfer(dtype, head_dim, device, int8_kv, sinks) if name == "flashinfer" else TritonAttention()


def _flashinfer(
    dtype: torch.dtype, head_dim: int | None, device: torch.device, int8_kv: bool, sinks: bool
) -> FlashInferAttention:
    if int8_kv:
        raise ConfigError("gpu-attention flashinfer: reads no int8 KV cache (kv-cache-dtype int8), triton does")
    if sinks:
        raise ConfigError("gpu-attention flashinfer: computes no attention with sinks (gpt-oss) here, triton does")
    if dtype not in DTYPES:
        raise ConfigError(f"gpu-attention flashinfer: knows float16 and bfloat16, not {str(dtype).split('.')[-1]}")
    if head_dim is None:
        raise ConfigError("gpu-attention flashinfer: not for models that run through transformers")
    if head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise ConfigError(f"gpu-attention flashinfer: knows heads of {known} numbers, not of {head_dim}")
    try:
        library: Any = importlib.import_module("flashinfer")
    except ImportError as error:
        raise ConfigError(f"gpu-attention flashinfer: it cannot be imported ({error})") from None
    attention = FlashInferAttention(library, device)
    try:
        try_out(attention, KVSpec.uniform(1, 1, head_dim, head_dim, dtype), device)
    except Exception as error:  # its compiler, its version, its GPU: anything can be missing
        raise ConfigError(f"gpu-attention flashinfer: a trial failed ({type(error).__name__}: {error})") from error
    return attention


@torch.inference_mode()
def try_out(attention: FlashInferAttention, spec: KVSpec, device: torch.device) -> None:
    """A chunk of two tokens beside a decode of one, which has FlashInfer compile its kernels: values of one everywhere
    must come back. Raises RuntimeError if they do not."""
    cache = KVCache(spec, 2, 16, device)
    for pages in (*cache.k, *cache.v):
        pages.fill_(1)
    counts = torch.tensor([2, 1], device=device)
    batch = ForwardBatch(
        token_ids=torch.zeros(3, dtype=torch.int64, device=device),
        positions=torch.tensor([0, 1, 0], device=device),
        slot_mapping=torch.tensor([0, 1, 16], device=device),
        page_table=torch.tensor([[0], [1]], device=device),
        kv_lens=counts,
        q_lens=[2, 1],
        kv_lens_host=[2, 1],
        num_prefill_rows=1,
        logit_rows=counts.cumsum(0) - 1,
    )
    q = torch.ones(3, 1, spec.k_head_dim, dtype=spec.dtype, device=device)
    result = attention.attend(0, q, batch, cache, scale=1.0, window=None, softcap=None)
    if not bool((result == 1).all()):
        raise RuntimeError(f"attention over ones gave {result.flatten()[:4].tolist()}")
