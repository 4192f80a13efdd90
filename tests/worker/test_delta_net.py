"""The native Gated DeltaNet against transformers' layers."""

import copy
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from tests.helpers_hybrid import hybrid_config
from tests.worker.test_cpu_build import needs_compiler
from worker_proc.attention.interface import ForwardBatch
from worker_proc.cpu.delta_net import DeltaNet, supports
from worker_proc.cpu.features import Level, cpu_features
from worker_proc.cpu.library import load_library
from worker_proc.cpu.modules import pack_modules
from worker_proc.recurrent import RecurrentStates, StateKey, StateRows, StateSave, StateSpec
from worker_proc.waves import waves

pytestmark = needs_compiler

LEVELS = pytest.mark.parametrize("level", cpu_features().levels())
HIDDEN = 64
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
    """With native products: torch's depend on how many tokens there are."""
    layer = make_layer(shape=(1, 2, 16, 32, 4))
    pack_modules(layer, load_library(level), compress=False)
    return layer


def make_states(layer: Any, slots: int = 6, snapshots: int = 2) -> RecurrentStates:
    channels = 2 * layer.num_k_heads * layer.head_k_dim + layer.num_v_heads * layer.head_v_dim
    conv = StateSpec(StateKey(0, "conv", 0), (channels, layer.conv1d.weight.shape[-1]), torch.bfloat16)
    state = (layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    states = RecurrentStates((conv, StateSpec(StateKey(0, "recurrent", 0), state, torch.float32)), slots, snapshots)
    for tensor in states.tensors.values():
        tensor.fill_(float("nan"))
    states.clear(range(slots))
    return states


def make_batch(rows: list[int], q_lens: list[int], saves: tuple[StateSave, ...] = ()) -> ForwardBatch:
    """Of these state rows and tokens; nothing else of it is looked at."""
    none = torch.empty(0, dtype=torch.int64)
    chunks = sum(length > 1 for length in q_lens)
    return ForwardBatch(none, none, none, none, none, q_lens, q_lens, chunks, none, states=StateRows(rows, saves))


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
    net, states = DeltaNet(layer, load_library(level)), make_states(layer)
    hidden = {row: torch.randn(1, length, HIDDEN).bfloat16() for row, length in ((3, 150), (0, 64), (5, 1), (1, 9))}
    found: dict[int, list[Tensor]] = {row: [] for row in hidden}
    for steps in ([(3, 70), (0, 64)], [(3, 79), (1, 7), (5, 1)], [(1, 1), (3, 1)], [(1, 1)]):
        rows, q_lens = [row for row, _ in steps], [length for _, length in steps]
        done = {row: sum(part.shape[1] for part in found[row]) for row in rows}
        x = torch.cat([hidden[row][:, done[row] : done[row] + length] for row, length in steps], dim=1)
        out = net.forward(x, make_batch(rows, q_lens), states)
        for row, part in zip(rows, out.split(q_lens, dim=1), strict=True):
            found[row].append(part)
    for row, x in hidden.items():
        want, got = exact(layer, x), torch.cat(found[row], dim=1).float()
        assert got.shape == want.shape
        # a row whose output is nearly nothing before its norm may be off by more
        assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.01
        assert (got - want).norm() < 0.02 * want.norm()


@LEVELS
@given(data=st.data())
@settings(max_examples=15, deadline=None)
@torch.inference_mode()
def test_bits_do_not_depend_on_batches_and_cuts(level: Level, data: st.DataObject) -> None:
    """However rows are cut into chunks and put together, and where states are saved."""
    layer = small_layer(level)
    net = DeltaNet(layer, load_library(level))
    lengths = data.draw(st.lists(st.integers(1, 140), min_size=1, max_size=4))
    hidden = [torch.randn(1, length, HIDDEN).bfloat16() for length in lengths]
    alone = make_states(layer)
    want = [net.forward(x, make_batch([row], [x.shape[1]]), alone) for row, x in enumerate(hidden)]
    states, done = make_states(layer), [0] * len(lengths)
    found: list[list[Tensor]] = [[] for _ in lengths]
    saved: dict[int, tuple[int, int]] = {}
    while any(count < length for count, length in zip(done, lengths, strict=True)):
        left = [row for row, length in enumerate(lengths) if done[row] < length]
        rows = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        counts = {row: data.draw(st.integers(1, lengths[row] - done[row])) for row in rows}
        rows.sort(key=lambda row: counts[row] == 1)
        saves = []
        for index, row in enumerate(rows):
            target = states.slots + len(saves)
            if target < states.scratch and data.draw(st.booleans()):
                tokens = data.draw(st.integers(1, counts[row]))
                saves.append(StateSave(index, tokens, target))
                saved[target] = row, done[row] + tokens
        x = torch.cat([hidden[row][:, done[row] : done[row] + counts[row]] for row in rows], dim=1)
        out = net.forward(x, make_batch(rows, [counts[row] for row in rows], tuple(saves)), states)
        for row, part in zip(rows, out.split([counts[row] for row in rows], dim=1), strict=True):
            found[row].append(part)
            done[row] += counts[row]
    for row, parts in enumerate(found):
        assert torch.equal(torch.cat(parts, dim=1), want[row])
        assert all(torch.equal(tensor[row], alone.tensors[key][row]) for key, tensor in states.tensors.items())
    for target, (row, length) in saved.items():
        again = make_states(layer)
        net.forward(hidden[row][:, :length], make_batch([0], [length]), again)
        assert all(torch.equal(tensor[target], again.tensors[key][0]) for key, tensor in states.tensors.items())


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
