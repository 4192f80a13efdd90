"""The native decoder in native code: a step is one call when there is one rank, two calls a layer otherwise."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from worker_proc.attention.interface import ForwardBatch
from worker_proc.cpu import delta_net, short_conv
from worker_proc.cpu.attention import AttentionStep, NativeAttention
from worker_proc.cpu.decoder_recurrent import Waves, recurrent_layers
from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.linear import Finish, MatrixStruct, side_by_side
from worker_proc.cpu.memory import HugePages
from worker_proc.cpu.weights import PackedWeights
from worker_proc.kv_cache import KVCache, KVSpec
from worker_proc.models.decoder_layout import Shard
from worker_proc.models.layers import cap, embedding_scale
from worker_proc.models.rope import inverse_frequencies
from worker_proc.models.rope_spec import RopeSpec
from worker_proc.models.spec import CLAMPED_SWIGLU, DecoderSpec
from worker_proc.parallel import TensorParallel


class _LayerStruct(ctypes.Structure):
    """`DecoderLayer` of native/decoder.h."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("qkv", "o", "gate_up", "down", "router")),
        *((name, c_void_p) for name in ("expert_gate_ups", "expert_downs", "delta")),
        ("gates", MatrixStruct),
        *((name, c_void_p) for name in ("conv", "choice_bias")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "attention_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("k_pages", "v_pages", "k_scales", "v_scales", "sinks")),
        ("scale", c_float),
        *((name, c_int32) for name in ("window", "rope", "query_rope")),
    )


class _ModelStruct(ctypes.Structure):
    """`DecoderModel` of native/decoder.h."""

    _fields_ = (
        ("layers", c_void_p),
        ("head", MatrixStruct),
        *((name, c_void_p) for name in ("screen", "embedding", "norm", "inverse_frequencies", "attention_factors")),
        *((name, c_void_p) for name in ("betas", "periods")),
        *((name, c_float) for name in ("norm_eps", "embedding_scale", "residual_scale", "softcap", "share_scale")),
        *((name, c_int32) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "ropes", "rotated")),
        *((name, c_int32) for name in ("gate", "inner", "experts", "experts_each", "renormalizes")),
        *((name, c_int32) for name in ("vocab_first", "vocab_count", "several")),
        *((name, c_int32) for name in ("gated", "projected", "mixed", "shared", "sigmoid")),
    )


