"""What one rank reads of each layer of the native decoder."""

from dataclasses import dataclass

from worker_proc.models.loading import Part


@dataclass(frozen=True, slots=True)
class LinearParts:
    """A projection `[out, in]` and its bias: blocks that are stacked along the outputs. Biases are read on every rank,
    which checks them, and used where `adds_bias`."""

    weight: tuple[Part, ...]
    bias: tuple[Part, ...] = ()
    adds_bias: bool = True


@dataclass(frozen=True, slots=True)
class NormParts:
    weight: Part
    bias: Part | None = None


@dataclass(frozen=True, slots=True)
class MlpParts:
    up: LinearParts
    down: LinearParts


@dataclass(frozen=True, slots=True)
class DeltaParts:
    """What a Gated DeltaNet has beside its large projections."""

    gates: LinearParts  # b and a of all value heads, without biases
    conv: tuple[Part, ...]  # [channels, 1, kernel]
    rate: Part  # [value heads]: the logarithm
    step_bias: Part
    norm: Part  # [value_dim]


@dataclass(frozen=True, slots=True)
class ConvParts:
    """What a gated short convolution has beside its projections."""

    taps: Part  # [channels, 1, kernel]
    bias: Part | None


@dataclass(frozen=True, slots=True)
class SpaceParts:
    """What a Mamba-2 layer has beside its projections."""

    taps: Part  # [channels, 1, kernel]
    conv_bias: Part | None
    rate: Part  # [heads]: the logarithm
    step_bias: Part
    skip: Part
    norm: Part  # [heads * head_dim]


@dataclass(frozen=True, slots=True)
class InputParts:
    """What a layer of Gemma 4 has for the inputs of a token itself."""

    gate: LinearParts
    output: LinearParts
    norm: NormParts


@dataclass(frozen=True, slots=True)
class BesideParts:
    """What a mixture beside an MLP has beside its router and experts. The last two are on every rank."""

    experts_norm: NormParts  # of what experts see
    mlp_norm: NormParts  # of what the MLP makes
    made_norm: NormParts  # of what experts make
    router_scale: Part  # [hidden], of what the router sees, normed
    expert_scales: Part  # [experts], of their shares


@dataclass(frozen=True, slots=True)
class TokenInputParts:
    """Of which the inputs of all layers are made."""

    table: Part  # [tokens, layers * inputs]
    projection: LinearParts
    norm: NormParts


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer, see `LayerWeights`. In place of attention's projections, a Gated DeltaNet has those of q, k, v and z,
    a gated short convolution those of its gates and of what goes in, a Mamba-2 layer all, and each its output's."""

    input_norm: NormParts
    qkv: LinearParts
    q_norm: NormParts | None
    k_norm: NormParts | None
    o: LinearParts
    attention_norm: NormParts | None
    post_norm: NormParts
    router: LinearParts | None  # of a mixture, on every rank; its last output is the gate of the shared expert
    mlps: tuple[MlpParts, ...]  # one, or the experts of a mixture
    mlp_norm: NormParts | None
    sinks: Part | None = None  # of attention, one number for each query head
    delta: DeltaParts | None = None
    conv: ConvParts | None = None
    space: SpaceParts | None = None
    shared: MlpParts | None = None  # the expert of a mixture that all tokens go through
    choice_bias: Part | None = None  # of a mixture's experts, on every rank
    output_scale: Part | None = None  # one number
    inputs: InputParts | None = None
    beside: BesideParts | None = None  # then `shared` is the MLP
