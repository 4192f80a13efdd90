"""Attention through FlashInfer (Ye et al., MLSys 2025), where it is installed.

Its wrappers plan a step on the host from lengths alone and then run every layer. Plans are written through pinned
memory of the wrapper: whoever plans again waits for the copy of the plan before, which is done when the step before
begins. Written against flashinfer-python 0.6.13, whose pages of layout HND are those of `KVCache`.

Models with sinks are refused: for those FlashInfer has another wrapper (BatchAttentionWithAttentionSinkWrapper), which
has not been tried.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from worker_proc.attention.interface import ForwardBatch
from worker_proc.cuda.attention import store
from worker_proc.errors import ModelError
from worker_proc.kv_cache import KVCache

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
_WORKSPACE = 2**27  # bytes, as FlashInfer recommends
_LAYOUT = "HND"

_Limits = tuple[float, int | None, float | None]  # scale, window, soft cap


@dataclass(frozen=True, slots=True)
class PageIndex:
    """Where the pages of rows are. `indptr` int32 `[B + 1]` and `last_page_len` int32 `[B]` are on the host."""

    indptr: Tensor
    last_page_len: Tensor

    @classmethod
    def of(cls, kv_lens: list[int], page_size: int, *, pin: bool) -> "PageIndex":
        """For rows of `kv_lens` tokens, at least one each."""
        pages = [-(-length // page_size) for length in kv_lens]
        last = [(length - 1) % page_size + 1 for length in kv_lens]
        return cls(_host([0, *accumulate(pages)], pin), _host(last, pin))

    def indices(self, page_table: Tensor, kv_lens: Tensor, page_size: int) -> Tensor:
        """The pages row after row, int32 on the device, from `page_table` `[B, P]` and `kv_lens` `[B]` there. Nothing
        waits: how many there are is known on the host."""
        total = int(self.indptr[-1])
        pages = (kv_lens + (page_size - 1)) // page_size
        rows = torch.arange(len(pages), device=pages.device)
        row = torch.repeat_interleave(rows, pages, output_size=total)
        column = torch.arange(total, device=pages.device) - (pages.cumsum(0) - pages)[row]
        return page_table[row, column].to(torch.int32)


class _Wrapper:
    """A wrapper of FlashInfer that is planned again and again."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self._wrapper = wrapper
        self._device = device
        self._copied: torch.cuda.Event | None = None

    def plan(self, *args: Any, **kwargs: Any) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self._wrapper.plan(*args, **kwargs)
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self._device))

    def run(self, q: Tensor, cache: KVCache, layer: int, out: Tensor) -> None:
        self._wrapper.run(q, (cache.k[layer], cache.v[layer]), out=out)


@dataclass(slots=True)
class _Bound:
    """A captured step: one wrapper for every kind of layer."""

    batch: ForwardBatch
    kv_lens: list[int]
    wrappers: dict[_Limits, tuple[_Wrapper, int]] = field(default_factory=dict)  # with query heads


