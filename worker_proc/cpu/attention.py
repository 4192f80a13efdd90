"""The native attention (native/attention.h) as seen from Python: one object per step, one call per layer."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from worker_proc.attention.interface import ForwardBatch
from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.memory import HugePages
from worker_proc.kv_cache import KVCache, KVHeads

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
_ALIGNMENT = 64


class BatchStruct(ctypes.Structure):
    """`AttentionBatch` of native/attention.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_rows", "num_heads", "num_kv_heads", "k_dim", "v_dim", "page_size")),
        ("dtype", c_int32),
        ("kv_int8", c_int32),
        *((name, c_int64) for name in ("k_page_stride", "k_token_stride", "k_head_stride")),
        *((name, c_int64) for name in ("v_page_stride", "v_token_stride", "v_head_stride")),
        ("page_table", c_void_p),
        ("table_stride", c_int64),
        *((name, c_void_p) for name in ("q_starts", "kv_lens", "plan", "workspace")),
    )


class LayerStruct(ctypes.Structure):
    """`AttentionLayer` of native/attention.h."""

    _fields_ = (
        ("q", c_void_p),
        ("q_stride", c_int64),
        *((name, c_void_p) for name in ("k_pages", "v_pages", "out")),
        ("out_stride", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int32),
        ("reserved", c_int32),
        *((name, c_void_p) for name in ("k_scales", "v_scales", "sinks")),
    )


