"""Attention in native code on the CPU: reads K and V in place, see worker_proc/cpu/native/attention.h."""

from torch import Tensor

from worker_proc.attention.interface import ForwardBatch
from worker_proc.cpu.attention import AttentionStep, NativeAttention
from worker_proc.cpu.library import NativeLibrary
from worker_proc.kv_cache import KVCache, KVHeads


class CpuAttention:
    """The `AttentionBackend` of the CPU, for float32 and bfloat16.

    A row's output does not depend on the other rows of its batch, to the last bit.
    """

    def __init__(self, library: NativeLibrary, *, share: bool = True) -> None:
        """With `share`, pages that several decode rows have in common are read once."""
        self._native = NativeAttention(library, share=share)
        self._batch: ForwardBatch | None = None
        self._steps: dict[tuple[int, KVHeads], AttentionStep] = {}  # of that batch

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
            self._batch, self._steps = batch, {}
        kind = q.shape[1], cache.spec.layers[layer]
        step = self._steps.get(kind)
        if step is None:
            step = self._steps[kind] = self._native.step(batch, cache, q.shape[1], layer)
        step.write(layer, k, v)
        return step.attend(layer, q, scale=scale, window=window, softcap=softcap, sinks=sinks)
