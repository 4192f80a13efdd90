"""The weights of one rank as plain tensors, fused where one product can compute several projections."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_proc.models.decoder_layout import DecoderLayout, LayerParts, LinearParts, NormParts, Shard
from worker_proc.models.layers import LayerNorm, Linear, RMSNorm
from worker_proc.models.loading import Part, WeightLoader
from worker_proc.models.spec import DecoderSpec

Norm = RMSNorm | LayerNorm


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Hq, Hkv and I are local to the rank."""

    input_norm: Norm
    qkv: Linear  # [(Hq + 2 Hkv) * D, hidden]: all queries, then keys, then values
    q_norm: Norm | None
    k_norm: Norm | None
    o: Linear  # [hidden, Hq * D]
    post_norm: Norm
    up: Linear  # [2 I, hidden], gate before up, or [I, hidden] without a gate
    down: Linear  # [hidden, I]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor  # [vocabulary rows of the rank, hidden]
    positions: Tensor | None  # [context, hidden], learned
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Tensor  # [vocabulary rows of the rank, hidden]; the embedding itself when tied


class DecoderWeightPlan:
    """Plans all reads of one rank; after `load.run`, `finish` gives the weights."""

    def __init__(self, spec: DecoderSpec, shard: Shard, load: WeightLoader) -> None:
        self.spec = spec
        self.shard = shard
        self.load = load
        layout = DecoderLayout(spec, shard, load.checkpoint)
        self.embedding = self._vocabulary(layout.embedding)
        self.positions = load.tensor(layout.positions) if layout.positions is not None else None
        self.layers = tuple(self._layer(parts) for parts in layout.layers)
        self.norm = self._norm(layout.norm)
        self.head = self._vocabulary(layout.head) if layout.head is not None else None
        load.checkpoint.refuse_unexpected(load.used(), layout.harmless)

    def finish(self) -> DecoderWeights:
        head = self.head
        if head is None or (self.spec.tied and torch.equal(head, self.embedding)):
            head = self.embedding
        return DecoderWeights(self.embedding, self.positions, self.layers, self.norm, head)

    def _layer(self, parts: LayerParts) -> LayerWeights:
        return LayerWeights(
            input_norm=self._norm(parts.input_norm),
            qkv=self._linear(parts.qkv),
            q_norm=self._norm(parts.q_norm) if parts.q_norm is not None else None,
            k_norm=self._norm(parts.k_norm) if parts.k_norm is not None else None,
            o=self._linear(parts.o),
            post_norm=self._norm(parts.post_norm),
            up=self._linear(parts.up),
            down=self._linear(parts.down),
        )

    def _linear(self, parts: LinearParts) -> Linear:
        weight = self.load.tensor(*parts.weight)
        bias = self.load.tensor(*parts.bias) if parts.bias else None
        return Linear(weight, bias if parts.adds_bias else None)

    def _norm(self, parts: NormParts) -> Norm:
        weight = self.load.tensor(parts.weight)
        if parts.bias is None:
            return RMSNorm(weight, self.spec.norm_eps)
        return LayerNorm(weight, self.load.tensor(parts.bias), self.spec.norm_eps)

    def _vocabulary(self, part: Part) -> Tensor:
        first, last = self.shard.vocab
        return self.load.tensor(part, rows=last - first)
