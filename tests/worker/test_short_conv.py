"""The native short convolution of LFM2 against transformers' layers."""

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
from tests.helpers_recurrent import HIDDEN, check_bits, check_values, packed
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_delta_net import make_layer
from worker_proc.cpu import delta_net
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.short_conv import ShortConv, supports
from worker_proc.recurrent import RecurrentStates

pytestmark = needs_compiler

LEVELS = pytest.mark.parametrize("level", cpu_features().levels())


def make_conv(kind: str = "lfm2", kernel: int = 3, bias: bool = False, hidden: int = HIDDEN) -> Any:
    """The first layer of a tiny model, in bfloat16."""
    torch.manual_seed(kernel)
    config = hybrid_config(kind, hidden_size=hidden, conv_L_cache=kernel, conv_bias=bias, initializer_range=0.3)
    model: Any = AutoModelForCausalLM.from_config(config)
    layer = model.model.layers[0].conv
    if bias:
        torch.nn.init.normal_(layer.conv.bias)
    return layer.to(torch.bfloat16)


@cache
def packed_conv(level: Level) -> Any:
    return packed(make_conv(), load_library(level))


def make_states(layer: Any) -> RecurrentStates:
    channels, _, kernel = layer.conv.weight.shape
    return helpers_recurrent.make_states((channels, kernel))


@LEVELS
@pytest.mark.parametrize("kind", ["lfm2", "lfm2_moe"])
@pytest.mark.parametrize(("kernel", "bias", "hidden"), [(3, False, 64), (3, True, 48), (1, True, 64), (8, False, 272)])
@torch.inference_mode()
def test_the_layer_computes_what_transformers_computes(
    level: Level, kind: str, kernel: int, bias: bool, hidden: int
) -> None:
    layer = make_conv(kind, kernel, bias, hidden)
    assert supports(layer)
    exact = copy.deepcopy(layer).float()
    own = ShortConv(layer, load_library(level))
    check_values(own, make_states(layer), lambda x: exact(x.float()), hidden)


@LEVELS
@given(data=st.data())
@settings(max_examples=15, deadline=None)
@torch.inference_mode()
def test_bits_do_not_depend_on_batches_and_cuts(level: Level, data: st.DataObject) -> None:
    layer = packed_conv(level)
    check_bits(ShortConv(layer, load_library(level)), partial(make_states, layer), data)


def test_other_layers_are_left_to_torch() -> None:
    assert not supports(copy.deepcopy(make_conv()).float())
    assert not supports(make_conv(hidden=72))
    assert not supports(make_conv(kernel=9))
    assert not supports(make_layer())
    assert not delta_net.supports(make_conv())
