"""Reads one rank's share of a checkpoint straight into packed form: the plain form is never held as a whole."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from worker_proc.cpu.compressed import CompressedMatrix
from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.linear import PackedMatrix, Pairing
from worker_proc.cpu.matrices import MatrixForm
from worker_proc.cpu.memory import HugePages
from worker_proc.cpu.quantized import PackedCodesTarget, QuantizedMatrix
from worker_proc.cpu.screen import HeadScreen, screen_scheme
from worker_proc.errors import ModelError
from worker_proc.models.decoder_layout import DecoderLayout
from worker_proc.models.layout_parts import (
    BesideParts,
    ConvParts,
    DeltaParts,
    InputParts,
    LayerParts,
    LinearParts,
    MlpParts,
    NormParts,
    SpaceParts,
    TokenInputParts,
)
from worker_proc.models.loading import Part, WeightLoader
from worker_proc.models.row_reader import RowReader
from worker_proc.models.shard import Shard
from worker_proc.models.spec import DecoderSpec
from worker_proc.quantization.scheme import Scheme
from worker_proc.quantization.source import WeightSource

log = logging.getLogger(__name__)
_PAIR = Pairing.GATE, Pairing.UP
_COMPRESSED_FROM = 2**27  # bytes of weights of a rank: fewer may stay in a cache, where reading them costs little


@dataclass(frozen=True, slots=True)
class PackedMlp:
    up: PackedMatrix  # gates and ups, paired
    down: PackedMatrix


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """What a Gated DeltaNet has beside its large projections; all but the first in float32."""

    gates: PackedMatrix  # b and a
    conv: Tensor  # [kernel, channels]
    rate: Tensor  # [value heads of the rank], as `step_bias`
    step_bias: Tensor
    norm: Tensor  # [value_dim]


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """What a gated short convolution has beside its projections, in float32."""

    taps: Tensor  # [kernel, channels of the rank]
    bias: Tensor  # [channels of the rank]


@dataclass(frozen=True, slots=True)
class SpaceWeights:
    """What a Mamba-2 layer has beside its projections, in float32."""

    taps: Tensor  # [kernel, channels]
    conv_bias: Tensor  # [channels]
    rate: Tensor  # [heads], as `step_bias` and `skip`
    step_bias: Tensor
    skip: Tensor
    norm: Tensor  # [heads * head_dim]


@dataclass(frozen=True, slots=True)
class InputWeights:
    """What a layer has for the inputs of a token itself."""

    gate: PackedMatrix
    output: PackedMatrix
    norm: Tensor


@dataclass(frozen=True, slots=True)
class BesideWeights:
    """What a mixture beside an MLP has beside its router and experts, in float32."""

    router_norm: Tensor  # [hidden], as the other norms
    experts_norm: Tensor
    mlp_norm: Tensor
    made_norm: Tensor
    expert_scales: Tensor  # [experts]


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Of which the inputs of all layers are made."""

    table: RowReader  # [tokens, layers * inputs]
    projection: PackedMatrix
    norm: Tensor  # float32 [inputs]


@dataclass(frozen=True, slots=True)
class PackedLayer:
    input_norm: Tensor  # float32 [hidden], as the other norms
    qkv: PackedMatrix
    q_norm: Tensor | None  # float32 [head_dim]
    k_norm: Tensor | None
    o: PackedMatrix
    attention_norm: Tensor | None  # of what attention adds to the hidden states
    post_norm: Tensor  # before the MLP
    up: PackedMatrix  # of the MLP, or of the first expert
    down: PackedMatrix
    mlp_norm: Tensor | None  # of what the MLP adds
    router: PackedMatrix | None
    experts: tuple[PackedMlp, ...]  # of a mixture, the first one too
    sinks: Tensor | None  # float32 [query heads of the rank]
    delta: DeltaWeights | None = None  # in place of attention
    conv: ConvWeights | None = None  # or this
    space: SpaceWeights | None = None  # or this
    shared: PackedMlp | None = None  # beside the experts of a mixture
    choice_bias: Tensor | None = None  # float32 [experts]
    output_scale: Tensor | None = None  # float32 [1]
    inputs: InputWeights | None = None
    beside: BesideWeights | None = None  # then `shared` is the MLP


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The vocabulary matrices hold the rank's real tokens only, without padding."""

    embedding: Tensor | None  # bfloat16 [tokens of the rank, hidden]; None: the rows of the head
    layers: tuple[PackedLayer, ...]
    norm: Tensor
    head: PackedMatrix
    screen: HeadScreen | None = None
    token_inputs: TokenInputs | None = None


