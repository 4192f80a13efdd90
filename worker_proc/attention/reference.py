"""Attention in plain PyTorch: the definition of right for every other backend, and still batched."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.attention.interface import ForwardBatch
from worker_proc.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class _Keys:
    """Which cached tokens a group of rows reads: slots `[R, L]`, and which of them a query may see.

    Columns are aligned to the right, so that the last one is each row's newest token. Columns before a row's first
    token repeat the row's own first slot and are masked: a row never reads memory of another one, where a stale NaN
    would spread through 0 * NaN.
    """

    slots: Tensor
    mask: Tensor | None  # bool, broadcastable to [R, Hkv, queries, L]; None when everything is visible


@dataclass(frozen=True, slots=True)
class _Scores:
    """What becomes of products of queries and keys before and in the softmax."""

    scale: float
    softcap: float | None  # Gemma 2
    sinks: Tensor | None  # gpt-oss

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


class ReferenceAttention:
    """Grouped-query attention with optional sliding window, soft cap and sinks, softmax in float32.

    Decode rows are one batched computation; prefill rows are computed one by one. Index tensors are the same for all
    layers of a step with the same window, so they are kept until another batch arrives.
    """

    def __init__(self) -> None:
        self._batch: ForwardBatch | None = None
        self._decode: dict[int | None, _Keys] = {}
        self._prefill: dict[tuple[int, int | None], _Keys] = {}

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
        if batch is not self._batch:
            self._batch, self._decode, self._prefill = batch, {}, {}
        cache.write(layer, k, v, batch.slot_mapping)
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        how = _Scores(scale, softcap, sinks)
        start = 0
        for row in range(batch.num_prefill_rows):
            stop = start + batch.q_lens[row]
            kv_len = batch.kv_lens_host[row]
            queries = q[start:stop].transpose(0, 1)[None]
            if kv_len == batch.q_lens[row] and (window is None or window >= kv_len) and not cache.spec.int8:
                # A whole prompt in one chunk: its keys are at hand, and the plain causal kernel needs no mask.
                now = slice(start, stop)
                result = _causal(queries, k[now].transpose(0, 1)[None], v[now].transpose(0, 1)[None], how)
            else:
                if (row, window) not in self._prefill:
                    self._prefill[row, window] = _prefill_keys(batch, row, cache.page_size, window)
                keys = self._prefill[row, window]
                result = _attend(queries, *_read(cache, layer, keys), keys.mask, how)
            out[start:stop] = result[0].transpose(0, 1)
            start = stop
        if batch.num_prefill_rows < len(batch.q_lens):
            if window not in self._decode:
                self._decode[window] = _decode_keys(batch, cache.page_size, window)
            keys = self._decode[window]
            # The query heads of one KV head stand in for several query tokens: K and V need not be repeated.
            queries = q[start:].view(len(batch.q_lens) - batch.num_prefill_rows, k.shape[1], -1, q.shape[2])
            result = _attend(queries, *_read(cache, layer, keys), keys.mask, how, tokens=False)
            out[start:] = result.flatten(1, 2)
        return out


def _read(cache: KVCache, layer: int, keys: _Keys) -> tuple[Tensor, Tensor]:
    """K and V of `keys` as `[R, Hkv, L, D]`."""
    k, v = cache.read(layer, keys.slots.view(-1))
    rows, width = keys.slots.shape
    return k.view(rows, width, *k.shape[1:]).transpose(1, 2), v.view(rows, width, *v.shape[1:]).transpose(1, 2)


def _decode_keys(batch: ForwardBatch, page_size: int, window: int | None) -> _Keys:
    first = batch.num_prefill_rows
    longest = max(batch.kv_lens_host[first:])
    width = min(longest, window) if window is not None else longest
    kv_lens = batch.kv_lens[first:, None]
    positions = kv_lens - width + torch.arange(width, device=kv_lens.device)
    table = batch.page_table[first:]
    clamped = positions.clamp_min(0)
    slots = table.gather(1, clamped // page_size) * page_size + clamped % page_size
    full = min(batch.kv_lens_host[first:]) >= width
    return _Keys(slots, None if full else (positions >= 0)[:, None, None])


def _prefill_keys(batch: ForwardBatch, row: int, page_size: int, window: int | None) -> _Keys:
    queries, kv_len = batch.q_lens[row], batch.kv_lens_host[row]
    first_query = kv_len - queries
    first_key = max(0, first_query - window + 1) if window is not None else 0
    device = batch.page_table.device
    positions = torch.arange(first_key, kv_len, device=device)
    slots = batch.page_table[row].index_select(0, positions // page_size) * page_size + positions % page_size
    asking = torch.arange(first_query, kv_len, device=device)[:, None]
    mask = positions <= asking
    if window is not None:
        mask &= positions > asking - window
    return _Keys(slots[None], mask)


def _causal(q: Tensor, k: Tensor, v: Tensor, how: _Scores) -> Tensor:
    """As `_attend` for queries and keys of the same N tokens, each query seeing the keys up to its own."""
    if how.plain:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=how.scale, enable_gqa=grouped)
    tokens = torch.arange(q.shape[2], device=q.device)
    return _attend(q, k, v, tokens <= tokens[:, None], how)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: _Scores, *, tokens: bool = True) -> Tensor:
    """`q` `[R, H, N, Dk]`, `k` `[R, Hkv, L, Dk]`, `v` `[R, Hkv, L, Dv]` to `[R, H, N, Dv]`: queries of N `tokens` and
    all heads, or of one token, with the N heads of a KV head in their place."""
    if how.plain:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=how.scale, enable_gqa=grouped)
    rows, heads, queries, dim = q.shape
    kv_heads = k.shape[1]
    grouped_queries = q.float().reshape(rows, kv_heads, heads // kv_heads * queries, dim)
    scores = torch.matmul(grouped_queries, k.float().transpose(2, 3)).mul_(how.scale).view(rows, heads, queries, -1)
    if how.softcap is not None:
        scores.div_(how.softcap).tanh_().mul_(how.softcap)
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    if how.sinks is not None:
        sinks = how.sinks.view(1, heads, 1, 1) if tokens else how.sinks.view(1, heads, queries, 1)
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(rows, heads, queries, 1)), dim=3)
    weights = scores.softmax(-1)[..., : k.shape[2]].reshape(rows, kv_heads, heads // kv_heads * queries, -1)
    return torch.matmul(weights, v.float()).view(rows, heads, queries, -1).to(q.dtype)
