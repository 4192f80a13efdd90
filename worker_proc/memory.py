"""How many KV pages a rank may have, and how it keeps the memory of its activations."""

import ctypes
import logging
from dataclasses import dataclass

import torch

from common.config import CacheConfig
from worker_proc.cpu.machine import available_memory
from worker_proc.errors import ModelError
from worker_proc.kv_cache import KVCache, KVSpec

log = logging.getLogger(__name__)

_CPU_SHARE = 0.25  # of the available memory, over all ranks: the rest of the machine is in use too
_CUDA_SHARE = 0.92  # of what is free after weights, largest step and logits of graphs: the rest is for fragmentation
_STATES_SHARE = 4  # of the memory for the KV cache, the part for running requests' states; snapshots get as much
_STATES_ALONE = 2  # the same of models without attention
_MOST_SNAPSHOTS = 4096
_MOST_EMPTY_PAGES = 2**17  # of models without attention: they take no memory here, but some where they are counted
_GIB = 2**30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEEP_BYTES, _HEAP_BLOCK_BYTES = 2**28, 2**25  # the second is the most that glibc allows


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Pages of the KV cache and, of models with recurrent layers, states of running requests and snapshots."""

    num_pages: int
    slots: int = 0
    snapshots: int = 0


def choose_size(
    cache: CacheConfig,
    spec: KVSpec,
    *,
    device: torch.device,
    ranks: int,
    context_len: int,
    max_running: int,
    activations: int = 0,
) -> CacheSize:
    """For one rank of `ranks` on this machine. Pages for `kv_tokens`, rounded up, or what fits in `kv_bytes`, or what
    fits in a share of the memory that is available now, of which a GPU keeps `activations` bytes for steps and graphs;
    the last two at most what all running requests' context windows need.

    Of the bytes for the cache, states of recurrent layers get up to a quarter for at most `max_running` requests, and
    with a prefix cache another quarter for snapshots; where `kv_tokens` say how many pages there are, of what would be
    for the cache otherwise. Without attention, pages take nothing, and it is a half each.
    Where the whole context windows of so many requests leave bytes, there are more requests.

    Raises ModelError with the numbers if not a single page or state fits, or if the memory that is available does not
    hold what was asked for. A pool smaller than one context window is allowed, because requests that cannot fit are
    refused one by one, but it is worth a warning.
    """
    page_bytes = cache.page_size * spec.bytes_per_token
    window_pages = -(-context_len // cache.page_size)
    budget, source = _budget(cache, device, ranks, activations)
    slots = snapshots = 0
    if spec.states:
        part = _STATES_SHARE if page_bytes else _STATES_ALONE
        fit = budget // part // spec.bytes_per_state
        if not fit:
            needs = f"1/{part} of the bytes ({source}) does not hold what the recurrent layers keep of one request"
            raise ModelError("kv_memory", budget, f"{needs}, {spec.bytes_per_state} bytes")
        snapshots = min(fit, _MOST_SNAPSHOTS) if cache.prefix_cache else 0
        if cache.kv_tokens is None:
            whole = spec.bytes_per_state + window_pages * page_bytes  # what a request can take at most
            fit = max(fit, (budget - snapshots * spec.bytes_per_state) // whole)
        slots = max_running = min(max_running, fit)
    states = (slots + snapshots) * spec.bytes_per_state
    if cache.kv_tokens is not None:
        pages = -(-cache.kv_tokens // cache.page_size)
    else:
        budget -= states
        most = max_running * window_pages
        pages = min(budget // page_bytes, most) if page_bytes else max(window_pages, min(most, _MOST_EMPTY_PAGES))
        if pages < 1:
            raise ModelError(
                "kv_memory",
                budget,
                f"bytes ({source}) do not hold one page of {cache.page_size} tokens, which needs {page_bytes} bytes",
            )
    if pages * cache.page_size < 2:
        reason = "one page of one token holds no request, which has at least 2 tokens, one of them of the answer"
        raise ModelError("kv_tokens" if cache.kv_tokens is not None else "kv_memory", cache.kv_tokens or budget, reason)
    if cache.kv_tokens is not None or cache.kv_bytes is not None:
        room, where = _room(device, activations + states)
        ranks_here = ranks if device.type == "cpu" else 1  # a GPU is of one rank alone
        if pages * page_bytes * ranks_here > room:
            name = "kv_tokens" if cache.kv_tokens is not None else "kv_memory"
            asked = cache.kv_bytes if cache.kv_tokens is None else cache.kv_tokens
            needs = f"needs {pages * page_bytes / _GIB:.2f} GiB for each of {ranks} ranks"
            raise ModelError(name, asked, f"{needs}, and {room / _GIB:.2f} GiB of {where} are available")
    if pages < window_pages:
        log.warning(
            "the KV cache holds %d tokens, less than the context window of %d, which would need %.2f GiB per rank: "
            "longer requests will be refused",
            pages * cache.page_size,
            context_len,
            window_pages * page_bytes / _GIB,
        )
    return CacheSize(pages, slots, snapshots)


def choose_host_pages(cache: CacheConfig, pages: KVCache, ranks: int, *, settled: bool = False) -> int:
    """Pages of the host tier of one rank of `ranks`: what fits in `host_kv_bytes`.

    Raises ModelError with the numbers if not a single page fits, or if the memory that is available does not hold the
    tiers of all ranks, and on a CPU their KV caches, of which nothing may have been written yet. When all that is
    `settled`, because an earlier group had it, it holds however much is available now.
    """
    wanted, available = cache.host_kv_bytes, available_memory()
    beside = sum(tensor.nbytes for tensor in pages.page_tensors if tensor.device.type == "cpu")
    if not settled and (wanted + beside) * ranks > available:
        has = f"{available / _GIB:.2f} GiB of memory are available"
        has += f", {beside / _GIB:.2f} GiB of which each KV cache will take" if beside else ""
        raise ModelError("host_kv_memory", wanted, f"bytes for each of {ranks} ranks are too many: {has}")
    if wanted < pages.page_bytes:
        raise ModelError("host_kv_memory", wanted, f"bytes do not hold one page, which needs {pages.page_bytes} bytes")
    return wanted // pages.page_bytes


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of activations for the next step. It would hand them back to the kernel, which
    zeroes them page by page when they are allocated again, several times in every step. Elsewhere this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _HEAP_BLOCK_BYTES)


def describe_cache(size: CacheSize, page_size: int, spec: KVSpec) -> str:
    """For the log."""
    tokens = size.num_pages * page_size
    gib = tokens * spec.bytes_per_token / _GIB
    text = f"KV cache: {tokens:,} tokens in {size.num_pages:,} pages of {page_size}, {gib:.2f} GiB per rank"
    if not spec.states:
        return text
    gib = (size.slots + size.snapshots) * spec.bytes_per_state / _GIB
    return text + f"; states of {size.slots:,} requests and {size.snapshots:,} snapshots, {gib:.2f} GiB"


def _budget(cache: CacheConfig, device: torch.device, ranks: int, activations: int) -> tuple[int, str]:
    """Bytes for one rank, and where the number comes from."""
    if cache.kv_bytes is not None:
        return cache.kv_bytes, "as configured"
    available, where = _room(device, activations)
    if device.type == "cuda":
        return int(_CUDA_SHARE * available), f"{_CUDA_SHARE:.0%} of {available / _GIB:.2f} GiB of free {where}"
    share = f"{_CPU_SHARE:.0%} of {available / _GIB:.2f} GiB of available {where}, for {ranks} ranks"
    return int(_CPU_SHARE * available) // ranks, share


def _room(device: torch.device, activations: int) -> tuple[int, str]:
    """Bytes that `device` can give now beside `activations`, and of what."""
    if device.type == "cuda":
        return max(0, torch.cuda.mem_get_info(device)[0] - activations), "GPU memory"
    return available_memory() - activations, "memory"
