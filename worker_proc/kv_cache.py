"""The paged K/V tensors of one rank. Which page belongs to whom is the scheduler's business, not decided here."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from worker_proc.cpu.memory import make_tensors
from worker_proc.errors import ModelError
from worker_proc.quantization.kv import dequantize_heads, quantize_heads
from worker_proc.recurrent import RecurrentStates, StateSpec
from worker_proc.staging import Staging


class KVHeads(NamedTuple):
    """The heads of one layer's keys and values, local to the rank."""

    num: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one token costs in the cache of one rank, and what recurrent layers keep of each sequence."""

    layers: tuple[KVHeads, ...]
    dtype: torch.dtype  # in which attention computes
    int8: bool = False  # held as one byte a number and one float32 scale per token and head
    states: tuple[StateSpec, ...] = ()
    chunk: int | None = None  # tokens after which attention of some layers begins anew (Llama 4)

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        num_kv_heads: int,
        k_head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        int8: bool = False,
    ) -> "KVSpec":
        """Of layers that are all alike, as those of most models are."""
        return cls((KVHeads(num_kv_heads, k_head_dim, v_head_dim),) * num_layers, dtype, int8)

    @property
    def num_layers(self) -> int:
        """Layers that hold keys and values."""
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        """Of the layer that has most; 0 in models without attention."""
        return max((heads.num for heads in self.layers), default=0)

    @property
    def k_head_dim(self) -> int:
        """Of the layer with the widest."""
        return max((heads.k_dim for heads in self.layers), default=0)

    @property
    def v_head_dim(self) -> int:
        """Of the layer with the widest."""
        return max((heads.v_dim for heads in self.layers), default=0)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers, on one rank."""
        size, scales = (1, 2 * torch.float32.itemsize) if self.int8 else (self.dtype.itemsize, 0)
        return sum(heads.num * ((heads.k_dim + heads.v_dim) * size + scales) for heads in self.layers)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of all that recurrent layers keep of one sequence, on one rank."""
        return sum(state.nbytes for state in self.states)


class KVCache:
    """K and V of every layer, `[num_pages + 1, num_kv_heads, page_size, head_dim]` each, in pages as in vLLM's
    PagedAttention (Kwon et al., 2023). What attention reads for one KV head is contiguous within a page. Heads
    may differ between layers (Gemma 4); a page is the same tokens in all of them.

    Pages `0 .. num_pages - 1` belong to the block pool. Page `num_pages` (`scratch_page`) takes the writes of padding
    tokens and is never read for a result. A slot is `page * page_size + offset`.

    In int8, `k_scales` and `v_scales` of a layer are `[num_pages + 1, num_kv_heads, page_size]`, else there are none.

    `states` are those of recurrent layers, of `slots` sequences and `snapshots` more; None in models without.

    Raises ModelError for pages that would lie across chunks of attention.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_pages: int,
        page_size: int,
        device: torch.device | str = "cpu",
        *,
        slots: int = 0,
        snapshots: int = 0,
    ) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages = {num_pages}: at least one page is needed")
        if page_size < 1:
            raise ValueError(f"page_size = {page_size}: a page holds at least one token")
        if spec.chunk is not None and spec.chunk % page_size:
            raise ModelError("attention_chunk_size", spec.chunk, f"must be a multiple of the page size ({page_size})")
        self.spec = spec
        self.num_pages = num_pages
        self.page_size = page_size
        self.scratch_page = num_pages
        self.device = torch.device(device)
        self.head_dim = max(spec.k_head_dim, spec.v_head_dim)  # the widest of all layers
        k_shapes = [(num_pages + 1, heads.num, page_size, heads.k_dim) for heads in spec.layers]
        v_shapes = [(num_pages + 1, heads.num, page_size, heads.v_dim) for heads in spec.layers]
        dtype = torch.int8 if spec.int8 else spec.dtype
        pages = make_tensors([(shape, dtype) for shape in k_shapes + v_shapes], torch.device(device))
        self.k, self.v = pages[: spec.num_layers], pages[spec.num_layers :]
        scaled = k_shapes if spec.int8 else []
        self.k_scales = [torch.empty(shape[:3], dtype=torch.float32, device=device) for shape in scaled]
        self.v_scales = [torch.empty(shape[:3], dtype=torch.float32, device=device) for shape in scaled]
        self.states = RecurrentStates(spec.states, slots, snapshots, device) if spec.states else None

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
