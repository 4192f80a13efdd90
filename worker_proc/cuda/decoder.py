"""The native decoder on a GPU: cuBLAS for products of many rows, Triton for others and for what stands between them."""

import torch
from torch import Tensor

from worker_proc.attention.interface import ForwardBatch
from worker_proc.cuda.attention import TritonAttention
from worker_proc.cuda.interface import CudaAttention
from worker_proc.cuda.layers import Rotation, add_rms_norm, multiply, multiply_gated, rope_store
from worker_proc.kv_cache import KVCache, KVSpec
from worker_proc.models.decoder_weights import DecoderWeights
from worker_proc.models.layers import RMSNorm, look_up
from worker_proc.models.rope import inverse_frequencies
from worker_proc.models.shard import Shard
from worker_proc.models.spec import DecoderSpec
from worker_proc.parallel import TensorParallel


def supports(spec: DecoderSpec) -> bool:
    """Whether `CudaDecoder` computes this model: the Llama family, and what differs from it in names only."""
    gated = spec.gated_mlp and spec.activation in ("silu", "swish")
    return spec.norm == "rms" and gated and spec.is_plain


class CudaDecoder:
    """One rank's share of a model. Implements `LanguageModel` and, with `greedy`, `GreedyModel`.

    Pages of `ForwardBatch.loads` may come while a step is computed, up to the layer that it has reached.
    `step` is free of everything that a CUDA graph cannot capture, for batches of decodes; what is before and after
    attention (`enter`, `leave`) for all.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        shard: Shard,
        weights: DecoderWeights,
        tp: TensorParallel,
        attention: CudaAttention | None = None,
    ) -> None:
        """`spec` must be one that `supports` accepts. `attention` is Triton's if none is given."""
        self.spec = spec
        self.shard = shard
        self.weights = weights
        self.tp = tp
        self.attention = attention if attention is not None else TritonAttention()
        self._heads = shard.heads[1] - shard.heads[0]
        self._kv_heads = shard.kv_heads[1] - shard.kv_heads[0]
        device = weights.norm.weight.device
        rope = spec.ropes[0]
        assert rope is not None  # as `supports` has made sure
        self._rotation = Rotation(inverse_frequencies(rope).to(device), rope.attention_factor)

    @property
    def kv_spec(self) -> KVSpec:
        """See `LanguageModel`."""
        dim = self.spec.head_dim
        return KVSpec.uniform(self.spec.num_layers, self._kv_heads, dim, dim, self.weights.norm.weight.dtype)

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, without padding."""
        return self.spec.vocab_size

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """See `LanguageModel`."""
        return self.step(batch, cache).float()

    @torch.inference_mode()
    def greedy(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """See `GreedyModel`."""
        return self.step(batch, cache).argmax(-1)

    def step(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Logits as `forward` gives them, in the precision of the model."""
        x, delta = self.embed(batch.token_ids), None
        for index in range(self.spec.num_layers):
            if batch.loads is not None:
                batch.loads.before(index)  # the layer's own keys and values may go to such a page
            q = self.enter(index, x, delta, batch.positions, batch.slot_mapping, cache)
            delta = self.leave(index, x, self.attend(index, q, batch, cache))
        return self.finish(x, delta, batch)

    def enter(
        self, index: int, x: Tensor, delta: Tensor | None, positions: Tensor, slot_mapping: Tensor, cache: KVCache,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Queries `[T, Hq, D]` of layer `index`, to `out` where it is given, whose keys and values go to the cache.
        `x` `[T, hidden]` += `delta`, which the layer before it left."""
        layer = self.weights.layers[index]
        qkv = multiply(add_rms_norm(x, delta, _rms(layer.input_norm)), layer.qkv).view(len(x), -1, self.spec.head_dim)
        q_norm, k_norm = (norm if norm is None else _rms(norm) for norm in (layer.q_norm, layer.k_norm))
        return rope_store(
            qkv, self._heads, cache, index, positions, slot_mapping, self._rotation, q_norm, k_norm, out
        )  # fmt: skip

    def attend(
        self, index: int, q: Tensor, batch: ForwardBatch, cache: KVCache, out: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """What the queries of layer `index` see, `[T, Hq, D]`, in `out` where it is given."""
        scale, window = self.spec.scales[index], self.spec.windows[index]
        return self.attention.attend(index, q, batch, cache, scale=scale, window=window, softcap=None, out=out)

    def leave(self, index: int, x: Tensor, attended: Tensor) -> Tensor:
        """What layer `index` adds to `x` beside its attention, which is added to `x` here."""
        layer = self.weights.layers[index]
        delta = self.tp.all_reduce(multiply(attended.view(len(x), -1), layer.o))
        inner = multiply_gated(add_rms_norm(x, delta, _rms(layer.post_norm)), layer.up)
        return self.tp.all_reduce(multiply(inner, layer.down))

    def finish(self, x: Tensor, delta: Tensor | None, batch: ForwardBatch) -> Tensor:
        """Logits of the rows of `x` + `delta` that `batch` wants."""
        rows = batch.logit_rows
        if batch.num_prefill_rows or len(rows) < len(x):  # of decodes alone they are all, in order
            x, delta = x.index_select(0, rows), None if delta is None else delta.index_select(0, rows)
        hidden = add_rms_norm(x, delta, _rms(self.weights.norm))
        logits = self.tp.gather_to_rank0(multiply(hidden, self.weights.head))
        return logits[:, : self.spec.vocab_size]

    def embed(self, token_ids: Tensor) -> Tensor:
        """`[T, hidden]`."""
        if self.shard.size == 1:
            return look_up(self.weights.embedding, token_ids)
        first, last = self.shard.vocab
        elsewhere = (token_ids < first) | (token_ids >= last)
        local = (token_ids - first).masked_fill_(elsewhere, 0)
        x = look_up(self.weights.embedding, local).masked_fill_(elsewhere[:, None], 0)
        return self.tp.all_reduce(x)


def _rms(norm: object) -> RMSNorm:
    assert isinstance(norm, RMSNorm)  # as `supports` has made sure
    return norm
