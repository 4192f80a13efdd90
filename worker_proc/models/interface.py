"""What the rest of the worker sees of a model, whichever backend computes it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:  # ModelInfo must stay readable without torch
    from torch import Tensor

    from worker_proc.attention.interface import ForwardBatch
    from worker_proc.kv_cache import KVCache, KVSpec


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What config files say about a checkpoint."""

    architecture: str  # e.g. "LlamaForCausalLM"
    model_type: str
    backend: Literal["native", "transformers"]
    vocab_size: int
    context_length: int  # tokens
    eos_token_ids: tuple[int, ...]
    parameter_bytes: int  # of the stored tensors, over all ranks
    dtype: str  # "float32", "bfloat16" or "float16": what most of the bytes of plain tensors are
    quantization: str | None = None  # the method of a checkpoint that holds codes


class LanguageModel(Protocol):
    @property
    def kv_spec(self) -> "KVSpec":
        """What the KV cache of this rank must hold."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def forward(self, batch: "ForwardBatch", cache: "KVCache") -> "Tensor":
        """Logits of the tokens `batch.logit_rows`: float32 `[S, vocab_size]` on rank 0, `[0, vocab_size]` elsewhere.

        Every rank must be given the same batch (its own page table included), as all take part in the collectives.
        """
        ...


@runtime_checkable
class GreedyModel(LanguageModel, Protocol):
    """A model that finds the likeliest tokens faster than by their logits."""

    def greedy(self, batch: "ForwardBatch", cache: "KVCache") -> "Tensor":
        """The likeliest next tokens of `batch.logit_rows`: int64 `[S]` on rank 0, `[0]` elsewhere. Each is the smallest
        index of the largest number in the row that `forward` gives."""
        ...