class FlashInferAttention:
    """Implements `CudaAttention` for `DTYPES` and heads of `HEAD_DIMS`, keys as wide as values, without sinks."""

    shares_pages = False

    def __init__(self, library: Any, device: torch.device | str) -> None:
        """`library` is the module `flashinfer`."""
        self._library = library
        self._device = torch.device(device)
        self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=self._device)
        self._batch: ForwardBatch | None = None
        self._wrappers: dict[tuple[str, _Limits], _Wrapper] = {}
        self._planned: set[tuple[str, _Limits]] = set()  # for `_batch`
        self._bound: dict[int, _Bound] = {}

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
        """See `AttentionBackend.forward`. Raises ModelError if there are sinks."""
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
        """See `CudaAttention.attend`. Raises ModelError if there are sinks."""
        if sinks is not None:
            raise ModelError("sinks", list(sinks.shape), "not computed through FlashInfer: take gpu-attention triton")
        q, limits = q.contiguous(), (scale, window, softcap)
        out = torch.empty_like(q) if out is None else out
        bound = self._bound.get(id(batch))
        if bound is not None:
            if limits not in bound.wrappers:  # the run before the capture
                bound.wrappers[limits] = (self._graph_wrapper(bound.batch), q.shape[1])
                self._plan_bound(bound, limits, cache)
            bound.wrappers[limits][0].run(q, cache, layer, out)
            return out
        if batch is not self._batch:
            self._batch, self._planned = batch, set()
        first = batch.num_prefill_rows
        tokens = sum(batch.q_lens[:first])
        if first:
            plan = self._plan_prefill(batch, cache, limits, q.shape[1])
            plan.run(q[:tokens], cache, layer, out[:tokens])
        if tokens < len(q):
            plan = self._plan_decode(batch, cache, limits, q.shape[1])
            plan.run(q[tokens:], cache, layer, out[tokens:])
        return out

    def bind(self, batch: ForwardBatch) -> None:
        """See `CudaAttention`. FlashInfer's launches depend on the number of rows alone when it is told of a graph."""
        self._bound[id(batch)] = _Bound(batch, [1] * len(batch.q_lens))

    def replan(self, batch: ForwardBatch, cache: KVCache, kv_lens: list[int]) -> None:
        """See `CudaAttention`."""
        bound = self._bound[id(batch)]
        bound.kv_lens = kv_lens
        for limits in bound.wrappers:
            self._plan_bound(bound, limits, cache)

    def _graph_wrapper(self, batch: ForwardBatch) -> _Wrapper:
        rows, columns = batch.page_table.shape

        def buffer(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self._device)

        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            _LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffer(rows + 1),
            paged_kv_indices_buffer=buffer(rows * columns),
            paged_kv_last_page_len_buffer=buffer(rows),
        )
        return _Wrapper(wrapper, self._device)

    def _plan_bound(self, bound: _Bound, limits: _Limits, cache: KVCache) -> None:
        wrapper, heads = bound.wrappers[limits]
        self._decode(wrapper, bound.kv_lens, bound.batch.page_table, bound.batch.kv_lens, cache, limits, heads)

    def _plan_decode(self, batch: ForwardBatch, cache: KVCache, limits: _Limits, heads: int) -> _Wrapper:
        kind, first = ("decode", limits), batch.num_prefill_rows

        def make() -> Any:
            # the same kernel as for prefill: decodes of many heads need the matrix units, and it is compiled anyway
            return self._library.BatchDecodeWithPagedKVCacheWrapper(self._workspace, _LAYOUT, use_tensor_cores=True)

        wrapper = self._wrapper(kind, make)
        if kind not in self._planned:
            lengths = batch.kv_lens_host[first:]
            self._decode(wrapper, lengths, batch.page_table[first:], batch.kv_lens[first:], cache, limits, heads)
            self._planned.add(kind)
        return wrapper

    def _decode(
        self, wrapper: _Wrapper, lengths: list[int], table: Tensor, kv_lens: Tensor, cache: KVCache, limits: _Limits,
        heads: int,
    ) -> None:  # fmt: skip
        index = PageIndex.of(lengths, cache.page_size, pin=self._device.type == "cuda")
        indices = index.indices(table, kv_lens, cache.page_size)
        spec = cache.spec
        wrapper.plan(
            index.indptr, indices, index.last_page_len, heads, spec.num_kv_heads, spec.k_head_dim, cache.page_size,
            q_data_type=spec.dtype, kv_data_type=spec.dtype, **_options(limits),
        )  # fmt: skip

    def _plan_prefill(self, batch: ForwardBatch, cache: KVCache, limits: _Limits, heads: int) -> _Wrapper:
        kind, first = ("prefill", limits), batch.num_prefill_rows
        wrapper = self._wrapper(
            kind, lambda: self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, _LAYOUT)
        )
        if kind not in self._planned:
            pin, size = self._device.type == "cuda", cache.page_size
            index = PageIndex.of(batch.kv_lens_host[:first], size, pin=pin)
            indices = index.indices(batch.page_table[:first], batch.kv_lens[:first], size)
            starts = _host([0, *accumulate(batch.q_lens[:first])], pin)
            spec = cache.spec
            wrapper.plan(
                starts, index.indptr, indices, index.last_page_len, heads, spec.num_kv_heads, spec.k_head_dim, size,
                causal=True, q_data_type=spec.dtype, kv_data_type=spec.dtype, **_options(limits),
            )  # fmt: skip
            self._planned.add(kind)
        return wrapper

    def _wrapper(self, kind: tuple[str, _Limits], make: Callable[[], Any]) -> _Wrapper:
        if kind not in self._wrappers:
            self._wrappers[kind] = _Wrapper(make(), self._device)
        return self._wrappers[kind]


def _options(limits: _Limits) -> dict[str, Any]:
    scale, window, softcap = limits
    # a window of w tokens holds the query's own one, and w - 1 to its left
    return {"sm_scale": scale, "window_left": -1 if window is None else window - 1, "logits_soft_cap": softcap}


def _host(values: list[int], pin: bool) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, pin_memory=pin)
