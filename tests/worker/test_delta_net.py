"""The native Gated DeltaNet against transformers' layers."""

import copy
import random
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from tests import helpers_recurrent
from tests.helpers_hybrid import hybrid_config
from tests.helpers_recurrent import check_bits, check_decodes, check_values, make_batch, packed
from tests.worker.test_cpu_build import needs_compiler
from worker_proc.cpu.delta_net import DeltaNet, supports
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.recurrent import RecurrentStates, StateSave
from worker_proc.waves import waves

pytestmark = needs_compiler

LEVELS = pytest.mark.parametrize("level", cpu_features().levels())
# key heads, value heads, their widths, kernel
SHAPES = [
    (2, 2, 16, 16, 4),
    (2, 4, 32, 16, 4),
    (1, 4, 16, 32, 2),
    (2, 2, 48, 64, 3),
    (1, 2, 128, 128, 4),
    (1, 1, 16, 80, 8),
    (1, 1, 144, 64, 4),
]


def make_layer(kind: str = "qwen3_5_text", shape: tuple[int, ...] = SHAPES[1], seed: int = 0) -> Any:
    """The first layer of a tiny model, in bfloat16."""
    keys, values, k_dim, v_dim, kernel = shape
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(
        hybrid_config(
            kind, linear_num_key_heads=keys, linear_num_value_heads=values, linear_key_head_dim=k_dim,
            linear_value_head_dim=v_dim, linear_conv_kernel_dim=kernel, initializer_range=0.3,
        )
    )  # fmt: skip
    layer = model.model.layers[0].linear_attn
    with torch.no_grad():
        layer.norm.weight.uniform_(0.5, 1.5)
        layer.dt_bias.normal_()
    return layer.to(torch.bfloat16)


@cache
def small_layer(level: Level) -> Any:
    return packed(make_layer(shape=(1, 2, 16, 32, 4)), load_library(level))


def make_states(layer: Any) -> RecurrentStates:
    channels = 2 * layer.num_k_heads * layer.head_k_dim + layer.num_v_heads * layer.head_v_dim
    state = (layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    return helpers_recurrent.make_states((channels, layer.conv1d.weight.shape[-1]), state)


def exact(layer: Any, hidden: Tensor) -> Tensor:
    """Of one sequence, by the layer itself in float32, token by token as its cache goes."""
    kept = DynamicCache(config=hybrid_config("qwen3_5_text"))
    whole = copy.deepcopy(layer).float()
    parts = hidden.float().split([hidden.shape[1] // 2, hidden.shape[1] - hidden.shape[1] // 2], dim=1)
    return torch.cat([whole(part, cache_params=kept) for part in parts if part.shape[1]], dim=1)


@LEVELS
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_the_layer_computes_what_transformers_computes(level: Level, kind: str, shape: tuple[int, ...]) -> None:
    layer = make_layer(kind, shape)
    assert supports(layer)
    check_values(DeltaNet(layer, load_library(level)), make_states(layer), partial(exact, layer))


@LEVELS
@given(data=st.data())
@settings(max_examples=15, deadline=None)
@torch.inference_mode()
def test_bits_do_not_depend_on_batches_and_cuts(level: Level, data: st.DataObject) -> None:
    layer = small_layer(level)
    check_bits(DeltaNet(layer, load_library(level)), partial(make_states, layer), data)


@LEVELS
@torch.inference_mode()
def test_bits_do_not_depend_on_how_many_go_on_together(level: Level) -> None:
    layer = small_layer(level)
    check_decodes(DeltaNet(layer, load_library(level)), partial(make_states, layer), load_library(level))


@given(data=st.data())
@settings(deadline=None)
def test_waves_cover_every_token_once_and_in_order(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    q_lens = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    places = sorted(
        {(row, rng.randint(1, length)) for row, length in enumerate(q_lens) for _ in range(rng.randint(0, 3))}
    )
    saves = tuple(StateSave(row, tokens, 100 + number) for number, (row, tokens) in enumerate(places))
    batch = make_batch(list(range(20, 20 + len(q_lens))), q_lens, saves)
    states = RecurrentStates((), 0, 0)
    firsts = [sum(q_lens[:row]) for row in range(len(q_lens))]
    done, copied = dict.fromkeys(range(len(q_lens)), 0), []
    for segments, copies in waves(batch, states):
        assert segments and len({state for state, _, _ in segments}) == len(segments)
        for state, first, tokens in segments:
            assert first == firsts[state - 20] + done[state - 20] and tokens > 0
            done[state - 20] += tokens
        copied += [(state - 20, done[state - 20], target) for state, target in copies]
    assert list(done.values()) == q_lens
    assert sorted(copied) == [tuple(save) for save in saves]


def test_other_layers_are_left_to_torch() -> None:
    layer = make_layer()
    assert not supports(copy.deepcopy(layer).float())
    assert not supports(layer.norm)
    assert not supports(make_layer(shape=(1, 1, 24, 16, 4)))
    layer.activation = "gelu"
    assert not supports(layer)


def test_without_rows_of_states_the_scratch_row_is_used() -> None:
    batch = replace(make_batch([0, 1], [3, 1]), states=None)
    assert waves(batch, RecurrentStates((), 2, 1)) == [([(3, 0, 3), (3, 3, 1)], [])]