class NativeAttention:
    """Builds the steps of one model; keeps the memory that they have in common."""

    def __init__(self, library: NativeLibrary, *, share: bool = True) -> None:
        """With `share`, pages that several decode rows have in common are read once."""
        self._functions = library.functions
        self._share = share
        pointer = ctypes.POINTER
        for name, result, arguments in (
            ("rhizome_attention_plan", c_int64, (pointer(BatchStruct), c_void_p, c_int64, ctypes.c_int)),
            ("rhizome_attention_workspace", c_int64, (pointer(BatchStruct),)),
            ("rhizome_attention", None, (pointer(BatchStruct), pointer(LayerStruct))),
            (
                "rhizome_kv_write",
                None,
                (pointer(BatchStruct), c_int64, *(c_void_p, c_int64) * 2, *(c_void_p,) * 5),
            ),
        ):
            function = getattr(self._functions, name)
            function.restype, function.argtypes = result, arguments
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._last: dict[tuple[int, KVHeads], AttentionStep] = {}

    def step(self, batch: ForwardBatch, cache: KVCache, num_heads: int, layer: int = 0) -> "AttentionStep":
        """What all layers of `batch` with the heads of `layer` have in common, for `num_heads` query heads. Valid until
        the next step's."""
        kind = num_heads, cache.spec.layers[layer]
        step = self._last.get(kind)
        if step is None or not step.is_like(batch, cache):
            step = self._last[kind] = self._new_step(batch, cache, num_heads, layer)
        step.batch = batch
        step.kv_lens.copy_(batch.kv_lens)
        struct = step.struct
        most = int(self._functions.rhizome_attention_plan(struct, step.plan.data_ptr(), len(step.plan), self._share))
        if most > len(step.plan):
            step.plan = torch.empty(2 * most, dtype=torch.int32)  # contexts grow: not soon again
            self._functions.rhizome_attention_plan(struct, step.plan.data_ptr(), 2 * most, self._share)
        struct.plan = step.plan.data_ptr()
        needed = int(self._functions.rhizome_attention_workspace(struct)) + _ALIGNMENT
        if self._workspace.numel() < needed:
            self._workspace = HugePages(needed).take(needed, torch.uint8)
        step.workspace = self._workspace
        struct.workspace = -(-self._workspace.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        return step

    def _new_step(self, batch: ForwardBatch, cache: KVCache, num_heads: int, layer: int) -> "AttentionStep":
        """A step of rows like those of `batch`, with neither lengths nor a plan yet."""
        spec, heads = cache.spec, cache.spec.layers[layer]
        if spec.dtype not in DTYPES:
            raise ValueError(f"native attention computes in float32 or bfloat16, not {spec.dtype}")
        if num_heads % heads.num:
            raise ValueError(f"{num_heads} query heads are no multiple of {heads.num} KV heads")
        rows = len(batch.q_lens)
        starts = torch.tensor([0, *accumulate(batch.q_lens)], dtype=torch.int32)
        kv_lens = torch.empty(rows, dtype=torch.int32)
        table = batch.page_table.to(torch.int32).contiguous()
        struct = BatchStruct(
            num_rows=rows,
            num_heads=num_heads,
            num_kv_heads=heads.num,
            k_dim=heads.k_dim,
            v_dim=heads.v_dim,
            page_size=cache.page_size,
            dtype=DTYPES[spec.dtype],
            kv_int8=spec.int8,
            page_table=table.data_ptr(),
            table_stride=table.shape[1],
            q_starts=starts.data_ptr(),
            kv_lens=kv_lens.data_ptr(),
        )
        for name, pages in (("k", cache.k[layer]), ("v", cache.v[layer])):
            for stride, kind in zip(pages.stride(), ("page", "head", "token"), strict=False):
                setattr(struct, f"{name}_{kind}_stride", stride)
        return AttentionStep(self._functions, struct, batch, cache, kv_lens, (starts, table))


class AttentionStep:
    """One step. `struct` may be handed to other native functions as long as this object lives."""

    def __init__(
        self,
        functions: ctypes.CDLL,
        struct: BatchStruct,
        batch: ForwardBatch,
        cache: KVCache,
        kv_lens: Tensor,
        keep: tuple[Tensor, ...],
    ) -> None:
        self.struct = struct
        self.batch = batch
        self.kv_lens = kv_lens  # int32 [B]; like the others, memory that the struct points to
        self.plan = torch.empty(0, dtype=torch.int32)
        self.workspace = torch.empty(0, dtype=torch.uint8)
        self._functions = functions
        self._cache = cache
        self._keep = keep

    def is_like(self, batch: ForwardBatch, cache: KVCache) -> bool:
        """Whether the rows of `batch` are those of this step, but for their lengths: it has the very same page table,
        which nobody changes."""
        mine = self.batch
        same = mine.page_table is batch.page_table and mine.q_lens is batch.q_lens
        return same and cache is self._cache

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store `k` `[T, Hkv, Dk]` and `v` `[T, Hkv, Dv]` in the pages of a layer. Raises ValueError for another dtype
        than the cache's."""
        k, v = self._ready(k), self._ready(v)
        slots = self.batch.slot_mapping
        self._functions.rhizome_kv_write(
            self.struct, k.shape[0], k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), slots.data_ptr(),
            self._cache.k[layer].data_ptr(), self._cache.v[layer].data_ptr(), *self._scales(layer),
        )  # fmt: skip

    def attend(
        self,
        layer: int,
        q: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`q` `[T, Hq, Dk]` to `[T, Hq, Dv]`, see `AttentionBackend.forward`. Raises ValueError for another dtype than
        the cache's, for a scale or soft cap that is not positive, and for sinks of other heads."""
        if not scale > 0 or (softcap is not None and not softcap > 0):
            raise ValueError(f"attention: scale {scale} and softcap {softcap} must be positive")
        q = self._ready(q)
        if sinks is not None:
            if sinks.shape != (q.shape[1],):
                raise ValueError(f"attention: {q.shape[1]} query heads need as many sinks, not {list(sinks.shape)}")
            sinks = sinks.float().contiguous()
        k_scales, v_scales = self._scales(layer)
        out = q.new_empty(q.shape[0], q.shape[1], self.struct.v_dim)
        self._functions.rhizome_attention(
            self.struct,
            LayerStruct(
                q=q.data_ptr(),
                q_stride=q.stride(0),
                k_pages=self._cache.k[layer].data_ptr(),
                v_pages=self._cache.v[layer].data_ptr(),
                out=out.data_ptr(),
                out_stride=out.stride(0),
                scale=scale,
                softcap=softcap or 0.0,
                window=window or 0,
                k_scales=k_scales,
                v_scales=v_scales,
                sinks=sinks.data_ptr() if sinks is not None else None,
            ),
        )
        return out

    def _scales(self, layer: int) -> tuple[int | None, int | None]:
        cache = self._cache
        return (cache.k_scales[layer].data_ptr(), cache.v_scales[layer].data_ptr()) if cache.spec.int8 else (None, None)

    def _ready(self, x: Tensor) -> Tensor:
        """`x` `[T, H, D]` with the heads of a token one after another in memory; tokens may be anywhere."""
        if x.dtype != self._cache.spec.dtype:
            raise ValueError(f"attention: {x.dtype} given, but the cache holds {self._cache.spec.dtype}")
        return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
