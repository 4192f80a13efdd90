"""A stand-in for the package flashinfer: its two wrappers with the parameters of 0.6.13 that we use. They check what
they are given as the real ones do, and compute in plain torch."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class _Wrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "HND" and float_workspace_buffer.dtype == torch.uint8
        assert not float_workspace_buffer.any(), "must be zero at first"
        self.plans = 0

    def _plan(
        self, q_starts: list[int], indptr: Tensor, indices: Tensor, last_page_len: Tensor, shape: tuple[int, ...],
        window_left: int, logits_soft_cap: float | None, sm_scale: float | None, q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        self.plans += 1
        for tensor in (indptr, indices, last_page_len):
            assert tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous()
        assert indptr.device.type == last_page_len.device.type == "cpu", "the real one would copy them back, and wait"
        assert len(indptr) == len(last_page_len) + 1 == len(q_starts)
        assert int(indptr[0]) == 0 and int(indptr[-1]) == len(indices) and bool((indptr.diff() > 0).all())
        self.heads, self.kv_heads, self.dim, self.page_size = shape
        assert bool((last_page_len > 0).all()) and bool((last_page_len <= self.page_size).all())
        self.q_starts, self.indptr, self.indices, self.last = q_starts, indptr, indices, last_page_len
        self.window, self.cap, self.scale = window_left, logits_soft_cap, sm_scale
        self.dtypes = (q_data_type, kv_data_type)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        k_pages, v_pages = paged_kv_cache
        assert q.is_contiguous() and q.shape == out.shape == (self.q_starts[-1], self.heads, self.dim)
        assert (q.dtype, k_pages.dtype) == self.dtypes
        assert k_pages.shape[1:] == v_pages.shape[1:] == (self.kv_heads, self.page_size, self.dim)
        for row in range(len(self.last)):
            begin, end = self.q_starts[row : row + 2]
            pages = self.indices[int(self.indptr[row]) : int(self.indptr[row + 1])].long()
            length = (len(pages) - 1) * self.page_size + int(self.last[row])
            k, v = (held[pages].transpose(1, 2).flatten(0, 1)[:length] for held in (k_pages, v_pages))
            group = self.heads // self.kv_heads
            k, v = k.repeat_interleave(group, 1).float(), v.repeat_interleave(group, 1).float()
            scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k) * (self.scale or self.dim**-0.5)
            if self.cap:
                scores = self.cap * torch.tanh(scores / self.cap)
            asking = torch.arange(length - (end - begin), length)[:, None]
            seen = torch.arange(length) <= asking
            if self.window >= 0:
                seen &= torch.arange(length) >= asking - self.window
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        assert use_tensor_cores
        self.buffers: list[Tensor] = []
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None and paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            self.buffers = [paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer]
            assert all(buffer.dtype == torch.int32 for buffer in self.buffers)
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, window_left: int, logits_soft_cap: float | None, sm_scale: float | None,
        q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        rest: tuple[Any, ...] = (shape, window_left, logits_soft_cap, sm_scale, q_data_type, kv_data_type)
        self._plan(list(range(len(indptr))), indptr, indices, last_page_len, *rest)
        if self.buffers:  # what a captured run reads is in the buffers
            assert len(last_page_len) == len(self.buffers[2]), "the batch size is fixed in a graph"
            for buffer, tensor in zip(self.buffers, (indptr, indices, last_page_len), strict=True):
                buffer[: len(tensor)].copy_(tensor)
            self.indptr, self.indices, self.last = self.buffers


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, window_left: int,
        logits_soft_cap: float | None, sm_scale: float | None, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert causal and qo_indptr.dtype == torch.int32 and qo_indptr.device.type == "cpu"
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        rest: tuple[Any, ...] = (shape, window_left, logits_soft_cap, sm_scale, q_data_type, kv_data_type)
        self._plan(qo_indptr.tolist(), paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, *rest)


LIBRARY = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
)
