"""The native short convolution of LFM2 against transformers' layers."""

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
from worker_proc.cpu import delta_net
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.modules import pack_modules
from worker_proc.cpu.short_conv import ShortConv, supports
from worker_proc.recurrent import RecurrentStates, StateKey, StateSave, StateSpec

pytestmark = needs_compiler

LEVELS = pytest.mark.parametrize("level", cpu_features().levels())
CONV = StateKey(0, "conv", 0)


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
    """With native products: torch's depend on how many tokens there are."""
    layer = make_conv()
    pack_modules(layer, load_library(level), compress=False)
    return layer


def make_states(layer: Any, slots: int = 6, snapshots: int = 2) -> RecurrentStates:
    """Of slots with sequences that begin; all others hold NaN."""
    channels, _, kernel = layer.conv.weight.shape
    states = RecurrentStates((StateSpec(CONV, (channels, kernel), torch.bfloat16),), slots, snapshots)
    states.tensors[CONV].fill_(float("nan"))
    states.clear(range(slots))
    return states


@LEVELS
@pytest.mark.parametrize("kind", ["lfm2", "lfm2_moe"])
@pytest.mark.parametrize(("kernel", "bias", "hidden"), [(3, False, 64), (3, True, 48), (1, True, 64), (8, False, 272)])
@torch.inference_mode()
def test_the_layer_computes_what_transformers_computes(
    level: Level, kind: str, kernel: int, bias: bool, hidden: int
) -> None:
    layer = make_conv(kind, kernel, bias, hidden)
    assert supports(layer)
    own, states = ShortConv(layer, load_library(level)), make_states(layer)
    rows = {row: torch.randn(1, length, hidden).bfloat16() for row, length in ((3, 90), (0, 64), (5, 1), (1, 9))}
    found: dict[int, list[Tensor]] = {row: [] for row in rows}
    for steps in ([(3, 70), (0, 64)], [(3, 19), (1, 7), (5, 1)], [(1, 1), (3, 1)], [(1, 1)]):
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
        assert (got - want).norm() < 0.015 * want.norm()


@LEVELS
@given(data=st.data())
@settings(max_examples=15, deadline=None)
@torch.inference_mode()
def test_bits_do_not_depend_on_batches_and_cuts(level: Level, data: st.DataObject) -> None:
    """However rows are cut into chunks and put together, and where states are saved."""
    layer = packed_conv(level)
    own = ShortConv(layer, load_library(level))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    hidden = [torch.randn(1, length, HIDDEN).bfloat16() for length in lengths]
    alone = make_states(layer)
    want = [own.forward(x, make_batch([row], [x.shape[1]]), alone) for row, x in enumerate(hidden)]
    states, done = make_states(layer), [0] * len(lengths)
    found: list[list[Tensor]] = [[] for _ in lengths]
    saved: dict[int, tuple[int, int]] = {}
    while left := [row for row, length in enumerate(lengths) if done[row] < length]:
        rows = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        counts = {row: data.draw(st.integers(1, lengths[row] - done[row])) for row in rows}
        rows.sort(key=lambda row: counts[row] == 1)
        saves = []
        for index, row in enumerate(rows[: states.snapshots]):
            if data.draw(st.booleans()):
                saves.append(StateSave(index, data.draw(st.integers(1, counts[row])), states.slots + index))
                saved[states.slots + index] = row, done[row] + saves[-1].tokens
        x = torch.cat([hidden[row][:, done[row] : done[row] + counts[row]] for row in rows], dim=1)
        out = own.forward(x, make_batch(rows, [counts[row] for row in rows], tuple(saves)), states)
        for row, part in zip(rows, out.split([counts[row] for row in rows], dim=1), strict=True):
            found[row].append(part)
            done[row] += counts[row]
    for row, parts in enumerate(found):
        assert torch.equal(torch.cat(parts, dim=1), want[row])
        assert torch.equal(states.tensors[CONV][row], alone.tensors[CONV][row])
    for target, (row, length) in saved.items():
        again = make_states(layer)
        own.forward(hidden[row][:, :length], make_batch([0], [length]), again)
        assert torch.equal(states.tensors[CONV][target], again.tensors[CONV][0])


def test_other_layers_are_left_to_torch() -> None:
    assert not supports(copy.deepcopy(make_conv()).float())
    assert not supports(make_conv(hidden=72))
    assert not supports(make_conv(kernel=9))
    assert not supports(make_layer())
    assert not delta_net.supports(make_conv())
