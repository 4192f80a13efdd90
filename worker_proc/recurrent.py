"""What recurrent layers keep of a sequence: states of fixed size, updated in place by every token.

There are layers of convolutions (LFM2), of linear attention (Gated DeltaNet, Yang et al., 2024; Qwen3-Next) and state
spaces (Mamba-2, Dao and Gu, 2024). All states of one sequence are a row: row s belongs to slot s, those after the slots
are snapshots, from which other sequences that begin with the same tokens start. Which snapshot holds what is the
scheduler's business.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from common.messages import StepPlan
from worker_proc.cpu.memory import make_tensors
from worker_proc.errors import PlanError


class StateKey(NamedTuple):
    """One of the tensors that a layer keeps."""

    layer: int
    kind: str  # "conv": the last inputs of a convolution, or "recurrent"
    number: int  # a layer may have several of a kind


class StateSpec(NamedTuple):
    """A tensor that a layer keeps of each sequence."""

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StateSave(NamedTuple):
    """After `tokens` tokens of its row of a batch, a sequence's states are copied to the row `target` of all states."""

    row: int
    tokens: int
    target: int


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """Where the rows of a batch have their states, and which are saved on the way, ascending by row and tokens. `index`
    is what `rows` are, int64 `[B]` on the device, where it is known there; in a graph, whose rows differ from replay to
    replay, there is that alone."""

    rows: list[int]
    saves: Sequence[StateSave] = ()
    index: torch.Tensor | None = None


class RecurrentStates:
    """The states of `slots` sequences, `snapshots` more, and one that takes what nobody reads (`scratch`)."""

    def __init__(
        self, specs: Sequence[StateSpec], slots: int, snapshots: int, device: torch.device | str = "cpu"
    ) -> None:
        self.slots = slots
        self.snapshots = snapshots
        self.scratch = slots + snapshots
        kinds = [((self.scratch + 1, *spec.shape), spec.dtype) for spec in specs]
        tensors = make_tensors(kinds, torch.device(device))
        self.tensors = {spec.key: tensor for spec, tensor in zip(specs, tensors, strict=True)}  # [scratch + 1, *shape]
        self.clear([self.scratch])

    def apply(self, plan: StepPlan) -> None:
        """Slots that are entered begin with nothing, or with a snapshot. Raises PlanError if the plan contradicts.
        Without room for slots (a trial) there is nothing to begin with."""
        if not self.slots or not (plan.enter_slots or plan.state_loads):
            return
        for slot, snapshot in zip(plan.state_loads[::2], plan.state_loads[1::2], strict=True):
            self.copy(self._snapshot(snapshot), slot)
        loaded = set(plan.state_loads[::2])
        if len(loaded) * 2 != len(plan.state_loads):
            raise PlanError("state_loads: a slot is named twice")
        fresh = []
        for slot, length in zip(plan.enter_slots, plan.enter_lens, strict=True):
            if (slot in loaded) != (length > 0):
                have = "none" if length else "one"
                raise PlanError(f"state_loads: {have} for slot {slot}, which enters with {length} tokens")
            if not length:
                fresh.append(slot)
        if not loaded <= set(plan.enter_slots):
            raise PlanError("state_loads: only for slots that are entered")
        self.clear(fresh)

    def rows_of(self, slots: Sequence[int], kv_lens: Sequence[int], q_lens: Sequence[int], plan: StepPlan) -> StateRows:
        """Of a batch whose rows are of these slots: they have `kv_lens` tokens after the step, `q_lens` of them new.
        Raises PlanError if the plan's saves are not of these."""
        rows = [min(slot, self.scratch) for slot in slots]  # in a trial, all use that
        if not plan.state_saves:
            return StateRows(rows)
        place = {slot: row for row, slot in enumerate(slots)}
        saves = []
        columns = (plan.state_saves[part::3] for part in range(3))
        for slot, length, snapshot in zip(*columns, strict=True):
            row = place.get(slot)
            tokens = 0 if row is None else length - kv_lens[row] + q_lens[row]
            if row is None or not 0 < tokens <= q_lens[row]:
                raise PlanError(f"state_saves: this step does not compute token {length} of slot {slot}")
            saves.append(StateSave(row, tokens, self._snapshot(snapshot)))
        if len({save.target for save in saves}) != len(saves):
            raise PlanError("state_saves: a snapshot is named twice")
        return StateRows(rows, sorted(saves))

    def clear(self, rows: Iterable[int]) -> None:
        """Of sequences that begin."""
        for row in rows if self.tensors else ():
            torch._foreach_zero_([tensor[row] for tensor in self.tensors.values()])

    def copy(self, source: int, target: int, layer: int | None = None) -> None:
        """The states of a row, of one layer or of all, to another row."""
        held = [tensor for key, tensor in self.tensors.items() if layer is None or key.layer == layer]
        torch._foreach_copy_([tensor[target] for tensor in held], [tensor[source] for tensor in held])

    def keep(self, where: StateRows, layer: int | None = None) -> None:
        """Copy what is saved behind a step, of one layer or of all: none of it was on the way."""
        for save in where.saves:
            self.copy(where.rows[save.row], save.target, layer)

    def _snapshot(self, number: int) -> int:
        if number >= self.snapshots:
            raise PlanError(f"snapshot {number} is not below {self.snapshots}")
        return self.slots + number
