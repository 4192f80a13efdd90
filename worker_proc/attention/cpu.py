"""Attention in native code on the CPU: reads K and V in place, see worker_proc/cpu/native/attention.h."""

from torch import Tensor

from worker_proc.attention.interface import ForwardBatch
from worker_proc.cpu.attention import AttentionStep, NativeAttention
from worker_proc.cpu.library import NativeLibrary
from worker_proc.kv_cache import KVCache


class CpuAttention:
    """The `AttentionBackend` of the CPU, for float32 and bfloat16.

    A row's output does not depend on the other rows of its batch, to the last bit.
    """

    def __init__(self, library: NativeLibrary, *, share: bool = True) -> None:
        """With `share`, pages that several decode rows have in common are read once."""
        self._native = NativeAttention(library, share=share)
        self._step: AttentionStep | None = None

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
        step = self._step
        if step is None or step.batch is not batch or step.struct.num_heads != q.shape[1]:
            step = self._step = self._native.step(batch, cache, q.shape[1])
        step.write(layer, k, v)
        return step.attend(layer, q, scale=scale, window=window, softcap=softcap, sinks=sinks)
