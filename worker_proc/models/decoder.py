"""The native decoder: one forward pass for every `DecoderSpec`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.attention.interface import AttentionBackend, ForwardBatch
from worker_proc.kv_cache import KVCache, KVSpec
from worker_proc.models.decoder_weights import DecoderWeights, LayerWeights
from worker_proc.models.layers import ACTIVATION_FUNCTIONS, Linear, Norm, cap, embedding_scale, gated, look_up
from worker_proc.models.rope import Rope, rotate
from worker_proc.models.shard import Shard
from worker_proc.models.spec import DecoderSpec
from worker_proc.parallel import TensorParallel

Angles = tuple[Tensor, Tensor]


class Decoder:
    """One rank's share of a model. Implements `LanguageModel`."""

    def __init__(
        self,
        spec: DecoderSpec,
        shard: Shard,
        weights: DecoderWeights,
        tp: TensorParallel,
        attention: AttentionBackend,
    ) -> None:
        self.spec = spec
        self.shard = shard
        self.weights = weights
        self.tp = tp
        self.attention = attention
        self.heads = shard.heads[1] - shard.heads[0]
        self.kv_heads = shard.kv_heads[1] - shard.kv_heads[0]
        self.dtype = weights.norm.weight.dtype
        device = weights.norm.weight.device
        self.ropes = {rope: Rope(rope, device) for rope in spec.ropes if rope is not None}
        self.embedding_scale = embedding_scale(spec, self.dtype)
        if spec.gated_mlp:
            self.gate = gated(spec.activation)
        else:
            self.activation = ACTIVATION_FUNCTIONS[spec.activation]

    @property
    def kv_spec(self) -> KVSpec:
        """See `LanguageModel`."""
        return KVSpec.uniform(self.spec.num_layers, self.kv_heads, self.spec.head_dim, self.spec.head_dim, self.dtype)

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, without padding."""
        return self.spec.vocab_size

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """See `LanguageModel`."""
        x = self._embed(batch)
        angles = {spec: rope.angles(batch.positions, self.dtype) for spec, rope in self.ropes.items()}
        for index, layer in enumerate(self.weights.layers):
            rope = self.spec.ropes[index]
            turns = angles[rope] if rope is not None else None
            x += self._added(self._attend(index, layer, layer.input_norm(x), turns, batch, cache), layer.attention_norm)
            x += self._added(self._mlp(layer, layer.post_norm(x)), layer.mlp_norm)
        hidden = self.weights.norm(x.index_select(0, batch.logit_rows))
        logits = self.tp.gather_to_rank0(self.weights.head(hidden))[:, : self.spec.vocab_size].float()
        if self.spec.logit_scale != 1.0:
            logits *= self.spec.logit_scale
        return cap(logits, self.spec.logit_softcap) if self.spec.logit_softcap else logits

    def _added(self, output: Tensor, norm: Norm | None) -> Tensor:
        """What attention or MLP add to the hidden states."""
        if norm is not None:
            output = norm(output)
        return output if self.spec.residual_scale == 1.0 else output * self.spec.residual_scale

    def _embed(self, batch: ForwardBatch) -> Tensor:
        if self.shard.size == 1:
            x = look_up(self.weights.embedding, batch.token_ids)
        else:
            first, last = self.shard.vocab
            elsewhere = (batch.token_ids < first) | (batch.token_ids >= last)
            local = (batch.token_ids - first).masked_fill_(elsewhere, 0)
            x = look_up(self.weights.embedding, local).masked_fill_(elsewhere[:, None], 0)
            self.tp.all_reduce(x)
        if self.embedding_scale != 1.0:
            x *= self.embedding_scale
        if self.weights.positions is not None:
            x += F.embedding(batch.positions, self.weights.positions)
        return x

    def _attend(
        self, index: int, layer: LayerWeights, x: Tensor, angles: Angles | None, batch: ForwardBatch, cache: KVCache
    ) -> Tensor:
        tokens = x.shape[0]
        qkv = layer.qkv(x).view(tokens, -1, self.spec.head_dim)
        rotated = self.heads + self.kv_heads
        v = qkv[:, rotated:]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat((layer.q_norm(qkv[:, : self.heads]), layer.k_norm(qkv[:, self.heads : rotated])), dim=1)
        else:
            qk = qkv[:, :rotated]
        if angles is not None:
            qk = rotate(qk, *angles)
        out = self.attention.forward(
            index,
            qk[:, : self.heads],
            qk[:, self.heads :],
            v,
            batch,
            cache,
            scale=self.spec.scales[index],
            window=self.spec.windows[index],
            softcap=self.spec.softcap,
            sinks=layer.sinks,
        )
        return self.tp.all_reduce(layer.o(out.reshape(tokens, -1)))

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        mixed = layer.router is not None
        return self.tp.all_reduce(self._mixture(layer, x) if mixed else self._inner(layer.up, layer.down, x))

    def _inner(self, into: Linear, out_of: Linear, x: Tensor) -> Tensor:
        up = into(x)
        if self.spec.gated_mlp:
            return out_of(self.gate(*up.chunk(2, dim=-1)))
        return out_of(self.activation(up))

    def _mixture(self, layer: LayerWeights, x: Tensor) -> Tensor:
        mixture = self.spec.mixture
        assert mixture is not None and layer.router is not None
        shares, chosen = layer.router(x).softmax(dim=-1, dtype=torch.float32).topk(mixture.each)
        if mixture.renormalizes:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for index, expert in enumerate(layer.experts):
            rows, places = (chosen == index).nonzero(as_tuple=True)
            if len(rows):
                made = self._inner(expert.up, expert.down, x[rows])
                out.index_add_(0, rows, made * shares[rows, places, None].to(out.dtype))
        return out.to(x.dtype)
