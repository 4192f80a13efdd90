"""The paged K/V tensors of one rank. Which page belongs to whom is the scheduler's business, not decided here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_proc.cpu.memory import HugePages
from worker_proc.quantization.kv import dequantize_heads, quantize_heads
from worker_proc.staging import Staging


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one token costs in the cache of one rank."""

    num_layers: int
    num_kv_heads: int  # local to the rank
    k_head_dim: int
    v_head_dim: int
    dtype: torch.dtype  # in which attention computes
    int8: bool = False  # held as one byte a number and one float32 scale per token and head

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers, on one rank."""
        if self.int8:
            head = self.k_head_dim + self.v_head_dim + 2 * torch.float32.itemsize
        else:
            head = (self.k_head_dim + self.v_head_dim) * self.dtype.itemsize
        return self.num_layers * self.num_kv_heads * head


class KVCache:
    """K and V of every layer, `[num_pages + 1, num_kv_heads, page_size, head_dim]` each, in pages as in vLLM's
    PagedAttention (Kwon et al., 2023). What attention reads for one KV head is contiguous within a page.

    Pages `0 .. num_pages - 1` belong to the block pool. Page `num_pages` (`scratch_page`) takes the writes of padding
    tokens and is never read for a result. A slot is `page * page_size + offset`.

    In int8, `k_scales` and `v_scales` of a layer are `[num_pages + 1, num_kv_heads, page_size]`, else there are none.
    """

    def __init__(self, spec: KVSpec, num_pages: int, page_size: int, device: torch.device | str = "cpu") -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages = {num_pages}: at least one page is needed")
        if page_size < 1:
            raise ValueError(f"page_size = {page_size}: a page holds at least one token")
        self.spec = spec
        self.num_pages = num_pages
        self.page_size = page_size
        self.scratch_page = num_pages
        k_shape = (num_pages + 1, spec.num_kv_heads, page_size, spec.k_head_dim)
        v_shape = (num_pages + 1, spec.num_kv_heads, page_size, spec.v_head_dim)
        # The system hands out memory only when a page is first written: nothing is zeroed here.
        dtype, layers = torch.int8 if spec.int8 else spec.dtype, range(spec.num_layers)
        pages = _pages([k_shape] * spec.num_layers + [v_shape] * spec.num_layers, dtype, torch.device(device))
        self.k, self.v = pages[: spec.num_layers], pages[spec.num_layers :]
        scaled = layers if spec.int8 else ()
        self.k_scales = [torch.empty(k_shape[:3], dtype=torch.float32, device=device) for _ in scaled]
        self.v_scales = [torch.empty(v_shape[:3], dtype=torch.float32, device=device) for _ in scaled]

    @property
    def page_tensors(self) -> list[Tensor]:
        """All that a page consists of: tensors whose first dimension is the page."""
        return [*self.k, *self.v, *self.k_scales, *self.v_scales]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return sum(pages[0].nbytes for pages in self.page_tensors)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of a layer at `slots` (int64 `[N]`), as `[N, num_kv_heads, head_dim]`, in the dtype of `spec`."""
        pages, offsets = slots // self.page_size, slots % self.page_size
        k, v = self.k[layer][pages, :, offsets], self.v[layer][pages, :, offsets]
        if self.spec.int8:
            k = dequantize_heads(k, self.k_scales[layer][pages, :, offsets], self.spec.dtype)
            v = dequantize_heads(v, self.v_scales[layer][pages, :, offsets], self.spec.dtype)
        return k, v

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store `k`, `v` `[T, num_kv_heads, head_dim]` at `slot_mapping` (int64 `[T]`)."""
        pages, offsets = slot_mapping // self.page_size, slot_mapping % self.page_size
        if self.spec.int8:
            k, self.k_scales[layer][pages, :, offsets] = quantize_heads(k)
            v, self.v_scales[layer][pages, :, offsets] = quantize_heads(v)
        self.k[layer][pages, :, offsets] = k
        self.v[layer][pages, :, offsets] = v

    def stage_copies(self, src: list[int], dst: list[int], staging: Staging) -> None:
        """Copy page `src[i]` to page `dst[i]` in every layer (copy-on-write) when `staging` is sent. All sources are
        read before any write.

        Raises ValueError at once if the lists differ in length, a page is outside the pool or a destination repeats.
        """
        if len(src) != len(dst):
            raise ValueError(f"copies: {len(src)} sources but {len(dst)} destinations")
        if not src:
            return
        if min(*src, *dst) < 0 or max(*src, *dst) >= self.num_pages:
            raise ValueError(f"copies: a page is outside 0..{self.num_pages - 1}")
        if len(set(dst)) != len(dst):
            raise ValueError("copies: a destination page repeats")
        both = staging.put(torch.tensor([src, dst], dtype=torch.int64))

        def copy() -> None:
            source, target = both.tensor
            for pages in self.page_tensors:
                pages.index_copy_(0, target, pages.index_select(0, source))

        staging.then(copy)


def _pages(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Memory that holds anything. On a CPU in huge pages: each step reads many scattered pages of the cache. All of it
    is one block, as a block for each tensor would waste up to a huge page of each."""
    if device.type != "cpu":
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    counts = [math.prod(shape) for shape in shapes]
    memory = HugePages(sum(HugePages.room(count * dtype.itemsize) for count in counts))
    return [memory.take(count, dtype).view(shape) for count, shape in zip(counts, shapes, strict=True)]
