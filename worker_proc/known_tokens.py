"""All known tokens of the slots whose edits depend on them, on the device: drawn tokens are appended without a way
through the host. On a GPU the table is made whole when it is needed: there is no room but what was measured for it when
the worker started (worker_proc/cuda/largest_steps.py)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.messages import History
from worker_proc.staging import Staged, Staging

_FIRST_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class KnownRows:
    """The rows of a step whose tokens are kept."""

    rows: Staged  # int64 [2, R]: row, known tokens before the one to be drawn
    longest: int  # known tokens of a row, at most


class KnownTokens:
    """Row i of a batch is about slot `slots[i]`, as everywhere here."""

    def __init__(self, max_slots: int, device: torch.device, context_len: int) -> None:
        self._max_slots = max_slots
        self._most_columns = context_len + 1  # the token after the last one of a context window is drawn, too
        self._device = device
        self._used = torch.zeros(max_slots, dtype=torch.bool)
        self._tokens: Tensor | None = None  # int32 [slots, length], made when it is needed

    def enter(self, history: History, staging: Staging) -> Staged:
        """A slot is taken by a request with this history; its tokens (int64 `[T]`) are on the device, in the table too,
        when `staging` is sent."""
        slot = history.slot
        self._used[slot] = True
        there = staging.put(torch.tensor(history.tokens, dtype=torch.int64))

        def write() -> None:
            known = there.tensor
            table = self._room_for(len(known))
            table[slot] = known[0]  # columns that are not used yet hold a token that is known
            table[slot, : len(known)] = known

        staging.then(write)
        return there

    def leave(self, slot: int) -> None:
        """The slot is free, or taken by a request whose tokens nobody asks for."""
        self._used[slot] = False

    def prepare(self, slots: Tensor, lengths: Tensor, staging: Staging) -> KnownRows | None:
        """What `append` needs after a step whose rows are of `slots` and have `lengths` known tokens (int64 `[S]`,
        host); None if no row's tokens are kept."""
        rows = self._used.index_select(0, slots).nonzero().squeeze(1)
        if not len(rows):
            return None
        lengths = lengths[rows]
        return KnownRows(staging.put(torch.stack((rows, lengths))), int(lengths.max()))

    @property
    def table(self) -> Tensor:
        """Token ids, int32 `[slots, length]`. Raises RuntimeError before the first slot's history was sent."""
        if self._tokens is None:
            raise RuntimeError("no tokens are known yet")
        return self._tokens

    def append(self, step: KnownRows, slots: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The step's `slots` got `tokens` (int64 `[S]`, device); those of the rows whose tokens are kept."""
        table = self._room_for(step.longest + 1)
        rows, ends = step.rows.tensor
        own, new = slots[rows], tokens[rows]
        table[own, ends] = new.int()
        return own, new

    def _room_for(self, columns: int) -> Tensor:
        """The table with at least so many columns; it at least doubles, so that growing is rare."""
        if self._tokens is None:
            first = self._most_columns if self._device.type == "cuda" else min(_FIRST_COLUMNS, self._most_columns)
            shape = (self._max_slots, max(columns, first))
            self._tokens = torch.zeros(shape, dtype=torch.int32, device=self._device)
        present = self._tokens.shape[1]
        if columns > present:
            wider = max(columns, min(2 * present, self._most_columns))
            more = self._tokens[:, :1].expand(-1, wider - present)
            self._tokens = torch.cat((self._tokens, more), dim=1)
        return self._tokens