@dataclass(frozen=True, slots=True)
class _PackedTarget:
    matrix: PackedMatrix
    output: int  # of the first row
    pairing: Pairing
    screen: HeadScreen | None = None

    def copy_rows(self, first: int, rows: Tensor) -> None:
        self.matrix.pack(rows, self.output + first, self.pairing)
        if self.screen is not None:
            self.screen.pack(rows, self.output + first)


class PackedWeightPlan:
    """Plans all reads of one rank; after `load.run`, `finish` gives the weights. For the models that
    `worker_proc.cpu.decoder.supports` names."""

    def __init__(
        self,
        spec: DecoderSpec,
        shard: Shard,
        load: WeightLoader,
        native: NativeLibrary,
        source: WeightSource,
        *,
        compression: str = "auto",
    ) -> None:
        """`compression` is that of `ModelConfig.weight_compression`."""
        self.spec = spec
        self.load = load
        self.native = native
        self.source = source
        layout = DecoderLayout(spec, shard, load.checkpoint)
        head = layout.head or layout.embedding
        matrices = list(self._matrices(layout, head))
        plain = sum(_plain_bytes(parts, paired) for parts, scheme, paired, may in matrices if may and scheme is None)
        self._compress = compresses(native, compression, plain)
        screens = source.head_scheme(head) is None and not spec.logit_softcap  # the largest are sought after the cap
        screened = screen_scheme(native, *_shape((head,))) if screens else None
        room = HeadScreen.room(*_shape((head,)), screened) if screened is not None else 0
        self.memory = HugePages(room + sum(self._form(*matrix).room() for matrix in matrices))
        self._after: list[Callable[[], object]] = []
        self._compressed: list[CompressedMatrix] = []

        inputs = layout.token_inputs
        self.token_inputs = self._token_inputs(inputs) if inputs is not None else None
        self.layers = tuple(self._layer(parts) for parts in layout.layers)
        self.norm = self._norm(layout.norm)
        self.screen = HeadScreen(native, self.memory, *_shape((head,)), screened) if screened is not None else None
        self.head = self._matrix((head,), source.head_scheme(head), screen=self.screen)
        self.embedding: Tensor | None = None
        if layout.head is not None:
            self.embedding = load.tensor(layout.embedding)
        load.checkpoint.refuse_unexpected(load.used() | layout.unread | source.idle_biases(), layout.harmless)

    def finish(self) -> PackedWeights:
        for step in self._after:
            step()
        for matrix in self._compressed:
            matrix.seal()
        if self.screen is not None:
            self.screen.seal()
        if self._compressed:
            count = sum(matrix.compressed for matrix in self._compressed)
            log.info("%d of %d matrices are in 12 bits", count, len(self._compressed))
        return PackedWeights(self.embedding, self.layers, self.norm, self.head, self.screen, self.token_inputs)

    def _matrices(
        self, layout: DecoderLayout, head: Part
    ) -> Iterator[tuple[tuple[Part, ...], Scheme | None, bool, bool]]:
        """What each matrix is made of, its scheme, whether it is paired, and whether it may take 12 bits: experts are
        small and many, which codes they take would cost more than it gives."""
        yield (head,), self.source.head_scheme(head), False, True
        if layout.token_inputs is not None:
            projection = layout.token_inputs.projection.weight
            yield projection, self.source.scheme(projection), False, True
        for parts in layout.layers:
            inputs = (parts.inputs.gate, parts.inputs.output) if parts.inputs is not None else ()
            for linear in (parts.qkv, parts.o, *inputs):
                yield linear.weight, self.source.scheme(linear.weight), False, True
            if parts.delta is not None:
                yield parts.delta.gates.weight, self.source.as_stored(parts.delta.gates.weight), False, False
            for mlp in (*parts.mlps, *([parts.shared] if parts.shared is not None else [])):
                yield mlp.up.weight, self.source.scheme(mlp.up.weight), True, parts.router is None
                yield mlp.down.weight, self.source.scheme(mlp.down.weight), False, parts.router is None
            if parts.router is not None:
                yield parts.router.weight, None, False, False

    def _form(
        self, parts: tuple[Part, ...], scheme: Scheme | None, paired: bool = False, compress: bool = True
    ) -> MatrixForm:
        return MatrixForm(*_shape(parts), scheme, self._compress and compress, paired)

    def _layer(self, parts: LayerParts) -> PackedLayer:
        mixed = parts.router is not None
        mlps = tuple(self._mlp(mlp, compress=not mixed) for mlp in parts.mlps)
        return PackedLayer(
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
            router=self._linear(parts.router, compress=False, plain=True) if parts.router is not None else None,
            experts=mlps if mixed else (),
            sinks=self._float32(parts.sinks),
            delta=self._delta(parts.delta) if parts.delta is not None else None,
            conv=self._conv(parts.conv) if parts.conv is not None else None,
            space=self._space(parts.space) if parts.space is not None else None,
            shared=self._mlp(parts.shared, compress=False) if parts.shared is not None else None,
            choice_bias=self._choice_bias(parts.choice_bias),
            output_scale=self._float32(parts.output_scale),
            inputs=self._inputs(parts.inputs) if parts.inputs is not None else None,
            beside=self._beside(parts.beside) if parts.beside is not None else None,
        )

    def _inputs(self, parts: InputParts) -> InputWeights:
        return InputWeights(self._linear(parts.gate), self._linear(parts.output), self._norm(parts.norm))

    def _beside(self, parts: BesideParts) -> BesideWeights:
        scale = self.load.tensor(parts.router_scale, dtype=torch.float32)
        self._after.append(lambda: scale.mul_(self.spec.hidden_size**-0.5))
        return BesideWeights(
            router_norm=scale,
            experts_norm=self._norm(parts.experts_norm),
            mlp_norm=self._norm(parts.mlp_norm),
            made_norm=self._norm(parts.made_norm),
            expert_scales=self.load.tensor(parts.expert_scales, dtype=torch.float32),
        )

    def _token_inputs(self, parts: TokenInputParts) -> TokenInputs:
        return TokenInputs(
            table=RowReader(self.load.stays(parts.table), torch.bfloat16),
            projection=self._linear(parts.projection),
            norm=self._norm(parts.norm),
        )

    def _mlp(self, parts: MlpParts, *, compress: bool) -> PackedMlp:
        return PackedMlp(
            self._linear(parts.up, paired=True, compress=compress), self._linear(parts.down, compress=compress)
        )

    def _delta(self, parts: DeltaParts) -> DeltaWeights:
        return DeltaWeights(
            gates=self._matrix(parts.gates.weight, self.source.as_stored(parts.gates.weight), compress=False),
            conv=self._taps(parts.conv),
            rate=self._rate(parts.rate),
            step_bias=self.load.tensor(parts.step_bias, dtype=torch.float32),
            norm=self.load.tensor(parts.norm, dtype=torch.float32),
        )

    def _conv(self, parts: ConvParts) -> ConvWeights:
        taps = self._taps((parts.taps,))
        return ConvWeights(taps, self._bias_of(taps, parts.bias))

    def _space(self, parts: SpaceParts) -> SpaceWeights:
        taps = self._taps((parts.taps,))
        conv_bias = self._bias_of(taps, parts.conv_bias)
        others = (self.load.tensor(part, dtype=torch.float32) for part in (parts.step_bias, parts.skip, parts.norm))
        return SpaceWeights(taps, conv_bias, self._rate(parts.rate), *others)

    def _bias_of(self, taps: Tensor, part: Part | None) -> Tensor:
        bias = self._float32(part)
        return torch.zeros(taps.shape[1]) if bias is None else bias

    def _rate(self, part: Part) -> Tensor:
        rate = self.load.tensor(part, dtype=torch.float32)
        self._after.append(lambda: rate.exp_().neg_())
        return rate

    def _choice_bias(self, part: Part | None) -> Tensor | None:
        """Finite: experts that are chosen must differ."""
        bias = self._float32(part)
        if part is not None and bias is not None:
            self._after.append(partial(_refuse_others, part.name, bias))
        return bias

    def _float32(self, part: Part | None) -> Tensor | None:
        return self.load.tensor(part, dtype=torch.float32) if part is not None else None

    def _taps(self, parts: tuple[Part, ...]) -> Tensor:
        """The weights of a depthwise convolution, float32 `[kernel, channels]`."""
        stored = self.load.tensor(*parts, dtype=torch.float32)
        taps = torch.empty(stored.shape[2], stored.shape[0])
        self._after.append(lambda: taps.copy_(stored[:, 0].t()))
        return taps

    def _norm(self, parts: NormParts) -> Tensor:
        """float32, but with the precision that the configured dtype leaves; what is stored and the model's offset."""
        weight = self.load.tensor(parts.weight)
        wide = torch.empty(weight.shape)
        self._after.append(lambda: wide.copy_(weight).add_(self.spec.norm_offset))
        return wide

    def _optional_norm(self, parts: NormParts | None) -> Tensor | None:
        return self._norm(parts) if parts is not None else None

    def _linear(
        self, parts: LinearParts, paired: bool = False, *, compress: bool = True, plain: bool = False
    ) -> PackedMatrix:
        scheme = None if plain else self.source.scheme(parts.weight)
        matrix = self._matrix(parts.weight, scheme, paired, compress=compress)
        if parts.bias:
            bias = self.load.tensor(*parts.bias)
            if parts.adds_bias:
                self._after.append(partial(matrix.set_bias, bias))
        return matrix

    def _matrix(
        self,
        parts: tuple[Part, ...],
        scheme: Scheme | None,
        paired: bool = False,
        *,
        compress: bool = True,
        screen: HeadScreen | None = None,
    ) -> PackedMatrix:
        matrix = self._form(parts, scheme, paired, compress).make(self.native, self.memory)
        if isinstance(matrix, CompressedMatrix):
            self._compressed.append(matrix)
        output = 0
        for part, pairing in zip(parts, _PAIR if paired else (Pairing.NONE,) * len(parts), strict=True):
            if isinstance(matrix, QuantizedMatrix):
                self.source.into(part, matrix.scheme, PackedCodesTarget(matrix, output, pairing))
            else:
                self.load.into(part, _PackedTarget(matrix, output, pairing, screen))
            if not paired:
                output += part.local_shape()[0]
        return matrix


def _refuse_others(name: str, numbers: Tensor) -> None:
    """Raises ModelError where one of them is not finite."""
    others = numbers[~numbers.isfinite()]
    if len(others):
        raise ModelError(name, others[0].item(), "must be finite")


def compresses(native: NativeLibrary, compression: str, plain_bytes: int) -> bool:
    """Whether weights of `plain_bytes` in all take 12 bits; `compression` as in `ModelConfig.weight_compression`."""
    pays = plain_bytes >= _COMPRESSED_FROM and native.compresses_well
    return native.compresses and (compression == "on" or (compression == "auto" and pays))


def _plain_bytes(parts: tuple[Part, ...], paired: bool) -> int:
    outputs, inputs = _shape(parts)
    return PackedMatrix.packed_size(outputs, inputs, paired=paired) * torch.bfloat16.itemsize


def _shape(parts: tuple[Part, ...]) -> tuple[int, int]:
    shapes = [part.local_shape() for part in parts]
    return sum(shape[0] for shape in shapes), shapes[0][1]