class _StepStruct(ctypes.Structure):
    """`DecoderStep` of native/decoder.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("attention", "token_ids", "positions", "slots", "logit_rows", "waves")),
        *((name, c_int64) for name in ("num_waves", "tokens", "num_logits")),
        ("workspace", c_void_p),
        ("op_ns", c_void_p),
    )


# `Operation` of native/decoder.h
OPERATIONS: Final = ("embed", "norm", "qkv", "rotate", "attention", "recurrent", "o", "gate_up", "down", "head")


_GATES = {
    **dict.fromkeys(("silu", "swish"), Finish.SILU_MUL),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), Finish.GELU_MUL),  # the tanh form
    CLAMPED_SWIGLU: Finish.CLAMPED_MUL,
}
_STAGE = [ctypes.POINTER(_ModelStruct), ctypes.POINTER(_StepStruct)]
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "rhizome_decoder_workspace": (c_int64, [ctypes.POINTER(_ModelStruct), c_int64]),
    "rhizome_decoder_embed": (None, _STAGE),
    "rhizome_decoder_attention": (None, [*_STAGE, ctypes.c_int]),
    "rhizome_decoder_mlp": (None, [*_STAGE, ctypes.c_int]),
    "rhizome_decoder_last_tokens": (c_int64, _STAGE[1:]),
    "rhizome_decoder_logits": (None, [*_STAGE, c_void_p, c_int64]),
    "rhizome_decoder_filtered_logits": (None, [*_STAGE, c_void_p, c_void_p, c_int64]),
    "rhizome_decoder_argmax": (None, [*_STAGE, c_void_p, c_void_p]),
    "rhizome_decoder_layers": (None, _STAGE),
}


def supports(spec: DecoderSpec, dtype: torch.dtype) -> bool:
    """Whether `CpuDecoder` computes this model: families with RMSNorm, gated MLPs and rotations, in bfloat16."""
    gated = spec.gated_mlp and spec.activation in _GATES
    rotations = {rope.dim for rope in spec.ropes if rope is not None}
    delta, conv = spec.delta, spec.conv
    known = delta is None or delta_net.knows_sizes(delta.key_dim, delta.value_dim, delta.kernel)
    known &= conv is None or short_conv.knows_sizes(spec.hidden_size, conv.kernel)
    known &= all(rope is None or not rope.query_beta or rope.dim == spec.head_dim for rope in spec.ropes)
    return dtype == torch.bfloat16 and spec.norm == "rms" and gated and len(rotations) == 1 and known


@dataclass(frozen=True, slots=True)
class _Rotations:
    """The rotations of queries and keys that layers of a model have, each once."""

    ropes: tuple[RopeSpec | None, ...]
    frequencies: Tensor  # float32 [ropes, half of the rotated numbers of a head]; layers without a rotation turn by 0
    factors: Tensor  # float32 [ropes]
    betas: Tensor  # float32 [ropes]: of scales by position
    periods: Tensor  # int64 [ropes]

    @classmethod
    def of(cls, spec: DecoderSpec) -> "_Rotations":
        ropes = tuple(dict.fromkeys((*spec.ropes, *map(_of_keys, spec.ropes))))
        (rotated,) = {rope.dim for rope in ropes if rope is not None}
        none = torch.zeros(rotated // 2)
        frequencies = torch.stack([none if rope is None else inverse_frequencies(rope) for rope in ropes])
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
        per_key = 2 * sum(map(spec.attends, range(spec.num_layers))) * heads * spec.head_dim
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
        self._kv_heads = shard.kv_heads[1] - shard.kv_heads[0]
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
        self._step = _StepStruct()  # of the last step, 0 tokens before the first
        self._rotations = _Rotations.of(spec)
        self._norm = weights.norm * spec.logit_scale  # logits are its product with the head
        self._experts = [
            [side_by_side(matrices) for matrices in ([mlp.up for mlp in experts], [mlp.down for mlp in experts])]
            for experts in (layer.experts for layer in weights.layers)
        ]
        self._attending = [index for index in range(spec.num_layers) if spec.attends(index)]
        self._recurrent = recurrent_layers(spec, shard, weights.layers)
        self._layers = (_LayerStruct * spec.num_layers)(*map(self._layer_struct, range(spec.num_layers)))
        self._model = self._model_struct()

    def _layer_struct(self, index: int) -> _LayerStruct:
        """But for the cache, see `_use_cache`."""
        spec, layer = self.spec, self.weights.layers[index]
        every = layer.shared or layer  # the MLP that all tokens go through
        return _LayerStruct(
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
            q_norm=_pointer(layer.q_norm),
            k_norm=_pointer(layer.k_norm),
            sinks=_pointer(layer.sinks),
            scale=spec.scales[index],
            window=spec.windows[index] or 0,
            rope=self._rotations.ropes.index(_of_keys(spec.ropes[index])),
            query_rope=self._rotations.ropes.index(spec.ropes[index]),
        )

    def _model_struct(self) -> _ModelStruct:
        spec, shard, head, rotations = self.spec, self.shard, self.weights.head, self._rotations
        mixture, dim = spec.mixture, spec.head_dim
        shared = mixture is not None and mixture.shared > 0
        dense = mixture is not None and mixture.dense > 0
        first, last = shard.shared if shared else shard.dense if dense else shard.channels
        heads = self._heads * (2 if spec.gated_attention else 1)
        recurrent = [] if self._recurrent is None else [self._recurrent.projected, self._recurrent.mixed]
        return _ModelStruct(
            layers=ctypes.addressof(self._layers),
            head=head.struct,
            screen=None if self.weights.screen is None else ctypes.addressof(self.weights.screen.struct),
            embedding=_pointer(self.weights.embedding),
            norm=self._norm.data_ptr(),
            inverse_frequencies=rotations.frequencies.data_ptr(),
            attention_factors=rotations.factors.data_ptr(),
            betas=rotations.betas.data_ptr(),
            periods=rotations.periods.data_ptr(),
            norm_eps=spec.norm_eps,
            embedding_scale=embedding_scale(spec, torch.bfloat16),
            residual_scale=spec.residual_scale,
            softcap=spec.softcap or 0.0,
            share_scale=mixture.scale if mixture is not None else 1.0,
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            heads=self._heads,
            kv_heads=self._kv_heads,
            head_dim=dim,
            ropes=len(rotations.ropes),
            rotated=2 * rotations.frequencies.shape[1],
            gate=_GATES[spec.activation],
            inner=last - first,
            experts=mixture.experts if mixture is not None else 0,
            experts_each=mixture.each if mixture is not None else 1,
            renormalizes=int(mixture is not None and mixture.renormalizes),
            vocab_first=shard.vocab[0],
            vocab_count=head.outputs,
            several=int(self.tp.size > 1),
            gated=int(spec.gated_attention),
            projected=max([(heads + 2 * self._kv_heads) * dim, *recurrent[:1]]),
            mixed=max([self._heads * dim, *recurrent[1:]]),
            shared=int(shared),
            sigmoid=int(mixture is not None and mixture.sigmoid),
        )

    @property
    def kv_spec(self) -> KVSpec:
        """See `LanguageModel`."""
        dim = self.spec.head_dim
        held = KVSpec.uniform(len(self._attending), self._kv_heads, dim, dim, torch.bfloat16)
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

    def _compute(self, batch: ForwardBatch, cache: KVCache) -> tuple[_StepStruct, AttentionStep]:
        """All layers. What is returned describes the step to the native functions, until the next one."""
        if cache is not self._cache:
            self._use_cache(cache)
        tokens = len(batch.token_ids)
        self._native.work_alone(self._work.of_step(batch) < self.alone_below)
        attention, step = self._attention.step(batch, cache, self._heads), self._step
        if tokens != step.tokens:
            step.tokens, step.workspace = tokens, self._room(tokens)
        step.attention = ctypes.addressof(attention.struct)
        step.token_ids = batch.token_ids.data_ptr()
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
        partial = self._workspace.view(torch.float32)[: tokens * self.spec.hidden_size]
        functions.rhizome_decoder_embed(model, step)
        self.tp.all_reduce(partial)
        for layer in range(self.spec.num_layers):
            if layer == self.spec.num_layers - 1:
                partial = partial[: functions.rhizome_decoder_last_tokens(step) * self.spec.hidden_size]
            for stage in (functions.rhizome_decoder_attention, functions.rhizome_decoder_mlp):
                stage(model, step, layer)
                if len(partial):
                    self.tp.all_reduce(partial)
        return step, attention

    def _use_cache(self, cache: KVCache) -> None:
        self._cache = cache
        for index, layer in enumerate(self._attending):
            struct = self._layers[layer]
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
