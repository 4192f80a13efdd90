"""The native Mamba-2 layer against transformers' layers."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers_hybrid import hybrid_config
from tests.worker.test_cpu_build import needs_compiler
from tests.worker.test_delta_net import HIDDEN, make_batch, make_layer
from worker_proc.cpu import delta_net, short_conv
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.modules import pack_modules
from worker_proc.cpu.state_space import StateSpace, supports
from worker_proc.recurrent import RecurrentStates, StateKey, StateSave, StateSpec

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
    """With native products: torch's depend on how many tokens there are."""
    layer = make_space()
    pack_modules(layer, load_library(level), compress=False)
    return layer


def make_states(layer: Any, slots: int = 6, snapshots: int = 2) -> RecurrentStates:
    """Of slots with sequences that begin; all others hold NaN."""
    conv = StateSpec(StateKey(0, "conv", 0), (layer.conv_dim, layer.conv1d.weight.shape[-1]), torch.bfloat16)
    state = (layer.num_heads, layer.head_dim, layer.ssm_state_size)
    states = RecurrentStates((conv, StateSpec(StateKey(0, "recurrent", 0), state, torch.float32)), slots, snapshots)
    for tensor in states.tensors.values():
        tensor.fill_(float("nan"))
    states.clear(range(slots))
    return states


@LEVELS
@pytest.mark.parametrize("kind", sorted(NAMES))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_the_layer_computes_what_transformers_computes(level: Level, kind: str, shape: tuple[Any, ...]) -> None:
    layer = make_space(kind, shape)
    assert supports(layer)
    own, states = StateSpace(layer, load_library(level)), make_states(layer)
    rows = {row: torch.randn(1, length, HIDDEN).bfloat16() for row, length in ((3, 150), (0, 64), (5, 1), (1, 9))}
    found: dict[int, list[Tensor]] = {row: [] for row in rows}
    for steps in ([(3, 70), (0, 64)], [(3, 79), (1, 7), (5, 1)], [(1, 1), (3, 1)], [(1, 1)]):
        done = {row: sum(part.shape[1] for part in found[row]) for row, _ in steps}
        x = torch.cat([rows[row][:, done[row] : done[row] + length] for row, length in steps], dim=1)
        lengths = [length for _, length in steps]
        out = own.forward(x, make_batch([row for row, _ in steps], lengths), states)
        for (row, _), part in zip(steps, out.split(lengths, dim=1), strict=True):
            found[row].append(part)
    exact = copy.deepcopy(layer).float()
    for row, x in rows.items():
        want, got = exact(x.float()), torch.cat(found[row], dim=1).float()
        assert got.shape == want.shape
        assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.01
        assert (got - want).norm() < 0.02 * want.norm()


@LEVELS
@given(data=st.data())
@settings(max_examples=15, deadline=None)
@torch.inference_mode()
def test_bits_do_not_depend_on_cuts(level: Level, data: st.DataObject) -> None:
    """However a row is cut into chunks beside another one, and where its states are saved."""
    layer = packed_space(level)
    own, length = StateSpace(layer, load_library(level)), data.draw(st.integers(1, 140))
    hidden, beside = (torch.randn(1, length, HIDDEN).bfloat16() for _ in range(2))
    alone, states = make_states(layer), make_states(layer)
    want = own.forward(hidden, make_batch([2], [length]), alone)
    done, parts = 0, []
    while done < length:
        count = data.draw(st.integers(1, length - done))
        saved = data.draw(st.integers(1, count))
        x = torch.cat((beside[:, done : done + count], hidden[:, done : done + count]), dim=1)
        batch = make_batch([0, 2], [count, count], (StateSave(1, saved, states.slots),))
        parts.append(own.forward(x, batch, states)[:, count:])
        again = make_states(layer)
        own.forward(hidden[:, : done + saved], make_batch([4], [done + saved]), again)
        assert all(torch.equal(held[states.slots], again.tensors[key][4]) for key, held in states.tensors.items())
        done += count
    assert torch.equal(torch.cat(parts, dim=1), want)
    assert all(torch.equal(held[2], alone.tensors[key][2]) for key, held in states.tensors.items())


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
