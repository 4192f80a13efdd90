"""The native decoder in native code: a step is one call when there is one rank, a call for each stage otherwise."""

import ctypes
from ctypes import c_int64, c_void_p
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker_proc.attention.interface import ForwardBatch
from worker_proc.cpu import delta_net, short_conv, state_space
from worker_proc.cpu.attention import AttentionStep, NativeAttention
from worker_proc.cpu.decoder_recurrent import Waves, recurrent_layers
from worker_proc.cpu.decoder_structs import LayerStruct, ModelStruct, StepStruct
from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.linear import Finish, MatrixStruct, side_by_side
from worker_proc.cpu.memory import HugePages
from worker_proc.cpu.weights import PackedWeights
from worker_proc.kv_cache import KVCache, KVHeads, KVSpec
from worker_proc.models.layers import cap, embedding_scale
from worker_proc.models.rope import inverse_frequencies
from worker_proc.models.rope_spec import RopeSpec
from worker_proc.models.shard import Shard
from worker_proc.models.spec import CLAMPED_SWIGLU, DecoderSpec
from worker_proc.parallel import TensorParallel

_GATES = {
    **dict.fromkeys(("silu", "swish"), Finish.SILU_MUL),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), Finish.GELU_MUL),  # the tanh form
    CLAMPED_SWIGLU: Finish.CLAMPED_MUL,
}
_STAGE = [ctypes.POINTER(ModelStruct), ctypes.POINTER(StepStruct)]
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "rhizome_decoder_workspace": (c_int64, [ctypes.POINTER(ModelStruct), c_int64]),
    "rhizome_decoder_embed": (None, _STAGE),
    "rhizome_decoder_attention": (None, [*_STAGE, ctypes.c_int]),
    "rhizome_decoder_mlp": (None, [*_STAGE, ctypes.c_int]),
    "rhizome_decoder_inputs": (None, [*_STAGE, ctypes.c_int]),
    "rhizome_decoder_last_tokens": (c_int64, _STAGE[1:]),
    "rhizome_decoder_logits": (None, [*_STAGE, c_void_p, c_int64]),
    "rhizome_decoder_filtered_logits": (None, [*_STAGE, c_void_p, c_void_p, c_int64]),
    "rhizome_decoder_argmax": (None, [*_STAGE, c_void_p, c_void_p]),
    "rhizome_decoder_layers": (None, _STAGE),
}


def supports(spec: DecoderSpec, dtype: torch.dtype) -> bool:
    """Whether `CpuDecoder` computes this model: families with RMSNorm, gated MLPs and rotations, in bfloat16."""
    gated = spec.gated_mlp and spec.activation in _GATES
    delta, conv, space = spec.delta, spec.conv, spec.space
    known = delta is None or delta_net.knows_sizes(delta.key_dim, delta.value_dim, delta.kernel)
    known &= space is None or state_space.knows_sizes(space.head_dim, space.state_size, space.kernel)
    known &= conv is None or short_conv.knows_sizes(spec.hidden_size, conv.kernel)
    known &= all(rope is None or not rope.query_beta or rope.dim == spec.head_dim for rope in spec.ropes)
    if spec.gemma4 is not None and spec.gemma4.inputs:
        known &= _GATES.get(spec.activation) is Finish.GELU_MUL
    return dtype == torch.bfloat16 and spec.norm == "rms" and gated and known


