"""Penalties on tokens that a request has seen or generated, for a whole batch at once.

The known tokens of the slots that have penalties lie in a table on the device, where drawn tokens are appended without
a way through the host. Only the logits of known tokens are read and written: their number, not that of the vocabulary,
is what a step costs.
"""

import torch
from torch import Tensor

from common.messages import History
from common.sampling_params import LogitEdits

_FIRST_COLUMNS = 256
_REPETITION, _FREQUENCY, _PRESENCE = range(3)


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

    def enter(self, edits: LogitEdits, history: History) -> None:
        """A slot is taken by a request with penalties and this history."""
        slot, tokens = history.slot, torch.tensor(history.tokens, dtype=torch.int64)
        params = torch.tensor([edits.repetition_penalty, edits.frequency_penalty, edits.presence_penalty])
        self._host[:, slot] = params
        self._params[:, slot] = params.to(self._device)
        self._used[slot] = True
        self._prompt_lens[slot] = history.prompt_len
        table = self._room_for(len(tokens))
        table[slot] = int(tokens[0])  # columns that are not used yet hold a token that is known
        table[slot, : len(tokens)] = tokens.to(self._device)
        if edits.frequency_penalty:
            output = tokens[history.prompt_len :].to(self._device)
            if self._counts is None:
                shape = (self._max_slots, self._vocab_size)
                self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._counts[slot] = torch.bincount(output, minlength=self._vocab_size).to(torch.int32)

    def leave(self, slot: int) -> None:
        """The slot is free, or taken by a request without penalties."""
        self._used[slot] = False

    def apply(self, logits: Tensor, slots: Tensor, lengths: Tensor) -> None:
        """Change `logits` `[S, vocab]` in place. `slots` and `lengths` (known tokens) are int64 `[S]` on the host."""
        rows = self._used.index_select(0, slots).nonzero().squeeze(1)
        if not len(rows):
            return
        slots, lengths = slots[rows], lengths[rows]
        host = self._host.index_select(1, slots)
        repeats = (host[_REPETITION] != 1).nonzero().squeeze(1)
        if len(repeats):
            self._penalize_repetition(logits, rows[repeats], slots[repeats], lengths[repeats])
        begins = self._prompt_lens[slots]
        subtracts = (((host[_FREQUENCY] != 0) | (host[_PRESENCE] != 0)) & (lengths > begins)).nonzero().squeeze(1)
        if len(subtracts):
            part = (rows[subtracts], slots[subtracts], begins[subtracts], lengths[subtracts])
            self._penalize_output(logits, bool((host[_FREQUENCY, subtracts] != 0).any()), *part)

    def append(self, slots: Tensor, lengths: Tensor, slots_on_device: Tensor, tokens: Tensor) -> None:
        """The slots got `tokens` (int64 `[S]`, device) after `lengths` known ones (host)."""
        rows = self._used.index_select(0, slots).nonzero().squeeze(1)
        if not len(rows):
            return
        ends = lengths[rows]
        table = self._room_for(int(ends.max()) + 1)
        index = torch.stack((rows, ends)).to(self._device)
        own, new = slots_on_device[index[0]], tokens[index[0]]
        table[own, index[1]] = new
        if self._counts is not None:  # rows without a frequency penalty have counts that nobody reads
            self._counts[own, new] += 1  # a slot is in a step once, so that no entry is counted twice

    def _penalize_repetition(self, logits: Tensor, rows: Tensor, slots: Tensor, lengths: Tensor) -> None:
        assert self._tokens is not None
        index = torch.stack((rows, slots)).to(self._device)
        known = self._tokens[index[1], : int(lengths.max())]
        penalty = self._params[_REPETITION, index[1], None]
        rows = index[0, :, None]
        values = logits[rows, known]
        logits[rows, known] = torch.where(values > 0, values / penalty, values * penalty)

    def _penalize_output(
        self, logits: Tensor, with_counts: bool, rows: Tensor, slots: Tensor, begins: Tensor, lengths: Tensor
    ) -> None:
        """Each row has at least one output token."""
        assert self._tokens is not None
        columns = begins[:, None] + torch.arange(int((lengths - begins).max()))
        columns = columns.minimum(lengths[:, None] - 1).to(self._device)  # the last token again, to fill up
        index = torch.stack((rows, slots)).to(self._device)[:, :, None]
        output = self._tokens[index[1], columns]
        values = logits[index[0], output]
        if with_counts:
            assert self._counts is not None
            values = values - self._params[_FREQUENCY, index[1]] * self._counts[index[1], output]
        logits[index[0], output] = values - self._params[_PRESENCE, index[1]]

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
