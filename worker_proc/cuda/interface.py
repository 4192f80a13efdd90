"""What the GPU's decoder asks of attention beside `AttentionBackend`."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from worker_proc.attention.interface import AttentionBackend, ForwardBatch
from worker_proc.kv_cache import KVCache


@runtime_checkable
class CudaAttention(AttentionBackend, Protocol):
    """Attention whose keys and values another kernel has written, and that a CUDA graph can hold."""

    @property
    def shares_pages(self) -> bool:
        """Whether it makes use of `ForwardBatch.shared`."""
        ...

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
        """`forward` for keys and values that are in the cache already; the result is `out` `[T, Hq, Dv]` where that is
        given."""
        ...

    def bind(self, batch: ForwardBatch) -> None:
        """A step of `batch`, decodes alone, is about to be captured: its tensors stay where they are from replay to
        replay, and their numbers change."""
        ...

    def replan(self, batch: ForwardBatch, cache: KVCache, kv_lens: list[int]) -> None:
        """The tensors of a bound `batch` have got their numbers for the next replay; `kv_lens` are those of its rows,
        on the host."""
        ...
