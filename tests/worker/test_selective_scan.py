"""The native Mamba-1 layer against transformers' layers."""

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests import helpers_recurrent
from tests.helpers_hybrid import hybrid_config
from tests.helpers_recurrent import HIDDEN, LENGTHS, STEPS, Sequences, check_bits, make_batch, packed
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_delta_net import make_layer
from tests.worker.test_state_space import make_space
from worker_proc.cpu import delta_net, short_conv, state_space
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.selective_scan import NativeScan, supports
from worker_proc.recurrent import RecurrentStates

pytestmark = needs_compiler

LEVELS = pytest.mark.parametrize("level", cpu_features().levels())
NAMES = {  # of expansion, states, kernel, bias of the convolution, of the projections, and the rank of step sizes
    "mamba": ("expand", "state_size", "conv_kernel", "use_conv_bias", "use_bias", "time_step_rank"),
    "jamba": ("mamba_expand", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias", "mamba_proj_bias", "mamba_dt_rank"),
}
NAMES["falcon_mamba"] = NAMES["mamba"]
SHAPES = [(2, 16, 4, True, False, 8), (1, 8, 3, False, True, 4), (3, 64, 2, True, True, 33), (5, 5, 4, True, False, 1)]


def make_scan(kind: str = "jamba", shape: tuple[Any, ...] = SHAPES[0]) -> Any:
    """The first layer of a tiny model, in bfloat16."""
    torch.manual_seed(1)
    config = hybrid_config(kind, **dict(zip(NAMES[kind], shape, strict=True)), initializer_range=0.3)
    if kind != "jamba":
        config.intermediate_size = shape[0] * config.hidden_size
    model: Any = AutoModelForCausalLM.from_config(config)
    layer = model.model.layers[0].mamba if kind == "jamba" else model.backbone.layers[0].mixer
    with torch.no_grad():
        layer.D.normal_()
        layer.A_log.normal_()
        layer.dt_proj.bias.normal_(-1.0, 2.0)
    return layer.to(torch.bfloat16)


@cache
def packed_scan(level: Level) -> Any:
    return packed(make_scan(), load_library(level))


def make_states(layer: Any) -> RecurrentStates:
    channels, states = layer.A_log.shape
    return helpers_recurrent.make_states((channels, layer.conv1d.weight.shape[-1]), (channels, states))


@LEVELS
@pytest.mark.parametrize("kind", sorted(NAMES))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_the_layer_computes_what_transformers_computes(level: Level, kind: str, shape: tuple[Any, ...]) -> None:
    layer = make_scan(kind, shape)
    assert supports(layer)
    exact = copy.deepcopy(layer).float()
    inputs = {row: torch.randn(1, length, HIDDEN).bfloat16() for row, length in LENGTHS.items()}
    sequences = Sequences(NativeScan(layer, load_library(level)), make_states(layer), inputs)
    for counts in STEPS:
        sequences.step(counts)
    want, own, theirs = (
        torch.cat([make(row, x).float() for row, x in inputs.items()], dim=1)
        for make in (lambda _, x: exact(x.float()), lambda row, _: sequences.made(row), lambda _, x: layer(x))
    )
    assert (own - want).norm() <= (theirs - want).norm() < 0.02 * want.norm(), "what is rounded is what they round"


@LEVELS
@given(data=st.data())
@settings(max_examples=15, deadline=None)
@torch.inference_mode()
def test_bits_do_not_depend_on_batches_and_cuts(level: Level, data: st.DataObject) -> None:
    layer = packed_scan(level)
    check_bits(NativeScan(layer, load_library(level)), partial(make_states, layer), data)


@LEVELS
@torch.inference_mode()
def test_step_sizes_of_all_sizes(level: Level) -> None:
    """From those that keep a state as it is to those that forget it at once."""
    layer = make_scan("mamba")
    for bias in (-120.0, -40.0, -17.0, -3.0, 0.0, 0.5, 3.0, 25.0, 120.0):
        layer.dt_proj.bias.fill_(bias)
        hidden = torch.randn(1, 30, HIDDEN).bfloat16()
        got = NativeScan(layer, load_library(level)).forward(hidden, make_batch([0], [30]), make_states(layer)).float()
        want = copy.deepcopy(layer).float()(hidden.float())
        assert (got - want).norm() < 0.02 * want.norm()


def test_other_layers_are_left_alone() -> None:
    layer = make_scan()
    assert not supports(copy.deepcopy(layer).float())
    assert not supports(make_layer()) and not supports(make_space())
    assert not any(kind.supports(layer) for kind in (delta_net, short_conv, state_space))
    layer.act = torch.nn.GELU()
    assert not supports(layer)
    assert not supports(make_scan(shape=(2, 65, 4, True, False, 8)))
