"""Penalties on tokens that a request has seen or generated, for a whole batch at once.

The known tokens of the slots that have penalties lie in a table on the device, where drawn tokens are appended without
a way through the host. Only the logits of known tokens are read and written: their number, not that of the vocabulary,
is what a step costs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.messages import History
from common.sampling_params import LogitEdits
from worker_proc.staging import Staged, Staging

_FIRST_COLUMNS = 256
_REPETITION, _FREQUENCY, _PRESENCE = range(3)


@dataclass(frozen=True, slots=True)
class PenaltyStep:
    """The rows of a step that have penalties. Tables are int64: row, slot, tokens of the prompt, known tokens."""

    rows: Staged  # int64 [2, R]: row, known tokens
    longest: int  # known tokens of a row, at most
    repeats: Staged | None  # [4, N]: repetition penalties
    most_known: int
    subtracts: Staged | None  # [4, M]: other penalties, of rows that have output
    most_output: int
    with_counts: bool


class Penalties:
    """The penalties and known tokens of slots. Row i of a batch is about slot `slots[i]`, as everywhere here."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._max_slots = max_slots
        self._vocab_size = vocab_size
        self._device = device
        self._host = torch.tensor([[1.0], [0.0], [0.0]]).repeat(1, max_slots)
        self._params = self._host.to(device)
        self._used = torch.zeros(max_slots, dtype=torch.bool)
        self._prompt_lens = torch.zeros(max_slots, dtype=torch.int64)
        # made when they are needed: token ids [slots, length], and how often the output has each token [slots, vocab]
        self._tokens: Tensor | None = None
        self._counts: Tensor | None = None

    def enter(self, edits: LogitEdits, history: History, staging: Staging) -> None:
        """A slot is taken by a request with penalties and this history; on the device when `staging` is sent."""
        slot, tokens = history.slot, torch.tensor(history.tokens, dtype=torch.int64)
        params = torch.tensor([edits.repetition_penalty, edits.frequency_penalty, edits.presence_penalty])
        self._host[:, slot] = params
        self._used[slot] = True
        self._prompt_lens[slot] = history.prompt_len
        there, values = staging.put(tokens), staging.put(params.double())

        def write() -> None:
            known = there.tensor
            self._params[:, slot] = values.tensor.float()
            table = self._room_for(len(known))
            table[slot] = known[0]  # columns that are not used yet hold a token that is known
            table[slot, : len(known)] = known
            if edits.frequency_penalty:
                if self._counts is None:
                    shape = (self._max_slots, self._vocab_size)
                    self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
                output = known[history.prompt_len :]
                self._counts[slot].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

        staging.then(write)

    def leave(self, slot: int) -> None:
        """The slot is free, or taken by a request without penalties."""
        self._used[slot] = False

    def prepare(self, slots: Tensor, lengths: Tensor, staging: Staging) -> PenaltyStep | None:
        """What a step needs whose rows are of `slots` and have `lengths` known tokens (int64 `[S]`, host); None if no
        row has penalties."""
        rows = self._used.index_select(0, slots).nonzero().squeeze(1)
        if not len(rows):
            return None
        slots, lengths = slots[rows], lengths[rows]
        host, begins = self._host.index_select(1, slots), self._prompt_lens[slots]
        repeats = (host[_REPETITION] != 1).nonzero().squeeze(1)
        subtracts = (((host[_FREQUENCY] != 0) | (host[_PRESENCE] != 0)) & (lengths > begins)).nonzero().squeeze(1)
        table = torch.stack((rows, slots, begins, lengths))
        return PenaltyStep(
            staging.put(torch.stack((rows, lengths))),
            int(lengths.max()),
            staging.put(table[:, repeats]) if len(repeats) else None,
            int(lengths[repeats].max()) if len(repeats) else 0,
            staging.put(table[:, subtracts]) if len(subtracts) else None,
            int((lengths - begins)[subtracts].max()) if len(subtracts) else 0,
            bool((host[_FREQUENCY, subtracts] != 0).any()),
        )

    def apply(self, logits: Tensor, step: PenaltyStep) -> None:
        """Change `logits` `[S, vocab]` in place."""
        if step.repeats is not None:
            self._penalize_repetition(logits, step.repeats.tensor, step.most_known)
        if step.subtracts is not None:
            self._penalize_output(logits, step.with_counts, step.subtracts.tensor, step.most_output)

    def append(self, step: PenaltyStep, slots: Tensor, tokens: Tensor) -> None:
        """The step's `slots` got `tokens` (int64 `[S]`, device)."""
        table = self._room_for(step.longest + 1)
        rows, ends = step.rows.tensor
        own, new = slots[rows], tokens[rows]
        table[own, ends] = new
        if self._counts is not None:  # rows without a frequency penalty have counts that nobody reads
            self._counts[own, new] += 1  # a slot is in a step once, so that no entry is counted twice

    def _penalize_repetition(self, logits: Tensor, index: Tensor, most: int) -> None:
        assert self._tokens is not None
        known = self._tokens[index[1], :most]
        penalty = self._params[_REPETITION, index[1], None]
        rows = index[0, :, None]
        values = logits[rows, known]
        logits[rows, known] = torch.where(values > 0, values / penalty, values * penalty)

    def _penalize_output(self, logits: Tensor, with_counts: bool, index: Tensor, most: int) -> None:
        """Each row has at least one output token."""
        assert self._tokens is not None
        rows, slots, begins, lengths = index[:, :, None]
        columns = begins + torch.arange(most, device=self._device)
        columns = columns.minimum(lengths - 1)  # the last token again, to fill up
        output = self._tokens[slots, columns]
        values = logits[rows, output]
        if with_counts:
            assert self._counts is not None
            values = values - self._params[_FREQUENCY, slots] * self._counts[slots, output]
        logits[rows, output] = values - self._params[_PRESENCE, slots]

    def _room_for(self, columns: int) -> Tensor:
        """The table of tokens with at least so many columns; it at least doubles, so that growing is rare."""
        if self._tokens is None:
            shape = (self._max_slots, max(columns, _FIRST_COLUMNS))
            self._tokens = torch.zeros(shape, dtype=torch.int64, device=self._device)
        present = self._tokens.shape[1]
        if columns > present:
            more = self._tokens[:, :1].expand(-1, max(columns, 2 * present) - present)
            self._tokens = torch.cat((self._tokens, more), dim=1)
        return self._tokens
