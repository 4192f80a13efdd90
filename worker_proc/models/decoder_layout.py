"""Where a checkpoint keeps the weights of the native decoder: names, shapes, and one rank's share of each.

Megatron-LM's split (Shoeybi et al., 2019): q, k, v, gate and up by output rows, o and down by input columns, the
embedding and the head by vocabulary rows. Norms and learned positions are on every rank, biases of row-parallel
projections on rank 0 only, because the partial results are summed.
"""

from itertools import chain

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
from worker_proc.models.loading import Part, same_data
from worker_proc.models.shard import Shard, Span, moved, scaled
from worker_proc.models.spec import ConvSpec, DecoderSpec, Gemma4Spec, SpaceSpec
from worker_proc.weights import Checkpoint

# gates and ups as one matrix, as Phi-3's q, k and v; and what comes of them
_STACKED = {"phi3": ("gate_up_proj", "down_proj"), "granite_hybrid": ("input_linear", "output_linear")}
Block = tuple[str, int, Span]  # of a stored matrix: its name, its rows, and which of them


class DecoderLayout:
    """All parts of one rank's share. `head` is None where the embedding is the head; `unread` names what may be stored
    nevertheless, and is not needed."""

    def __init__(self, spec: DecoderSpec, shard: Shard, checkpoint: Checkpoint) -> None:
        self.spec = spec
        self.shard = shard
        self.stored = checkpoint.tensors
        gpt2 = spec.layout == "gpt2"
        embedding = "wte.weight" if gpt2 else "embed_tokens.weight"
        # Checkpoints saved from the bare model lack the first component.
        bare = embedding in checkpoint.tensors
        self.prefix = "" if bare else "transformer." if gpt2 else "model."
        self.embedding = self._vocabulary(self.prefix + embedding)
        self.positions: Part | None = None
        if spec.learned_positions:
            self.positions = Part(self.prefix + "wpe.weight", (spec.context_length, spec.hidden_size))
        layer = self._gpt2_layer if gpt2 else self._llama_layer
        self.layers = tuple(layer(index) for index in range(spec.num_layers))
        self.norm = self._norm(self.prefix + {"gpt2": "ln_f", "lfm2": "embedding_norm"}.get(spec.layout, "norm"))
        head, entry = "lm_head.weight", checkpoint.entry
        # A tied checkpoint may still store the head: one that differs is honoured, one that does not is held once.
        tied = spec.tied and (head not in checkpoint.tensors or same_data(entry(head), entry(self.embedding.name)))
        self.head = None if tied else self._vocabulary(head)
        self.unread = {head} if tied else set()
        self.token_inputs = self._token_inputs(spec.gemma4) if spec.gemma4 is not None and spec.gemma4.inputs else None
        if spec.delta is not None:  # Qwen 3.5's layers that guess further tokens
            self.unread |= {name for name in checkpoint.tensors if name.startswith("mtp.")}
        for index in range(spec.num_layers):  # those that others' keys and values are read in place of
            if spec.keys_of(index) != index:
                base = f"{self.prefix}layers.{index}.self_attn."
                self.unread |= {base + f"{name}.weight" for name in ("k_proj", "v_proj", "k_norm")}
        # rotary frequencies and causal masks were stored as buffers by old versions of transformers
        self.harmless = (".attn.bias", ".attn.masked_bias") if gpt2 else (".rotary_emb.inv_freq",)

    def _llama_layer(self, index: int) -> LayerParts:
        spec, base = self.spec, f"{self.prefix}layers.{index}."
        lfm2, attention, attends = spec.layout == "lfm2", base + "self_attn.", spec.attends(index)
        head_norm = "_layernorm.weight" if lfm2 else "_norm.weight"
        q_norm, k_norm = (
            NormParts(Part(attention + name + head_norm, (spec.head_dim_of(index),)))
            if spec.qk_norm and attends and (name == "q" or spec.keys_of(index) == index)
            else None
            for name in ("q", "k")
        )
        delta = conv = space = None
        if attends:
            qkv, o = self._attention(attention, index)
        elif spec.conv is not None:
            qkv, o, conv = self._conv(base + "conv.", spec.conv)
        elif spec.space is not None:
            qkv, o, space = self._space(base + "mamba.", spec.space)
        else:
            qkv, o, delta = self._delta(base + "linear_attn.")
        router, mlps = self._mlps(base, index)
        before_mlp = "pre_feedforward" if spec.output_norms else "post_attention"
        return LayerParts(
            input_norm=self._norm(base + ("operator_norm" if lfm2 else "input_layernorm")),
            qkv=qkv,
            q_norm=q_norm,
            k_norm=k_norm,
            o=o,
            attention_norm=self._norm(base + "post_attention_layernorm") if spec.output_norms else None,
            post_norm=self._norm(base + ("ffn_norm" if lfm2 else f"{before_mlp}_layernorm")),
            router=router,
            mlps=mlps,
            mlp_norm=self._norm(base + "post_feedforward_layernorm") if spec.output_norms else None,
            sinks=Part(attention + "sinks", (spec.num_heads,), self.shard.heads) if spec.sinks else None,
            delta=delta,
            conv=conv,
            space=space,
            shared=self._shared(base, index),
            choice_bias=self._choice_bias(base) if router is not None else None,
            output_scale=Part(base + "layer_scalar", (1,)) if spec.gemma4 is not None else None,
            inputs=self._inputs(base, spec.gemma4.inputs) if spec.gemma4 is not None and spec.gemma4.inputs else None,
            beside=self._beside(base) if spec.mixture is not None and spec.mixture.beside else None,
        )

    def _attention(self, base: str, index: int) -> tuple[LinearParts, LinearParts]:
        """The projections into attention and that of what it gives."""
        spec, shard, dim = self.spec, self.shard, self.spec.head_dim_of(index)
        heads, kv_heads = scaled(shard.heads, dim), scaled(shard.kv_heads_of(spec, index), dim)
        all_heads, all_kv_heads = spec.num_heads * dim, spec.kv_heads_of(index) * dim
        keys: tuple[str, ...] = ("k_proj", "v_proj")
        if spec.keys_of(index) != index:
            keys = ()
        elif spec.gemma4 is not None and spec.gemma4.keys_as_values and spec.windows[index] is None:
            keys = ("k_proj", "k_proj")
        queries, gates = [(base + "q_proj", all_heads, heads)], list[Block]()
        if spec.gated_attention:
            queries, gates = _head_by_head(base + "q_proj", spec.num_heads, (dim, dim), shard.heads)
        qkv = queries + [(base + name, all_kv_heads, kv_heads) for name in keys] + gates
        if spec.layout == "phi3":  # stacked: a rank takes its heads from each part
            starts = (0, all_heads, all_heads + all_kv_heads)
            spans = [moved(span, start) for (_, _, span), start in zip(qkv, starts, strict=True)]
            qkv = [(base + "qkv_proj", all_heads + 2 * all_kv_heads, span) for span in spans]
        projected = self._columns(qkv, spec.hidden_size, spec.qkv_bias)
        output = base + ("out_proj" if spec.layout == "lfm2" else "o_proj")
        return projected, self._rows(output, all_heads, heads, spec.o_bias)

    def _conv(self, base: str, conv: ConvSpec) -> tuple[LinearParts, LinearParts, ConvParts]:
        """The projections into a gated short convolution, that of what it gives, and the rest."""
        hidden, channels = self.spec.hidden_size, self.shard.conv
        projected = [(base + "in_proj", 3 * hidden, moved(channels, part * hidden)) for part in range(3)]
        return (
            self._columns(projected, hidden, conv.bias),
            self._rows(base + "out_proj", hidden, channels, conv.bias),
            ConvParts(
                taps=Part(base + "conv.weight", (hidden, 1, conv.kernel), channels),
                bias=Part(base + "conv.bias", (hidden,), channels) if conv.bias else None,
            ),
        )

    def _space(self, base: str, space: SpaceSpec) -> tuple[LinearParts, LinearParts, SpaceParts]:
        """The projections into a Mamba-2 layer, that of what it gives, and the rest. One rank has all of it."""
        projected, heads = space.width + space.channels + space.heads, (space.heads,)
        return (
            self._columns([(base + "in_proj", projected, (0, projected))], self.spec.hidden_size, space.bias),
            self._rows(base + "out_proj", space.width, (0, space.width), space.bias),
            SpaceParts(
                taps=Part(base + "conv1d.weight", (space.channels, 1, space.kernel)),
                conv_bias=Part(base + "conv1d.bias", (space.channels,)) if space.conv_bias else None,
                rate=Part(base + "A_log", heads),
                step_bias=Part(base + "dt_bias", heads),
                skip=Part(base + "D", heads),
                norm=Part(base + "norm.weight", (space.width,)),
            ),
        )

    def _shared(self, base: str, index: int) -> MlpParts | None:
        """The expert of a mixture that all tokens go through, or the MLP beside it."""
        mixture = self.spec.mixture
        if mixture is not None and mixture.beside:
            return self._mlp(base + "mlp.", mixture.dense_size, self.shard.dense, self.spec.widening_of(index))
        if mixture is None or not mixture.shared:
            return None
        name = "shared_mlp." if self.spec.layout == "granite_hybrid" else "mlp.shared_expert."
        return self._mlp(base + name, mixture.shared, self.shard.shared)

    def _inputs(self, base: str, size: int) -> InputParts:
        gate = (base + "per_layer_input_gate", size, self.shard.inputs)
        return InputParts(
            gate=self._columns([gate], self.spec.hidden_size, False),
            output=self._rows(base + "per_layer_projection", size, self.shard.inputs, False),
            norm=self._norm(base + "post_per_layer_input_norm"),
        )

    def _token_inputs(self, gemma4: Gemma4Spec) -> TokenInputParts:
        """On every rank: all inputs of a layer are normed together."""
        width = self.spec.num_layers * gemma4.inputs
        projected = (self.prefix + "per_layer_model_projection", width, (0, width))
        return TokenInputParts(
            table=Part(self.prefix + "embed_tokens_per_layer.weight", (gemma4.inputs_vocab, width)),
            projection=self._columns([projected], self.spec.hidden_size, False),
            norm=NormParts(Part(self.prefix + "per_layer_projection_norm.weight", (gemma4.inputs,))),
        )

    def _beside(self, base: str) -> BesideParts:
        assert self.spec.mixture is not None
        return BesideParts(
            experts_norm=self._norm(base + "pre_feedforward_layernorm_2"),
            mlp_norm=self._norm(base + "post_feedforward_layernorm_1"),
            made_norm=self._norm(base + "post_feedforward_layernorm_2"),
            router_scale=Part(base + "router.scale", (self.spec.hidden_size,)),
            expert_scales=Part(base + "router.per_expert_scale", (self.spec.mixture.experts,)),
        )

    def _delta(self, base: str) -> tuple[LinearParts, LinearParts, DeltaParts]:
        """The projections into a Gated DeltaNet, that of what it gives, and the rest."""
        delta, shard, hidden = self.spec.delta, self.shard, self.spec.hidden_size
        assert delta is not None
        keys, values = scaled(shard.delta_keys, delta.key_dim), scaled(shard.delta_values, delta.value_dim)
        channels = 2 * delta.keys + delta.values
        mixed = [moved(keys, 0), moved(keys, delta.keys), moved(values, 2 * delta.keys)]
        heads = delta.value_heads, shard.delta_values
        projected = [(base + "in_proj_qkv", channels, span) for span in mixed]
        projected.append((base + "in_proj_z", delta.values, values))
        gates = [(base + name, *heads) for name in ("in_proj_b", "in_proj_a")]
        if delta.by_key_heads:
            each = delta.alike
            gates = [*chain(*_head_by_head(base + "in_proj_ba", delta.key_heads, (each, each), shard.delta_keys))]
            if base + "in_proj_qkv.weight" not in self.stored:  # but in GGUF files
                sizes = (delta.key_dim, delta.key_dim, each * delta.value_dim, each * delta.value_dim)
                projected = [*chain(*_head_by_head(base + "in_proj_qkvz", delta.key_heads, sizes, shard.delta_keys))]
        conv = (channels, 1, delta.kernel)
        return (
            self._columns(projected, hidden, False),
            self._rows(base + "out_proj", delta.values, values, False),
            DeltaParts(
                gates=self._columns(gates, hidden, False),
                conv=tuple(Part(base + "conv1d.weight", conv, span) for span in mixed),
                rate=Part(base + "A_log", heads[:1], heads[1]),
                step_bias=Part(base + "dt_bias", heads[:1], heads[1]),
                norm=Part(base + "norm.weight", (delta.value_dim,)),
            ),
        )

    def _choice_bias(self, base: str) -> Part | None:
        mixture = self.spec.mixture
        if mixture is None or not mixture.choice_bias:
            return None
        return Part(base + "feed_forward.expert_bias", (mixture.experts,))

    def _mlps(self, base: str, index: int) -> tuple[LinearParts | None, tuple[MlpParts, ...]]:
        """The router of a mixture and its experts, or the MLP."""
        mixture, mlp = self.spec.mixture, base + ("feed_forward." if self.spec.layout == "lfm2" else "mlp.")
        channels = self.spec.intermediate_size, self.shard.channels
        if self.spec.layout == "granite_hybrid":
            mlp = base + "shared_mlp."
        if mixture is None:
            return None, (self._mlp(mlp, *channels, self.spec.widening_of(index)),)
        if index < mixture.dense:
            return None, (self._mlp(mlp, mixture.dense_size, self.shard.dense),)
        if self.spec.layout in ("mixtral", "granite_hybrid"):
            mlp = base + "block_sparse_moe."
        gate = mlp + {"gpt_oss": "router", "granite_hybrid": "router.layer"}.get(self.spec.layout, "gate")
        if mixture.beside:
            mlp, gate = base, base + "router.proj"
        bias = (Part(gate + ".bias", (mixture.experts,)),) if mixture.router_bias else ()
        gates = [Part(gate + ".weight", (mixture.experts, self.spec.hidden_size))]
        if mixture.shared and mixture.shared_gate:
            gates.append(Part(mlp + "shared_expert_gate.weight", (1, self.spec.hidden_size)))
        router = LinearParts(tuple(gates), bias)
        apart = mlp + "experts.0.gate_proj.weight" in self.stored  # in GGUF files
        if self.spec.layout == "gpt_oss" and not apart:
            return router, tuple(self._stacked(mlp + "experts.", expert) for expert in range(mixture.experts))
        up, down = mlp + "experts.gate_up_proj", mlp + "experts.down_proj"
        if self.spec.layout == "granite_hybrid":
            up, down = mlp + "input_linear.weight", mlp + "output_linear.weight"
        if up in self.stored and not apart:
            return router, tuple(self._stacked_halves(up, down, expert) for expert in range(mixture.experts))
        return router, tuple(self._mlp(f"{mlp}experts.{expert}.", *channels) for expert in range(mixture.experts))

    def _stacked(self, base: str, expert: int) -> MlpParts:
        """An expert of gpt-oss: those of a layer are one tensor, `[in, out]` each where they are plain, and gates and
        ups lie by turns."""
        assert self.spec.mixture is not None
        hidden, inner, channels = self.spec.hidden_size, self.spec.intermediate_size, self.shard.channels
        stack = expert, self.spec.mixture.experts
        up, down = base + "gate_up_proj", base + "down_proj"
        turns = [(which, 2) for which in (0, 1)]
        weights = tuple(Part(up, (inner, hidden), channels, None, True, stack, turn) for turn in turns)
        biases = tuple(Part(up + "_bias", (inner,), channels, stack=stack, turn=turn) for turn in turns)
        down_weight = Part(down, (hidden, inner), None, channels, True, stack)
        down_bias = Part(down + "_bias", (hidden,), stack=stack)
        first = self.shard.rank == 0
        return MlpParts(LinearParts(weights, biases), LinearParts((down_weight,), (down_bias,), adds_bias=first))

    def _stacked_halves(self, up: str, down: str, expert: int) -> MlpParts:
        """An expert of Qwen3-VL: those of a layer are one tensor, all gates before all ups. Published checkpoints have
        them `[in, out]`, those that newer transformers writes `[out, in]`."""
        assert self.spec.mixture is not None
        hidden, inner, channels = self.spec.hidden_size, self.spec.intermediate_size, self.shard.channels
        count = self.spec.mixture.experts
        shapes = [self.stored[name].shape for name in (up, down) if name in self.stored]
        turned = shapes != [(count, 2 * inner, hidden), (count, hidden, inner)]
        spans = [moved(channels, start) for start in (0, inner)]
        weights = tuple(Part(up, (2 * inner, hidden), span, None, turned, (expert, count)) for span in spans)
        down_weight = Part(down, (hidden, inner), None, channels, turned, (expert, count))
        return MlpParts(LinearParts(weights), LinearParts((down_weight,)))

    def _mlp(self, base: str, inner: int, channels: Span, times: int = 1) -> MlpParts:
        """One of `times` as many channels as `inner`, of which the rank has `channels`."""
        spec, inner, channels = self.spec, times * inner, scaled(channels, times)
        numbered = spec.layout in ("mixtral", "lfm2")
        gate, up, down = ("w1", "w3", "w2") if numbered else ("gate_proj", "up_proj", "down_proj")
        gate_up = [(base + name, inner, channels) for name in (gate, up)]
        if spec.layout in _STACKED and base + "gate_proj.weight" not in self.stored:  # which it is in GGUF files
            stacked, down = _STACKED[spec.layout]
            gate_up = [(base + stacked, 2 * inner, moved(channels, start)) for start in (0, inner)]
        columns = self._columns(gate_up, spec.hidden_size, spec.mlp_bias)
        return MlpParts(columns, self._rows(base + down, inner, channels, spec.mlp_bias))

    def _gpt2_layer(self, index: int) -> LayerParts:
        spec, shard, base = self.spec, self.shard, f"{self.prefix}h.{index}."
        hidden, inner = spec.hidden_size, spec.intermediate_size
        heads = scaled(shard.heads, spec.head_dim)
        # c_attn stacks all queries, all keys, all values: a rank takes its heads from each third
        thirds = [moved(heads, start) for start in (0, hidden, 2 * hidden)]
        qkv = [(base + "attn.c_attn", 3 * hidden, third) for third in thirds]
        return LayerParts(
            input_norm=self._norm(base + "ln_1"),
            qkv=self._columns(qkv, hidden, True, transposed=True),
            q_norm=None,
            k_norm=None,
            o=self._rows(base + "attn.c_proj", hidden, heads, True, transposed=True),
            attention_norm=None,
            post_norm=self._norm(base + "ln_2"),
            router=None,
            mlps=(
                MlpParts(
                    self._columns([(base + "mlp.c_fc", inner, shard.channels)], hidden, True, transposed=True),
                    self._rows(base + "mlp.c_proj", inner, shard.channels, True, transposed=True),
                ),
            ),
            mlp_norm=None,
        )

    def _columns(self, blocks: list[Block], width: int, bias: bool, transposed: bool = False) -> LinearParts:
        """Column-parallel: output rows of this rank, stacked."""
        weights = tuple(Part(name + ".weight", (full, width), span, None, transposed) for name, full, span in blocks)
        biases = tuple(Part(name + ".bias", (full,), span) for name, full, span in blocks)
        return LinearParts(weights, biases if bias else ())

    def _rows(self, name: str, width: int, span: Span, bias: bool, transposed: bool = False) -> LinearParts:
        """Row-parallel: input columns `span` of a matrix `[hidden, width]`."""
        hidden = self.spec.hidden_size
        weight = Part(name + ".weight", (hidden, width), None, span, transposed)
        biases = (Part(name + ".bias", (hidden,)),) if bias else ()
        return LinearParts((weight,), biases, adds_bias=self.shard.rank == 0)

    def _norm(self, name: str) -> NormParts:
        shape = (self.spec.hidden_size,)
        return NormParts(
            Part(name + ".weight", shape), None if self.spec.norm == "rms" else Part(name + ".bias", shape)
        )

    def _vocabulary(self, name: str) -> Part:
        first, last = self.shard.vocab
        vocab = self.spec.vocab_size
        return Part(name, (vocab, self.spec.hidden_size), (min(first, vocab), min(last, vocab)))


def _head_by_head(name: str, count: int, sizes: tuple[int, ...], heads: Span) -> list[list[Block]]:
    """Of a matrix with so many rows of several kinds for each of `count` heads: those of `heads`, kind by kind."""
    whole, starts = sum(sizes), [sum(sizes[:kind]) for kind in range(len(sizes))]
    return [
        [(name, count * whole, moved((start, start + size), head * whole)) for head in range(*heads)]
        for start, size in zip(starts, sizes, strict=True)
    ]
