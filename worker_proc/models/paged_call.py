"""Our paged attention, as transformers calls it in the place of its own.

Models differ in what they hand to it. What it cannot honour is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers
from torch import Tensor, nn

from worker_proc.attention.interface import AttentionBackend, ForwardBatch
from worker_proc.errors import ModelError
from worker_proc.kv_cache import KVCache, KVHeads
from worker_proc.models.query_temperature import tempered

hf: Any = transformers  # its annotations vary between the versions that are supported

ATTENTION_NAME = "rhizome_paged"

# Keyword arguments that models pass along to attention and that do not change its result.
_HARMLESS = {"position_ids", "position_embeddings", "cache_position", "use_cache", "return_dict"}


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asked of attention."""

    layer: int
    heads: KVHeads
    window: int | None
    key: Tensor  # whose identity tells layers that read what another one has made


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """Travels from `TransformersModel.forward` through the model to `paged_attention`.

    Without a cache nothing is computed, and calls are only noted down. `places` are the layers' in the cache; those
    in `chunked` see `chunks`, which is `batch` as `in_chunks` gives it.
    """

    batch: ForwardBatch | None
    cache: KVCache | None
    attention: AttentionBackend
    places: Mapping[int, int] = field(default_factory=dict)
    calls: list[AttentionCall] = field(default_factory=list)
    chunked: frozenset[int] = frozenset()
    chunks: ForwardBatch | None = None


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    rhizome_step: PagedStep | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers. `query` `[1, Hq, T, Dk]`, `key` and `value` `[1, Hkv, T, D]` to
    `[1, T, Hq, Dv]`. Raises ModelError naming an argument that it cannot honour."""
    who = type(module).__name__
    if rhizome_step is None:
        raise ModelError("attention", who, "the model does not pass keyword arguments through to its attention")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelError("layer_idx", layer, f"{who} does not know its layer")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    unsupported = {**others, "attention_mask": attention_mask, "dropout": dropout, "is_causal": not causal}
    for name, given in unsupported.items():
        if name not in _HARMLESS and not _is_neutral(given):
            shown = list(given.shape) if isinstance(given, Tensor) else given
            raise ModelError(name, shown, f"{who} asks for something that paged attention does not do")
    batch = rhizome_step.chunks if layer in rhizome_step.chunked else rhizome_step.batch
    if batch is None or rhizome_step.cache is None:
        heads = KVHeads(key.shape[1], key.shape[3], value.shape[3])
        rhizome_step.calls.append(AttentionCall(layer, heads, sliding_window, key))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    query = tempered(module, query, batch.positions)
    out = rhizome_step.attention.forward(
        rhizome_step.places[layer],
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        batch,
        rhizome_step.cache,
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux.float() if s_aux is not None else None,
    )
    return out[None], None


hf.AttentionInterface.register(ATTENTION_NAME, paged_attention)


def _is_neutral(value: object) -> bool:
    """None, False and 0 ask for nothing."""
    return value is None or (isinstance(value, bool | int | float) and not value)
