"""What the native decoder needs to know about a model. Needs no torch; `families` parses it from config.json."""

import math
from dataclasses import dataclass
from typing import Final, Literal

from worker_proc.models.rope_spec import RopeSpec

# An activation of gated MLPs: gate * sigmoid(alpha * gate) * (up + 1), clamped.
CLAMPED_SWIGLU: Final = "clamped_swiglu"
SWIGLU_ALPHA: Final = 1.702  # as in every gpt-oss that is published; the native kernels know no other numbers
SWIGLU_LIMIT: Final = 7.0


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """MLPs of which a token goes through the `each` likeliest ones, by a softmax over `experts` router outputs."""

    experts: int
    each: int
    renormalizes: bool  # shares of the chosen ones add up to 1
    router_bias: bool = False
    shared: int = 0  # channels of an expert that all tokens go through
    shared_gate: bool = True  # times the sigmoid of a gate
    sigmoid: bool = False  # of each output instead
    choice_bias: bool = False  # what is likely is added to for choosing, but not for shares
    scale: float = 1.0  # of shares
    dense: int = 0  # so many layers before the others have an MLP instead
    dense_size: int = 0  # channels of theirs
    beside: bool = False  # each is beside an MLP of `dense_size` channels; both have norms of their own (Gemma 4)


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Gated DeltaNets (Yang et al., 2024) in place of the attention of some layers."""

    layers: tuple[bool, ...]  # which
    key_heads: int
    value_heads: int  # a multiple of `key_heads`
    key_dim: int  # numbers of a head
    value_dim: int
    kernel: int  # tokens that their convolution sees
    by_key_heads: bool = False  # projections are stored key head by key head (Qwen3-Next), not q, k, v, z, b and a
    tiled: bool = False  # value head h goes with key head h % key_heads (GGUF), not h / alike

    @property
    def alike(self) -> int:
        """So many value heads in a row go with the same key head."""
        return 1 if self.tiled else self.value_heads // self.key_heads

    @property
    def keys(self) -> int:
        """Numbers of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of all value heads."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """Gated short convolutions (LFM2, Liquid AI, 2025) in place of the attention of some layers. Channels are as many
    as hidden states have."""

    layers: tuple[bool, ...]  # which
    kernel: int  # tokens that they see
    bias: bool  # of all parts: projections and convolution


@dataclass(frozen=True, slots=True)
class SpaceSpec:
    """Mamba-2 layers (Dao and Gu, 2024) in place of the attention of some layers."""

    layers: tuple[bool, ...]  # which
    heads: int
    head_dim: int
    groups: int  # of heads, which have B and C in common, and are normed together
    state_size: int  # numbers that are kept for each number of a head
    kernel: int  # tokens that their convolution sees
    conv_bias: bool
    bias: bool  # of projections
    least_step: float = 0.0
    most_step: float = math.inf

    @property
    def width(self) -> int:
        """Numbers of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: all heads, then B and C of all groups."""
        return self.width + 2 * self.groups * self.state_size


@dataclass(frozen=True, slots=True)
class Gemma4Spec:
    """What the layers of Gemma 4 (Google, 2026) have beyond those of Gemma 3. All values are normed, and what a layer
    gives is scaled by a number of its own."""

    full_kv_heads: int  # of layers without a window
    full_head_dim: int
    keys_as_values: bool  # in those: as they are projected, before they are normed and rotated
    borrowing: int = 0  # so many last layers read keys and values of the last other one with, or without, a window
    widens: bool = False  # those have MLPs of twice the channels
    inputs: int = 0  # numbers that each layer has of a token itself (per-layer embeddings)
    inputs_vocab: int = 0  # tokens that have such


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A pre-norm decoder-only transformer."""

    layout: Literal[
        "llama", "phi3", "mixtral", "gpt_oss", "gpt2", "lfm2", "granite_hybrid"
    ]  # tensor names and their storage order
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of an expert, where there are several
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: str  # see `layers.ACTIVATION_FUNCTIONS` and, for gated MLPs, `layers.gated`
    gated_mlp: bool  # down(act(gate(x)) * up(x)) rather than down(act(up(x)))
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each query and key head, before the rotation (Qwen3, Gemma 3)
    tied: bool  # the output head is the embedding matrix
    learned_positions: bool  # absolute ones, added to the embedding (GPT-2)
    ropes: tuple[RopeSpec | None, ...]  # per layer; None: queries and keys are not rotated
    scales: tuple[float, ...]  # of attention scores, per layer
    windows: tuple[int | None, ...]  # sliding window in tokens, per layer
    sinks: bool = False  # each query head has a logit that takes part in its softmax, without a value (gpt-oss)
    softcap: float | None = None  # attention scores become softcap * tanh(score / softcap) (Gemma 2)
    logit_softcap: float | None = None  # the same for logits
    norm_offset: float = 0.0  # is added to stored norm weights (Gemma: 1)
    output_norms: bool = False  # RMSNorm over what attention and MLP add to the hidden states (Gemma 2 and 3)
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False  # to the precision of the model (Gemma)
    residual_scale: float = 1.0  # of what attention and MLP add to the hidden states (Granite)
    logit_scale: float = 1.0
    mixture: MixtureSpec | None = None  # in place of every MLP
    gated_attention: bool = False  # what it gives is multiplied by the sigmoid of gates, projected with the queries
    delta: DeltaSpec | None = None
    conv: ConvSpec | None = None  # or this one
    space: SpaceSpec | None = None  # or this one
    gemma4: Gemma4Spec | None = None

    @property
    def is_plain(self) -> bool:
        """Nothing beyond Llama's: the same rotation of whole heads in all layers, no caps, scales, output norms, sinks
        or experts."""
        rotation = set(self.ropes)
        whole = len(rotation) == 1 and all(rope is not None and rope.dim == self.head_dim for rope in rotation)
        scaled = (self.embedding_scale, self.residual_scale, self.logit_scale) != (1.0, 1.0, 1.0)
        others = (self.softcap, self.logit_softcap, self.norm_offset, self.output_norms, self.mixture, self.sinks)
        return whole and not scaled and not any(others) and not self.gated_attention and not self.recurrent

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention."""
        mixers = self.delta or self.conv or self.space
        return mixers is None or not mixers.layers[layer]

    def kv_heads_of(self, layer: int) -> int:
        """Heads of the keys and values that a layer reads."""
        full = self.gemma4 is not None and self.windows[layer] is None
        return self.gemma4.full_kv_heads if self.gemma4 is not None and full else self.num_kv_heads

    def head_dim_of(self, layer: int) -> int:
        """Numbers of its heads."""
        full = self.gemma4 is not None and self.windows[layer] is None
        return self.gemma4.full_head_dim if self.gemma4 is not None and full else self.head_dim

    def keys_of(self, layer: int) -> int:
        """The layer whose keys and values it reads."""
        first = self.num_layers - (self.gemma4.borrowing if self.gemma4 is not None else 0)
        if layer < first:
            return layer
        return max(other for other in range(first) if self.windows[other] == self.windows[layer])

    def widening_of(self, layer: int) -> int:
        """By what the channels of its MLP are multiplied."""
        return 2 if self.gemma4 is not None and self.gemma4.widens and self.keys_of(layer) != layer else 1

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep states instead of keys and values."""
        return self.delta is not None or self.conv is not None or self.space is not None
