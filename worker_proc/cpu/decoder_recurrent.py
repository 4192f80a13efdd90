"""The recurrent layers of the native decoder: what native code is told about them, their states, and a step's waves."""

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Any, ClassVar

import torch
from torch import Tensor

from worker_proc.attention.interface import ForwardBatch
from worker_proc.cpu.delta_net import DeltaStruct
from worker_proc.cpu.short_conv import ConvStruct
from worker_proc.cpu.state_space import SpaceStruct
from worker_proc.cpu.weights import PackedLayer
from worker_proc.models.shard import Shard
from worker_proc.models.spec import ConvSpec, DecoderSpec, DeltaSpec, SpaceSpec
from worker_proc.recurrent import RecurrentStates, StateKey, StateSpec
from worker_proc.waves import waves


class _WaveStruct(ctypes.Structure):
    """`Wave` of native/decoder.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("segments", "copies")),
        *((name, c_int64) for name in ("num_segments", "num_copies")),
    )


class Waves:
    """Those of a step, which is told of them by `address` and `count` while this object lives."""

    def __init__(self, batch: ForwardBatch, states: RecurrentStates) -> None:
        found = waves(batch, states)
        self._numbers = [(_numbers(segments), _numbers(copies)) for segments, copies in found]
        self._structs = (_WaveStruct * len(found))(
            *(
                _WaveStruct(numbers.data_ptr(), copied.data_ptr(), len(segments), len(copies))
                for (numbers, copied), (segments, copies) in zip(self._numbers, found, strict=True)
            )
        )
        self.address, self.count = ctypes.addressof(self._structs), len(found)


class RecurrentLayers:
    """Those of one rank that stand in place of attention: `structs` by layer, for a field of `DecoderLayer`."""

    field: ClassVar[str]

    def __init__(
        self,
        structs: dict[int, Any],
        projected: int,
        mixed: int,
        conv: tuple[int, ...],
        state: tuple[int, ...] | None = None,
    ) -> None:
        """`projected` numbers are made of a token by a layer's first product, `mixed` by the layer. Of a sequence, a
        layer keeps what its convolution saw last, bfloat16 in the shape `conv`, and, where it has one, a float32
        `state`."""
        self.structs = structs
        self.projected = projected
        self.mixed = mixed
        self._kept = [("conv", "conv", conv, torch.bfloat16)]  # field of the struct, name of the state, and what it is
        if state is not None:
            self._kept.append(("state", "recurrent", state, torch.float32))

    def fields(self, layer: int) -> dict[str, int]:
        """What says in the struct of a layer that it is one of these, if it is."""
        return {self.field: ctypes.addressof(self.structs[layer])} if layer in self.structs else {}

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """What is kept of a sequence."""
        return tuple(
            StateSpec(StateKey(index, name, 0), shape, dtype)
            for index in self.structs
            for _, name, shape, dtype in self._kept
        )

    def use(self, states: RecurrentStates) -> None:
        """From now on."""
        for index, struct in self.structs.items():
            for field, name, _, _ in self._kept:
                setattr(struct, field, states.tensors[StateKey(index, name, 0)].data_ptr())


class DeltaLayers(RecurrentLayers):
    """Gated DeltaNets."""

    field = "delta"

    def __init__(self, spec: DeltaSpec, shard: Shard, layers: Sequence[PackedLayer], norm_eps: float) -> None:
        keys, values = (last - first for first, last in (shard.delta_keys, shard.delta_values))
        channels, mixed = 2 * keys * spec.key_dim + values * spec.value_dim, values * spec.value_dim
        structs = {
            index: DeltaStruct(
                conv_weight=layer.delta.conv.data_ptr(),
                rate=layer.delta.rate.data_ptr(),
                dt_bias=layer.delta.step_bias.data_ptr(),
                norm=layer.delta.norm.data_ptr(),
                k_heads=keys,
                v_heads=values,
                k_dim=spec.key_dim,
                v_dim=spec.value_dim,
                kernel=spec.kernel,
                first_head=shard.delta_values[0] if spec.tiled else 0,
                alike=spec.alike,
                eps=norm_eps,
            )
            for index, layer in enumerate(layers)
            if layer.delta is not None
        }
        projected = channels + mixed + 2 * values  # q, k, v, z, b and a
        super().__init__(structs, projected, mixed, (channels, spec.kernel), (values, spec.key_dim, spec.value_dim))


class ConvLayers(RecurrentLayers):
    """Gated short convolutions."""

    field = "conv"

    def __init__(self, spec: ConvSpec, shard: Shard, layers: Sequence[PackedLayer]) -> None:
        channels = shard.conv[1] - shard.conv[0]
        structs = {
            index: ConvStruct(
                weight=layer.conv.taps.data_ptr(),
                bias=layer.conv.bias.data_ptr(),
                channels=channels,
                kernel=spec.kernel,
            )
            for index, layer in enumerate(layers)
            if layer.conv is not None
        }
        super().__init__(structs, 3 * channels, channels, (channels, spec.kernel))


class SpaceLayers(RecurrentLayers):
    """Mamba-2 layers, of one rank."""

    field = "space"

    def __init__(self, spec: SpaceSpec, layers: Sequence[PackedLayer], norm_eps: float) -> None:
        structs = {
            index: SpaceStruct(
                conv_weight=layer.space.taps.data_ptr(),
                conv_bias=layer.space.conv_bias.data_ptr(),
                rate=layer.space.rate.data_ptr(),
                dt_bias=layer.space.step_bias.data_ptr(),
                skip=layer.space.skip.data_ptr(),
                norm=layer.space.norm.data_ptr(),
                heads=spec.heads,
                head_dim=spec.head_dim,
                groups=spec.groups,
                state_size=spec.state_size,
                norm_groups=spec.groups,
                kernel=spec.kernel,
                eps=norm_eps,
                least_dt=spec.least_step,
                most_dt=spec.most_step,
            )
            for index, layer in enumerate(layers)
            if layer.space is not None
        }
        projected, state = spec.width + spec.channels + spec.heads, (spec.heads, spec.head_dim, spec.state_size)
        super().__init__(structs, projected, spec.width, (spec.channels, spec.kernel), state)


def recurrent_layers(spec: DecoderSpec, shard: Shard, layers: Sequence[PackedLayer]) -> RecurrentLayers | None:
    """None where there are none."""
    if spec.delta is not None:
        return DeltaLayers(spec.delta, shard, layers, spec.norm_eps)
    if spec.space is not None:
        return SpaceLayers(spec.space, layers, spec.norm_eps)
    return ConvLayers(spec.conv, shard, layers) if spec.conv is not None else None


def _numbers(rows: Sequence[tuple[int, ...]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)
