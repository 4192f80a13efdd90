"""Runs native recurrent layers as a worker does: rows in chunks and single tokens, their states saved on the way."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from worker_proc.attention.interface import ForwardBatch
from worker_proc.cpu.library import NativeLibrary
from worker_proc.cpu.modules import pack_modules
from worker_proc.recurrent import RecurrentStates, StateKey, StateRows, StateSave, StateSpec

HIDDEN = 64
CONV, RECURRENT = StateKey(0, "conv", 0), StateKey(0, "recurrent", 0)

SLOTS = 12

# rows with lengths, and the steps in which they are computed: rows and tokens
LENGTHS = {3: 150, 0: 64, 5: 1, 1: 9}
STEPS = ([(3, 70), (0, 64)], [(3, 79), (1, 7), (5, 1)], [(1, 1), (3, 1)], [(1, 1)])


class Layer(Protocol):
    def forward(self, hidden: Tensor, batch: ForwardBatch, states: RecurrentStates) -> Tensor: ...


def packed(layer: Any, library: NativeLibrary) -> Any:
    """The layer with native products: torch's depend on how many tokens there are."""
    pack_modules(nn.ModuleList([layer]), library, compress=False)
    return layer


def make_states(conv: tuple[int, ...], recurrent: tuple[int, ...] | None = None) -> RecurrentStates:
    """Of slots with sequences that begin, and of two snapshots; all others hold NaN."""
    specs = [StateSpec(CONV, conv, torch.bfloat16)]
    if recurrent is not None:
        specs.append(StateSpec(RECURRENT, recurrent, torch.float32))
    states = RecurrentStates(specs, SLOTS, 2)
    for tensor in states.tensors.values():
        tensor.fill_(float("nan"))
    states.clear(range(states.slots))
    return states


def make_batch(rows: list[int], q_lens: list[int], saves: tuple[StateSave, ...] = ()) -> ForwardBatch:
    """Of these state rows and tokens; nothing else of it is looked at."""
    none = torch.empty(0, dtype=torch.int64)
    chunks = sum(length > 1 for length in q_lens)
    return ForwardBatch(none, none, none, none, none, q_lens, q_lens, chunks, none, states=StateRows(rows, saves))


class Sequences:
    """Rows of a layer's inputs, and what it has made of them so far."""

    def __init__(self, layer: Layer, states: RecurrentStates, inputs: dict[int, Tensor]) -> None:
        self.done = dict.fromkeys(inputs, 0)
        self._made: dict[int, list[Tensor]] = {row: [] for row in inputs}
        self._layer, self._states, self._inputs = layer, states, inputs

    def step(self, counts: Sequence[tuple[int, int]], saves: tuple[StateSave, ...] = ()) -> None:
        """So many tokens further of these rows."""
        x = torch.cat([self._inputs[row][:, self.done[row] : self.done[row] + count] for row, count in counts], dim=1)
        lengths = [count for _, count in counts]
        out = self._layer.forward(x, make_batch([row for row, _ in counts], lengths, saves), self._states)
        for (row, count), part in zip(counts, out.split(lengths, dim=1), strict=True):
            self._made[row].append(part)
            self.done[row] += count

    def made(self, row: int) -> Tensor:
        return torch.cat(self._made[row], dim=1)


def check_values(
    layer: Layer, states: RecurrentStates, exact: Callable[[Tensor], Tensor], hidden: int = HIDDEN
) -> None:
    """Rows computed in `STEPS` are what `exact` makes of each in float32, but for rounding."""
    inputs = {row: torch.randn(1, length, hidden).bfloat16() for row, length in LENGTHS.items()}
    sequences = Sequences(layer, states, inputs)
    for counts in STEPS:
        sequences.step(counts)
    for row, x in inputs.items():
        want, got = exact(x), sequences.made(row).float()
        assert got.shape == want.shape
        # a token whose output is nearly nothing before a norm may be off by more
        assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.01
        assert (got - want).norm() < 0.02 * want.norm()


def check_bits(layer: Layer, fresh: Callable[[], RecurrentStates], data: st.DataObject) -> None:
    """Outputs and states have the same bits however rows are cut into chunks and put together, and saved states those
    of a sequence that ends there."""
    lengths = dict(enumerate(data.draw(st.lists(st.integers(1, 140), min_size=1, max_size=4))))
    inputs = {row: torch.randn(1, length, HIDDEN).bfloat16() for row, length in lengths.items()}
    alone, states = fresh(), fresh()
    want = {row: layer.forward(x, make_batch([row], [x.shape[1]]), alone) for row, x in inputs.items()}
    sequences, saved = Sequences(layer, states, inputs), {}
    while left := [row for row, length in lengths.items() if sequences.done[row] < length]:
        rows = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        counts = [(row, data.draw(st.integers(1, lengths[row] - sequences.done[row]))) for row in rows]
        counts.sort(key=lambda row: row[1] == 1)
        saves = []
        for index, (row, count) in enumerate(counts[: states.snapshots]):
            if data.draw(st.booleans()):
                saves.append(StateSave(index, data.draw(st.integers(1, count)), states.slots + index))
                saved[saves[-1].target] = row, sequences.done[row] + saves[-1].tokens
        sequences.step(counts, tuple(saves))
    for row, output in want.items():
        assert torch.equal(sequences.made(row), output)
        assert same_states(states, row, alone, row)
    for target, (row, length) in saved.items():
        again = fresh()
        layer.forward(inputs[row][:, :length], make_batch([0], [length]), again)
        assert same_states(states, target, again, 0)


def check_decodes(layer: Layer, fresh: Callable[[], RecurrentStates], native: NativeLibrary) -> None:
    """Many sequences go on by single tokens, by two threads and by one, with the bits that each has alone."""
    inputs = torch.randn(SLOTS, 9, HIDDEN).bfloat16()
    want, alone = [], fresh()
    for row in range(SLOTS):
        begin, *steps = inputs[row : row + 1].split([6, 1, 1, 1], dim=1)
        made = [layer.forward(begin, make_batch([row], [6]), alone)]
        want.append(made + [layer.forward(x, make_batch([row], [1]), alone) for x in steps])
    for threads in (2, 1):
        native.set_threads(threads)
        states, rows = fresh(), list(range(SLOTS))[::-1]
        for row in rows:
            layer.forward(inputs[row : row + 1, :6], make_batch([row], [6]), states)
        for step in range(3):
            x = inputs[rows, 6 + step].unsqueeze(0)
            out = layer.forward(x, make_batch(rows, [1] * SLOTS), states)
            assert torch.equal(out[0], torch.cat([want[row][1 + step][0] for row in rows]))
        assert all(same_states(states, row, alone, row) for row in rows)


def same_states(states: RecurrentStates, row: int, others: RecurrentStates, other: int) -> bool:
    return all(torch.equal(tensor[row], others.tensors[key][other]) for key, tensor in states.tensors.items())
