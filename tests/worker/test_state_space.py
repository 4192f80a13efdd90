"""The native Mamba-2 layer against transformers' layers."""

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
from tests.helpers_recurrent import HIDDEN, check_bits, check_decodes, check_values, make_batch, packed
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_delta_net import make_layer
from worker_proc.cpu import delta_net, short_conv
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.state_space import StateSpace, supports
from worker_proc.recurrent import RecurrentStates

pytestmark = needs_compiler

LEVELS = pytest.mark.parametrize("level", cpu_features().levels())
NAMES = {  # of heads, their width, groups, state, kernel, bias of the convolution
    "granitemoehybrid": (
        "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias",
    ),
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias"),
}  # fmt: skip
NAMES["bamba"] = NAMES["granitemoehybrid"]
SHAPES = [(8, 16, 1, 16, 4, True), (4, 32, 2, 64, 4, True), (2, 64, 1, 128, 2, False), (8, 16, 4, 48, 3, True)]


def make_space(kind: str = "granitemoehybrid", shape: tuple[Any, ...] = SHAPES[1]) -> Any:
    """The first layer of a tiny model, in bfloat16."""
    torch.manual_seed(1)
    config = hybrid_config(kind, **dict(zip(NAMES[kind], shape, strict=True)), initializer_range=0.3)
    model: Any = AutoModelForCausalLM.from_config(config)
    layer = model.model.layers[0].mamba if kind != "nemotron_h" else model.model.layers[0].mixer
    with torch.no_grad():
        layer.norm.weight.uniform_(0.5, 1.5)
        layer.dt_bias.normal_(-1.0, 2.0)
        layer.D.normal_()
        layer.A_log.normal_()
    return layer.to(torch.bfloat16)


@cache
def packed_space(level: Level) -> Any:
    return packed(make_space(), load_library(level))


def make_states(layer: Any) -> RecurrentStates:
    conv = (layer.conv_dim, layer.conv1d.weight.shape[-1])
    return helpers_recurrent.make_states(conv, (layer.num_heads, layer.head_dim, layer.ssm_state_size))


@LEVELS
@pytest.mark.parametrize("kind", sorted(NAMES))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_the_layer_computes_what_transformers_computes(level: Level, kind: str, shape: tuple[Any, ...]) -> None:
    layer = make_space(kind, shape)
    assert supports(layer)
    exact = copy.deepcopy(layer).float()
    check_values(StateSpace(layer, load_library(level)), make_states(layer), lambda x: exact(x.float()))


@LEVELS
@given(data=st.data())
@settings(max_examples=15, deadline=None)
@torch.inference_mode()
def test_bits_do_not_depend_on_batches_and_cuts(level: Level, data: st.DataObject) -> None:
    layer = packed_space(level)
    check_bits(StateSpace(layer, load_library(level)), partial(make_states, layer), data)


@LEVELS
@torch.inference_mode()
def test_bits_do_not_depend_on_how_many_go_on_together(level: Level) -> None:
    layer = packed_space(level)
    check_decodes(StateSpace(layer, load_library(level)), partial(make_states, layer), load_library(level))


@torch.inference_mode()
def test_step_sizes_are_bounded_in_decodes_too() -> None:
    """Nemotron-H bounds them from below."""
    layer = make_space("nemotron_h")
    layer.dt_bias.fill_(-12.0)
    hidden = torch.randn(1, 30, HIDDEN).bfloat16()
    own, states = StateSpace(layer, load_library(cpu_features().levels()[0])), make_states(layer)
    whole = own.forward(hidden, make_batch([0], [30]), states)
    steps = [own.forward(hidden[:, i : i + 1], make_batch([1], [1]), states) for i in range(30)]
    want = copy.deepcopy(layer).float()(hidden.float())
    for got in (whole, torch.cat(steps, dim=1)):
        assert (got.float() - want).norm() < 0.02 * want.norm()


def test_other_layers_are_left_alone() -> None:
    layer = make_space()
    assert not supports(copy.deepcopy(layer).float())
    assert not supports(make_layer())
    assert not delta_net.supports(layer) and not short_conv.supports(layer)
    for name, value in (("activation", "gelu"), ("time_step_limit", None), ("mup_vector", 1)):
        other = copy.deepcopy(layer)
        setattr(other, name, value)
        assert not supports(other)
