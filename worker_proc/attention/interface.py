"""What one step of the model looks like to attention."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker_proc.kv_cache import KVCache
from worker_proc.recurrent import StateRows

TILE_ROWS = 16  # decode rows that attend to pages together, at most
TILE_COLUMNS = 4 + TILE_ROWS
SHARED_LEVELS = 3  # tiles that a row is in, at most


@dataclass(frozen=True, slots=True, eq=False)
class SharedPages:
    """Pages that decode rows of a batch have in common at their beginnings. Rows are counted from the first decode."""

    skipped: Tensor  # int64 [decode rows]; tokens of the row that are in tiles, whole pages
    levels: Tensor  # int64 [decode rows]; tiles that the row is in: one on each level from 0 on
    # int64 [T, TILE_COLUMNS]; the row whose pages are read, from which token on, up to which one (idle: the same), the
    # level, and the rows that read them (-1: none)
    tiles: Tensor


class LayerLoads(Protocol):
    """Pages that come from the host while the step is computed, layer by layer."""

    def before(self, layer: int) -> None:
        """What the device computes from now on sees all of these pages in layers up to `layer`, and may write to those.
        The host does not wait."""
        ...


# eq=False: batches are compared by identity (comparing tensors element by element is never what is meant)
@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """One step of B rows (requests) and T tokens, flattened row after row.

    The first `num_prefill_rows` rows are prefill chunks, the others decode one token each.
    """

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]; page * page_size + offset, where each token's K/V is written
    page_table: Tensor  # int64 [B, P]; padded with page 0
    kv_lens: Tensor  # int64 [B]; tokens of the row in the cache after this step's writes
    q_lens: list[int]  # tokens of each row in this step (1 for decode rows)
    kv_lens_host: list[int]  # the values of kv_lens
    num_prefill_rows: int
    logit_rows: Tensor  # int64 [S]; indices into T whose hidden state gets logits
    chunk_starts: Tensor | None = None  # int64 [num_prefill_rows + 1]; where each chunk begins in T, None if unknown
    shared: SharedPages | None = None  # a backend may read those pages once for several rows, or leave that alone
    loads: LayerLoads | None = None  # only for models that call `before` with each layer before they touch its pages
    states: StateRows | None = None  # of models with recurrent layers; None: nobody reads what they keep
    filters: Tensor | None = None  # float64 [4, S], host: `Sampler.filters` of logit_rows, whose logits may be minus
    # infinity where no such draw keeps them; None: all are wanted


class AttentionBackend(Protocol):
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
        """Write `k` `[T, Hkv, Dk]` and `v` `[T, Hkv, Dv]` to the cache, then let `q` `[T, Hq, Dk]` attend causally to
        its own row; returns `[T, Hq, Dv]`. Query head h reads KV head `h // (Hq // Hkv)`.

        `window` w: a query at position p sees keys at positions > p - w. `softcap` c: scores become c * tanh(s / c).
        `sinks` float32 `[Hq]`: one more score of every query, which takes part in the softmax and has no value.
        """
        ...