@dataclass(frozen=True, slots=True)
class _Rotations:
    """The rotations of queries and keys that layers of a model have, each once."""

    ropes: tuple[RopeSpec | None, ...]
    frequencies: Tensor  # float32 [ropes, half of most rotated numbers of a head]; layers without a rotation turn by 0
    factors: Tensor  # float32 [ropes]
    betas: Tensor  # float32 [ropes]: of scales by position
    periods: Tensor  # int64 [ropes]

    @classmethod
    def of(cls, spec: DecoderSpec) -> "_Rotations":
        ropes = tuple(dict.fromkeys((*spec.ropes, *map(_of_keys, spec.ropes))))
        frequencies = torch.zeros(len(ropes), max((rope.dim for rope in ropes if rope is not None), default=0) // 2)
        for row, rope in zip(frequencies, ropes, strict=True):
            if rope is not None:
                row[: rope.dim // 2] = inverse_frequencies(rope)
        factors = torch.tensor([1.0 if rope is None else rope.attention_factor for rope in ropes])
        betas = torch.tensor([0.0 if rope is None else rope.query_beta for rope in ropes])
        periods = torch.tensor([1 if rope is None else rope.original_context for rope in ropes])
        return cls(ropes, frequencies, factors, betas, periods)


def _of_keys(rope: RopeSpec | None) -> RopeSpec | None:
    """They are not scaled by their positions."""
    return None if rope is None else replace(rope, query_beta=0.0)


@dataclass(frozen=True, slots=True)
class _Work:
    """Multiplications of a rank."""

    per_token: int  # in projections
    per_key: int  # for one query, over all layers
    per_logits: int  # of one token

    @classmethod
    def of(cls, spec: DecoderSpec, heads: int, weights: PackedWeights) -> "_Work":
        each = spec.mixture.each if spec.mixture is not None else 1  # MLPs that a token goes through
        per_token = sum(
            times * matrix.inputs * matrix.outputs
            for layer in weights.layers
            for mlps in (each if layer.experts else 1,)
            for matrix, times in ((layer.qkv, 1), (layer.o, 1), (layer.up, mlps), (layer.down, mlps))
        )
        per_key = 2 * heads * sum(spec.head_dim_of(layer) for layer in filter(spec.attends, range(spec.num_layers)))
        return cls(per_token, per_key, weights.head.inputs * weights.head.outputs)

    def of_step(self, batch: ForwardBatch) -> int:
        """As if each row had one query."""
        projections, logits = len(batch.token_ids) * self.per_token, len(batch.logit_rows) * self.per_logits
        return projections + sum(batch.kv_lens_host) * self.per_key + logits


class CpuDecoder:
    """One rank's share of a model. Implements `LanguageModel`.

    The logits of a token depend on its own context only, to the last bit: neither on the rows beside it nor on the
    number of threads.
    """

    def __init__(
        self, spec: DecoderSpec, shard: Shard, weights: PackedWeights, tp: TensorParallel, native: NativeLibrary
    ) -> None:
        """`spec` must be one that `supports` accepts."""
        self.spec = spec
        self.shard = shard
        self.tp = tp
        self.weights = weights  # keeps alive what the structs point to
        self._heads = shard.heads[1] - shard.heads[0]
        self._work = _Work.of(spec, self._heads, weights)
        self.alone_below = 0  # a step of fewer multiplications is computed by one thread
        self.op_ns: Tensor | None = None  # int64, as long as OPERATIONS: their times are added up here when it is set
        self._native = native
        self._functions = native.functions
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._functions, name)
            function.restype, function.argtypes = result, arguments
        self._attention = NativeAttention(native)
        self._cache: KVCache | None = None
        self._waves: Waves | None = None  # of the last step, where there are recurrent layers
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._step = StepStruct()  # of the last step, 0 tokens before the first
        self._rotations = _Rotations.of(spec)
        self._norm = weights.norm * spec.logit_scale  # logits are its product with the head
        self._experts = [
            [side_by_side(matrices) for matrices in ([mlp.up for mlp in experts], [mlp.down for mlp in experts])]
            for experts in (layer.experts for layer in weights.layers)
        ]
        self._attending = [index for index in range(spec.num_layers) if spec.attends(index)]
        self._writing = [index for index in self._attending if spec.keys_of(index) == index]
        self._kv_heads = [self._heads_of(index) for index in range(spec.num_layers)]
        self._kinds = list(dict.fromkeys(self._kv_heads[index] for index in self._writing))
        self._ones = torch.ones(max(heads.v_dim for heads in self._kv_heads))  # weights of norms without any
        self._recurrent = recurrent_layers(spec, shard, weights.layers)
        self._first_of_kinds = [[self._kv_heads[layer] for layer in self._writing].index(kind) for kind in self._kinds]
        self._batches = (c_void_p * len(self._kinds))()
        self._inputs = spec.gemma4.inputs if spec.gemma4 is not None else 0
        self._token_inputs: Tensor | None = None  # of the last step
        self._beside = spec.mixture is not None and spec.mixture.beside
        # the last layer that writes what others read: from it on, only tokens are computed whose logits are wanted
        self.last_whole = max(
            index for index in range(spec.num_layers) if not spec.attends(index) or spec.keys_of(index) == index
        )
        self._layers = (LayerStruct * spec.num_layers)(*map(self._layer_struct, range(spec.num_layers)))
        self._model = self._model_struct()

    def _heads_of(self, layer: int) -> KVHeads:
        first, last = self.shard.kv_heads_of(self.spec, layer)
        dim = self.spec.head_dim_of(layer)
        return KVHeads(last - first, dim, dim)

    def _layer_struct(self, index: int) -> LayerStruct:
        """But for the cache, see `_use_cache`."""
        spec, layer, rope = self.spec, self.weights.layers[index], self.spec.ropes[index]
        beside, inputs, heads = layer.beside, layer.inputs, self._kv_heads[index]
        every = layer.shared or layer  # the MLP that all tokens go through
        return LayerStruct(
            qkv=layer.qkv.struct,
            o=layer.o.struct,
            gate_up=every.up.struct,
            down=every.down.struct,
            router=layer.router.struct if layer.router is not None else MatrixStruct(),
            expert_gate_ups=ctypes.addressof(self._experts[index][0]),
            expert_downs=ctypes.addressof(self._experts[index][1]),
            **(self._recurrent.fields(index) if self._recurrent is not None else {}),
            choice_bias=_pointer(layer.choice_bias),
            gates=layer.delta.gates.struct if layer.delta is not None else MatrixStruct(),
            input_norm=layer.input_norm.data_ptr(),
            post_norm=layer.post_norm.data_ptr(),
            attention_norm=_pointer(layer.attention_norm),
            mlp_norm=_pointer(layer.mlp_norm),
            router_norm=_pointer(beside.router_norm if beside is not None else None),
            experts_norm=_pointer(beside.experts_norm if beside is not None else None),
            beside_norm=_pointer(beside.mlp_norm if beside is not None else None),
            made_norm=_pointer(beside.made_norm if beside is not None else None),
            expert_scales=_pointer(beside.expert_scales if beside is not None else None),
            q_norm=_pointer(layer.q_norm),
            k_norm=_pointer(layer.k_norm),
            v_norm=_pointer(self._ones if spec.gemma4 is not None else None),
            input_gate=inputs.gate.struct if inputs is not None else MatrixStruct(),
            input_output=inputs.output.struct if inputs is not None else MatrixStruct(),
            inputs_norm=_pointer(inputs.norm if inputs is not None else None),
            sinks=_pointer(layer.sinks),
            scale=spec.scales[index],
            output_scale=1.0 if layer.output_scale is None else layer.output_scale.item(),
            window=spec.windows[index] or 0,
            rope=self._rotations.ropes.index(_of_keys(rope)),
            query_rope=self._rotations.ropes.index(rope),
            rotated=2 * self._rotations.frequencies.shape[1] if rope is None else rope.dim,
            kv_heads=heads.num if spec.keys_of(index) == index else 0,
            head_dim=heads.k_dim,
            batch=self._kinds.index(heads) if spec.attends(index) else 0,
        )

    def _model_struct(self) -> ModelStruct:
        spec, shard, head, rotations = self.spec, self.shard, self.weights.head, self._rotations
        mixture, inputs = spec.mixture, self.weights.token_inputs
        layers = self.weights.layers
        recurrent = [] if self._recurrent is None else [self._recurrent.projected, self._recurrent.mixed]
        projected = [layers[index].qkv.outputs for index in self._attending]
        inner = [(layer.shared or layer).down.inputs for layer in layers]
        return ModelStruct(
            layers=ctypes.addressof(self._layers),
            head=head.struct,
            token_inputs=inputs.projection.struct if inputs is not None else MatrixStruct(),
            screen=None if self.weights.screen is None else ctypes.addressof(self.weights.screen.struct),
            embedding=_pointer(self.weights.embedding),
            norm=self._norm.data_ptr(),
            inverse_frequencies=rotations.frequencies.data_ptr(),
            attention_factors=rotations.factors.data_ptr(),
            token_inputs_norm=_pointer(inputs.norm if inputs is not None else None),
            betas=rotations.betas.data_ptr(),
            periods=rotations.periods.data_ptr(),
            norm_eps=spec.norm_eps,
            embedding_scale=embedding_scale(spec, torch.bfloat16),
            residual_scale=spec.residual_scale,
            softcap=spec.softcap or 0.0,
            share_scale=mixture.scale if mixture is not None else 1.0,
            inputs_scale=float(torch.tensor(self._inputs**0.5).bfloat16()),
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            heads=self._heads,
            ropes=len(rotations.ropes),
            rotated=2 * rotations.frequencies.shape[1],
            gate=_GATES[spec.activation],
            inner=max(*inner, shard.inputs[1] - shard.inputs[0]),
            experts=mixture.experts if mixture is not None else 0,
            experts_each=mixture.each if mixture is not None else 1,
            renormalizes=int(mixture is not None and mixture.renormalizes),
            vocab_first=shard.vocab[0],
            vocab_count=head.outputs,
            several=int(self.tp.size > 1),
            gated=int(spec.gated_attention),
            projected=max([*projected, *recurrent[:1]]),
            mixed=max([*(self._heads * heads.v_dim for heads in self._kinds), *recurrent[1:]]),
            shared=int(mixture is not None and mixture.shared > 0),
            shared_gate=int(mixture is not None and mixture.shared > 0 and mixture.shared_gate),
            sigmoid=int(mixture is not None and mixture.sigmoid),
            beside=int(mixture is not None and mixture.beside),
            inputs=self._inputs,
            first_input=shard.inputs[0],
            last_whole=self.last_whole,
        )

    @property
    def kv_spec(self) -> KVSpec:
        """See `LanguageModel`."""
        held = KVSpec(tuple(self._kv_heads[index] for index in self._writing), torch.bfloat16)
        return held if self._recurrent is None else replace(held, states=self._recurrent.states)

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, without padding."""
        return self.spec.vocab_size

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """See `LanguageModel`."""
        step, attention = self._compute(batch, cache)
        width = self.shard.vocab[1] - self.shard.vocab[0]
        logits = torch.empty(len(batch.logit_rows), width)
        if self.weights.head.outputs < width:
            logits.zero_()
        if batch.filters is not None:  # all the same where there is no screen
            params = batch.filters.data_ptr()
            self._functions.rhizome_decoder_filtered_logits(self._model, step, params, logits.data_ptr(), width)
        else:
            self._functions.rhizome_decoder_logits(self._model, step, logits.data_ptr(), width)
        del attention
        logits = self.tp.gather_to_rank0(logits)[:, : self.spec.vocab_size]
        return cap(logits, self.spec.logit_softcap) if self.spec.logit_softcap else logits

    def greedy(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """The likeliest next tokens, int64 `[S]` on rank 0 (`[0]` elsewhere), without holding logits: what the smallest
        index of the largest number of `forward` is."""
        if self.spec.logit_softcap:  # which may make different logits equal
            return self.forward(batch, cache).argmax(dim=1)
        step, attention = self._compute(batch, cache)
        count = len(batch.logit_rows)
        index, best = torch.empty(count, dtype=torch.int64), torch.empty(count)
        self._functions.rhizome_decoder_argmax(self._model, step, index.data_ptr(), best.data_ptr())
        del attention
        if self.tp.size == 1:
            return index
        bests = self.tp.gather_to_rank0(best[:, None])
        indices = self.tp.gather_to_rank0((index + self.shard.vocab[0])[:, None])
        if self.tp.rank:
            return index[:0]
        return indices.gather(1, bests.max(dim=1).indices[:, None])[:, 0]

    def _compute(self, batch: ForwardBatch, cache: KVCache) -> tuple[StepStruct, list[AttentionStep]]:
        """All layers. What is returned describes the step to the native functions, until the next one."""
        if cache is not self._cache:
            self._use_cache(cache)
        tokens = len(batch.token_ids)
        self._native.work_alone(self._work.of_step(batch) < self.alone_below)
        attention = [self._attention.step(batch, cache, self._heads, layer) for layer in self._first_of_kinds]
        step = self._step
        if tokens != step.tokens:
            step.tokens, step.workspace = tokens, self._room(tokens)
        for kind, each in enumerate(attention):
            self._batches[kind] = ctypes.addressof(each.struct)
        step.attention = ctypes.addressof(self._batches)
        step.token_ids = batch.token_ids.data_ptr()
        if self.weights.token_inputs is not None:
            self._token_inputs = self.weights.token_inputs.table.rows(batch.token_ids)
            step.inputs = self._token_inputs.data_ptr()
        step.positions = batch.positions.data_ptr()
        step.slots = batch.slot_mapping.data_ptr()
        step.logit_rows = batch.logit_rows.data_ptr()
        step.num_logits = len(batch.logit_rows)
        if cache.states is not None:
            self._waves = Waves(batch, cache.states)
            step.waves, step.num_waves = self._waves.address, self._waves.count
        step.op_ns = _pointer(self.op_ns)
        functions, model = self._functions, self._model
        if self.tp.size == 1:
            functions.rhizome_decoder_layers(model, step)
            return step, attention
        whole = tokens * self.spec.hidden_size
        memory = self._workspace.view(torch.float32)
        partial, made = memory[:whole], memory[-(-whole // 16) * 16 :][: whole if self._beside else 0]  # of whole lines
        functions.rhizome_decoder_embed(model, step)
        self.tp.all_reduce(partial)
        for layer in range(self.spec.num_layers):
            if layer == self.last_whole:
                left = functions.rhizome_decoder_last_tokens(step) * self.spec.hidden_size
                partial, made = partial[:left], made[:left]
            functions.rhizome_decoder_attention(model, step, layer)
            self._add_up(partial)
            functions.rhizome_decoder_mlp(model, step, layer)
            self._add_up(partial, made)
            if self._inputs:
                functions.rhizome_decoder_inputs(model, step, layer)
                self._add_up(partial)
        return step, attention

    def _add_up(self, *parts: Tensor) -> None:
        for part in parts:
            if len(part):
                self.tp.all_reduce(part)

    def _use_cache(self, cache: KVCache) -> None:
        self._cache = cache
        for layer in self._attending:
            struct, index = self._layers[layer], self._writing.index(self.spec.keys_of(layer))
            struct.k_pages, struct.v_pages = cache.k[index].data_ptr(), cache.v[index].data_ptr()
            if cache.spec.int8:
                struct.k_scales, struct.v_scales = cache.k_scales[index].data_ptr(), cache.v_scales[index].data_ptr()
        if self._recurrent is not None and cache.states is not None:
            self._recurrent.use(cache.states)

    def _room(self, tokens: int) -> int:
        """The address of a workspace for a step of `tokens`; it grows to that of the largest step seen."""
        needed = int(self._functions.rhizome_decoder_workspace(self._model, tokens))
        if len(self._workspace) < needed:
            self._workspace = HugePages(needed).take(needed, torch.uint8)
        return self._workspace.data_ptr()


def _pointer(tensor: Tensor | None) -> int | None:
    return tensor.data_ptr() if tensor is not None else None
