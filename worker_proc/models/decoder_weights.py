"""The weights of one rank as plain tensors, fused where one product can compute several projections."""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_proc.models.decoder_layout import DecoderLayout
from worker_proc.models.layers import LayerNorm, Linear, Norm, RMSNorm, Table
from worker_proc.models.layout_parts import LayerParts, LinearParts, NormParts
from worker_proc.models.loading import Part, WeightLoader
from worker_proc.models.shard import Shard
from worker_proc.models.spec import DecoderSpec
from worker_proc.quantization.rows import QuantizedWeight
from worker_proc.quantization.scheme import Scheme
from worker_proc.quantization.source import WeightSource
from worker_proc.quantization.target import MakeMatrix, QuantizedMatrix, WeightTarget


@dataclass(frozen=True, slots=True)
class MlpWeights:
    up: Linear  # [2 I, hidden], gate before up, or [I, hidden] without a gate
    down: Linear  # [hidden, I]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Hq, Hkv and I are local to the rank."""

    input_norm: Norm
    qkv: Linear  # [(Hq + 2 Hkv) * D, hidden]: all queries, then keys, then values
    q_norm: Norm | None
    k_norm: Norm | None
    o: Linear  # [hidden, Hq * D]
    post_norm: Norm  # before the MLP
    up: Linear  # of the MLP, or of the first expert
    down: Linear
    attention_norm: Norm | None = None  # of what attention adds to the hidden states
    mlp_norm: Norm | None = None  # of what the MLP adds
    router: Linear | None = None  # [experts, hidden]
    experts: tuple[MlpWeights, ...] = ()  # of a mixture, the first one too
    sinks: Tensor | None = None  # float32 [Hq], see `AttentionBackend`


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Table  # [vocabulary rows of the rank, hidden]
    positions: Tensor | None  # [context, hidden], learned
    layers: tuple[LayerWeights, ...]
    norm: Norm
    head: Linear  # [vocabulary rows of the rank, hidden]; the embedding itself when tied


class DecoderWeightPlan:
    """Plans all reads of one rank; after `load.run`, `finish` gives the weights."""

    def __init__(
        self,
        spec: DecoderSpec,
        shard: Shard,
        load: WeightLoader,
        source: WeightSource,
        make_matrix: MakeMatrix = QuantizedWeight.empty,
    ) -> None:
        """Matrices in codes are made by `make_matrix`."""
        self.make_matrix = make_matrix
        self.spec = spec
        self.shard = shard
        self.load = load
        self.source = source
        layout = DecoderLayout(spec, shard, load.checkpoint)
        head = layout.head or layout.embedding
        self.head = self._vocabulary(head, source.head_scheme(head))
        self.embedding = self.head if layout.head is None else self._vocabulary(layout.embedding, None)
        self.positions = load.tensor(layout.positions) if layout.positions is not None else None
        self.layers = tuple(self._layer(parts) for parts in layout.layers)
        self.norm = self._norm(layout.norm)
        load.checkpoint.refuse_unexpected(load.used() | layout.unread | source.idle_biases(), layout.harmless)

    def finish(self) -> DecoderWeights:
        return DecoderWeights(self.embedding, self.positions, self.layers, self.norm, Linear(self.head, None))

    def _layer(self, parts: LayerParts) -> LayerWeights:
        mlps = tuple(MlpWeights(self._linear(mlp.up), self._linear(mlp.down)) for mlp in parts.mlps)
        return LayerWeights(
            input_norm=self._norm(parts.input_norm),
            qkv=self._linear(parts.qkv),
            q_norm=self._optional_norm(parts.q_norm),
            k_norm=self._optional_norm(parts.k_norm),
            o=self._linear(parts.o),
            attention_norm=self._optional_norm(parts.attention_norm),
            post_norm=self._norm(parts.post_norm),
            up=mlps[0].up,
            down=mlps[0].down,
            mlp_norm=self._optional_norm(parts.mlp_norm),
            router=self._router(parts.router) if parts.router is not None else None,
            experts=mlps if parts.router is not None else (),
            sinks=self.load.tensor(parts.sinks, dtype=torch.float32) if parts.sinks is not None else None,
        )

    def _router(self, parts: LinearParts) -> Linear:
        """Never in codes."""
        return Linear(self.load.tensor(*parts.weight), self.load.tensor(*parts.bias) if parts.bias else None)

    def _linear(self, parts: LinearParts) -> Linear:
        scheme = self.source.scheme(parts.weight)
        weight = self.load.tensor(*parts.weight) if scheme is None else self._quantized(parts.weight, scheme)
        bias = self.load.tensor(*parts.bias) if parts.bias else None
        return Linear(weight, bias if parts.adds_bias else None)

    def _norm(self, parts: NormParts) -> Norm:
        weight = self.load.tensor(parts.weight)
        if parts.bias is None:
            return RMSNorm(weight, self.spec.norm_eps, self.spec.norm_offset)
        return LayerNorm(weight, self.load.tensor(parts.bias), self.spec.norm_eps)

    def _optional_norm(self, parts: NormParts | None) -> Norm | None:
        return self._norm(parts) if parts is not None else None

    def _vocabulary(self, part: Part, scheme: Scheme | None) -> Table:
        rows = self.shard.vocab[1] - self.shard.vocab[0]
        return self.load.tensor(part, rows=rows) if scheme is None else self._quantized((part,), scheme, rows)

    def _quantized(self, parts: tuple[Part, ...], scheme: Scheme, rows: int | None = None) -> QuantizedMatrix:
        shapes = [part.local_shape() for part in parts]
        outputs, inputs = sum(shape[0] for shape in shapes) if rows is None else rows, shapes[0][1]
        weight = self.make_matrix(outputs, inputs, scheme, self.load.dtype, self.load.device)
        start = 0
        for part, shape in zip(parts, shapes, strict=True):
            self.source.into(part, scheme, WeightTarget(weight, start))
            start += shape[0]
        return weight
