"""Attention on a GPU by the kernels of attention_kernels.py."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
import triton
from torch import Tensor

from worker_proc.attention.interface import SHARED_LEVELS, TILE_ROWS, ForwardBatch, SharedPages
from worker_proc.cuda.attention_kernels import (
    combine_kernel,
    decode_kernel,
    prefill_kernel,
    shared_kernel,
    store_kernel,
)
from worker_proc.cuda.overlap import MOST_ROWS, options
from worker_proc.kv_cache import KVCache

_BLOCK_N = 64  # cached tokens that a part of a decode has at least
_MIN_GROUP = 16  # rows of the smallest matrix product
_MAX_SPLITS = 64
_MAX_PARTS = 128  # of a row and head, which one program joins
_ROOMY = 160 * 2**10
_QUERY_BYTES = 2**16  # of a tile's queries at most
_PROGRAMS = 264  # two per multiprocessor of an H100 or H200: what a decode step is cut into when its rows are few


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel goes about its work: queries of a program (all query heads of a KV head counted), cached tokens that
    it looks at together, warps, and loads in flight."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# by `python -m bench.gpu.tune`, for heads of 128 numbers
_PREFILL, _PREFILL_INT8 = Tiles(128, 128, 8, 3), Tiles(64, 128, 4, 3)
_DECODE, _DECODE_INT8 = Tiles(16, 64, 4, 3), Tiles(16, 128, 4, 2)
# where those take too much shared memory
_PREFILL_WIDE, _PREFILL_WIDEST = Tiles(64, 64, 4, 3), Tiles(32, 32, 4, 2)
_DECODE_WIDEST = Tiles(16, 32, 4, 2)
_SHARED, _SHARED_WIDE, _SHARED_WIDEST = Tiles(16, 64, 4, 3), Tiles(16, 16, 4, 2), Tiles(16, 16, 4, 1)


@dataclass(frozen=True, slots=True)
class DecodeKind:
    """Decodes: how many, how many pages the longest has, whether they share some."""

    rows: int
    columns: int
    shared: bool


class TritonAttention:
    """Implements `CudaAttention`. Nothing here waits for the GPU, and a decode step sends nothing to it, so that it
    can be captured in a CUDA graph."""

    shares_pages = True

    def __init__(self) -> None:
        self._batch: ForwardBatch | None = None
        self._starts: Tensor | None = None  # int64 [prefill rows + 1]: where the tokens of each begin
        self._longest = 0

    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        cache: KVCache,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        store(k, v, batch.slot_mapping, cache, layer)
        return self.attend(layer, q, batch, cache, scale=scale, window=window, softcap=softcap, sinks=sinks)

    def attend(
        self,
        layer: int,
        q: Tensor,
        batch: ForwardBatch,
        cache: KVCache,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `CudaAttention.attend`."""
        if out is None:
            out = q.new_empty(q.shape[0], q.shape[1], cache.v[layer].shape[3])
        first, tokens = batch.num_prefill_rows, 0
        limits = (scale, window, softcap, sinks)
        if first:
            starts = self._prefill_starts(batch)
            tokens = sum(batch.q_lens[:first])
            prefill(q, out, batch.page_table, batch.kv_lens, starts, self._longest, cache, layer, *limits)
        if tokens < len(q):
            shared = batch.shared if window is None else None  # a window leaves the beginning out
            table, lengths = batch.page_table[first:], batch.kv_lens[first:]
            decode(q[tokens:], out[tokens:], table, lengths, cache, layer, *limits, shared)
        return out

    def bind(self, batch: ForwardBatch) -> None:
        """See `CudaAttention`: the kernels read all they need from the batch."""

    def replan(self, batch: ForwardBatch, cache: KVCache, kv_lens: list[int]) -> None:
        """See `CudaAttention`."""

    def decode_kinds(self, max_rows: int, kv_heads: int, page_size: int, columns: int) -> list[DecodeKind]:
        """Decodes that launch, between them, every kernel that up to `max_rows` of them with up to `columns` pages each
        can need, in chosen sizes as small as possible. What differs is the block in which parts are joined, and whether
        kernels overlap."""
        blocks = range(1, min(_MAX_SPLITS, -(-columns * page_size // _BLOCK_N)) + 1)
        widths = sorted({1, columns, *(min(columns, -(-((n - 1) * _BLOCK_N + 1) // page_size)) for n in blocks)})
        found: dict[tuple[bool, int, bool], DecodeKind] = {}
        for shared in (False, True):
            for rows in range(1 + shared, max_rows + 1):
                parts = [num_parts(rows, kv_heads, width * page_size, shared)[0] for width in widths]
                for width, count in zip(widths, parts, strict=True):
                    found.setdefault((shared, _block(count), rows <= MOST_ROWS), DecodeKind(rows, width, shared))
                if rows > MOST_ROWS and parts[-1] == (1 + SHARED_LEVELS if shared else 1):  # so it is for more rows
                    break
        return list(found.values())

    def _prefill_starts(self, batch: ForwardBatch) -> Tensor:
        if batch is not self._batch or self._starts is None:
            lengths = batch.q_lens[: batch.num_prefill_rows]
            starts = batch.chunk_starts
            if starts is None:
                starts = torch.tensor([0, *accumulate(lengths)]).to(batch.kv_lens.device)
            self._batch, self._starts, self._longest = batch, starts, max(lengths)
        return self._starts


def store(k: Tensor, v: Tensor, slot_mapping: Tensor, cache: KVCache, layer: int) -> None:
    """Write `k`, `v` `[T, Hkv, D]` to the cache's slots `slot_mapping` (int64 `[T]`)."""
    k_pages, v_pages = cache.k[layer], cache.v[layer]
    store_kernel[k.shape[0], k.shape[1]](
        k, v, k_pages, v_pages, *scales_of(cache, layer), slot_mapping,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        k_pages.stride(0), k_pages.stride(1), v_pages.stride(0), v_pages.stride(1),
        cache.page_size, k.shape[2], v.shape[2], _block(k.shape[2]), _block(v.shape[2]), cache.spec.int8,
        **options(k.device, len(k)),
    )  # fmt: skip


def scales_of(cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
    """The scales of K and V of a layer in int8, else anything: kernels do not read it."""
    return (cache.k_scales[layer], cache.v_scales[layer]) if cache.spec.int8 else (cache.k[layer], cache.v[layer])


def decode(
    q: Tensor, out: Tensor, page_table: Tensor, kv_lens: Tensor, cache: KVCache, layer: int,
    scale: float, window: int | None, softcap: float | None, sinks: Tensor | None = None,
    shared: SharedPages | None = None, tiles: Tiles | None = None,
) -> None:  # fmt: skip
    """One query token per row: `q` `[B, Hq, Dk]` to `out` `[B, Hq, Dv]`; `page_table` `[B, P]`, `kv_lens` `[B]`,
    `sinks` float32 `[Hq]`, which no part knows of: they come in where parts are joined.

    Pages that rows have in common as `shared` says are read once for each of its tiles.
    """
    tiles = tiles or decode_tiles(cache)
    rows, heads, dim_k = q.shape
    k_pages, v_pages = cache.k[layer], cache.v[layer]
    held = (k_pages, v_pages, *scales_of(cache, layer))
    kv_heads, dim_v = k_pages.shape[1], v_pages.shape[3]
    group, longest = heads // kv_heads, page_table.shape[1] * cache.page_size
    if not can_share(cache, group):
        shared = None
    parts, splits, more = num_parts(rows, kv_heads, longest, shared is not None)
    partial = torch.empty(rows, heads, parts, dim_v, dtype=torch.float32, device=q.device)
    sums = torch.empty(rows, heads, parts, dtype=torch.float32, device=q.device)
    # read where there is something shared only, as sinks are where there are some
    skipped, levels = (kv_lens, kv_lens) if shared is None else (shared.skipped, shared.levels)
    widths = (_block(dim_k), _block(dim_v))
    strides = (k_pages.stride(0), k_pages.stride(1), v_pages.stride(0), v_pages.stride(1), page_table.stride(0))
    turn = options(q.device, rows)
    decode_kernel[rows, kv_heads, splits](
        q, *held, partial, sums, page_table, kv_lens, skipped, scale, softcap or 1.0, splits, parts,
        q.stride(0), q.stride(1), *strides, cache.page_size, group, dim_k, dim_v,
        max(_MIN_GROUP, triton.next_power_of_2(group)), *widths, tiles.block_n, window or 0,
        softcap is not None, cache.spec.int8, shared is not None, num_warps=tiles.warps, num_stages=tiles.stages,
        **turn,
    )  # fmt: skip
    if shared is not None:
        together = shared_tiles(cache)
        shared_kernel[len(shared.tiles), kv_heads, more](
            q, *held, partial, sums, page_table, shared.tiles, scale, softcap or 1.0, splits, more, parts,
            q.stride(0), q.stride(1), *strides, cache.page_size, group, dim_k, dim_v, TILE_ROWS,
            max(_MIN_GROUP, triton.next_power_of_2(TILE_ROWS * group)), *widths, together.block_n,
            softcap is not None, cache.spec.int8, num_warps=together.warps, num_stages=together.stages, **turn,
        )  # fmt: skip
    combine_kernel[rows, heads](
        partial, sums, out, levels, kv_lens if sinks is None else sinks, splits, more, parts,
        out.stride(0), out.stride(1), dim_v, _block(dim_v), _block(parts), shared is not None, sinks is not None,
        **turn,
    )  # fmt: skip


def prefill(
    q: Tensor, out: Tensor, page_table: Tensor, kv_lens: Tensor, starts: Tensor, longest: int, cache: KVCache,
    layer: int, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None = None,
    tiles: Tiles | None = None,
) -> None:  # fmt: skip
    """The rows whose tokens in `q` `[T, Hq, Dk]` begin at `starts` (int64 `[rows + 1]`), the longest of them with
    `longest` tokens; `sinks` float32 `[Hq]`."""
    tiles = tiles or prefill_tiles(cache)
    dim_k = q.shape[2]
    k_pages, v_pages = cache.k[layer], cache.v[layer]
    kv_heads, dim_v = k_pages.shape[1], v_pages.shape[3]
    group = q.shape[1] // kv_heads
    prefill_kernel[triton.cdiv(longest * group, tiles.block_m), kv_heads, len(starts) - 1](
        q, k_pages, v_pages, *scales_of(cache, layer), out, page_table, kv_lens, starts,
        kv_lens if sinks is None else sinks, scale, softcap or 1.0,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        k_pages.stride(0), k_pages.stride(1), v_pages.stride(0), v_pages.stride(1), page_table.stride(0),
        cache.page_size, group, dim_k, dim_v, tiles.block_m, _block(dim_k), _block(dim_v), tiles.block_n,
        window or 0, softcap is not None, cache.spec.int8, sinks is not None, k_pages.stride() == v_pages.stride(),
        num_warps=tiles.warps, num_stages=tiles.stages,
        **options(q.device, len(q)),
    )  # fmt: skip


def prefill_tiles(cache: KVCache) -> Tiles:
    """How chunks are cut over such a cache."""
    width, roomy = _head_bytes(cache), is_roomy(cache.k[0].device)
    if width > 512 or (width > 256 and not roomy):
        return _PREFILL_WIDEST
    if width > 256 or not roomy:
        return _PREFILL_WIDE
    return _PREFILL_INT8 if cache.spec.int8 else _PREFILL


def decode_tiles(cache: KVCache) -> Tiles:
    """How decodes are."""
    width = _head_bytes(cache)
    if width > 512:
        return _DECODE_WIDEST
    return _DECODE_INT8 if cache.spec.int8 and width <= 256 else _DECODE


def can_share(cache: KVCache, group: int) -> bool:
    """Whether a program can hold a tile's queries, of `group` heads per KV head, in shared memory. Else rows are read
    one by one."""
    return int(triton.next_power_of_2(TILE_ROWS * group)) * _head_bytes(cache) <= _QUERY_BYTES


def shared_tiles(cache: KVCache) -> Tiles:
    """How pages are that rows have in common: a program has many queries, which take shared memory, too."""
    width = _head_bytes(cache)
    if width <= 256 or is_roomy(cache.k[0].device):
        return _SHARED
    return _SHARED_WIDE if width <= 512 else _SHARED_WIDEST


def _head_bytes(cache: KVCache) -> int:
    """Of a head as matrix products take it."""
    return _block(cache.head_dim) * cache.spec.dtype.itemsize


@lru_cache
def is_roomy(device: torch.device) -> bool:
    """Whether programs may take 160 KiB of shared memory: on the data centre's GPUs since the A100."""
    if device.type != "cuda":
        return True
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= _ROOMY


def num_splits(rows: int, kv_heads: int, longest: int) -> int:
    """Parts into which a decode's tokens are cut: enough programs for the whole GPU, none without a block to read.

    It depends on shapes only, never on lengths, as a captured step must fit all of them.
    """
    wanted = -(-_PROGRAMS // (rows * kv_heads))
    return max(1, min(wanted, _MAX_SPLITS, -(-longest // _BLOCK_N)))


def num_parts(rows: int, kv_heads: int, longest: int, shared: bool) -> tuple[int, int, int]:
    """Partial results of a row and head in all, its own, and those of each level of `shared` pages."""
    splits = num_splits(rows, kv_heads, longest)
    more = shared_splits(splits, rows, kv_heads, longest) if shared else 0
    return splits + SHARED_LEVELS * more, splits, more


def shared_splits(own: int, rows: int, kv_heads: int, longest: int) -> int:
    """Parts into which the tokens of a tile are cut, on each level, beside `own` parts of each row."""
    wanted = num_splits(triton.cdiv(rows, TILE_ROWS), kv_heads, longest)
    return min(wanted, (_MAX_PARTS - own) // SHARED_LEVELS)


def _block(dim: int) -> int:
    """At least the 16 of a matrix product: each size is one more kernel to compile."""
    return max(16, int(triton.next_power_of_2(dim)))
