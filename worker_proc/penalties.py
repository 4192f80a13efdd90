"""Penalties on tokens that a request has seen or generated, for a whole batch at once.

Only the logits of known tokens are read and written: their number, not that of the vocabulary, is what a step costs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.messages import History
from common.sampling_params import LogitEdits
from worker_proc.known_tokens import KnownTokens
from worker_proc.staging import Staged, Staging

_MAX_ELEMENTS = 2**22  # logits that are worked on at once, which bounds the memory of a step
_REPETITION, _FREQUENCY, _PRESENCE = range(3)


@dataclass(frozen=True, slots=True)
class PenaltyStep:
    """The rows of a step that have penalties. Tables are int64: row, slot, tokens of the prompt, known tokens."""

    repeats: Staged | None  # [4, N]: repetition penalties
    most_known: int
    subtracts: Staged | None  # [4, M]: other penalties, of rows that have output
    most_output: int
    with_counts: bool


class Penalties:
    """The penalties of slots, whose tokens are in `known`. Row i of a batch is about slot `slots[i]`."""

    def __init__(self, max_slots: int, vocab_size: int, known: KnownTokens, device: torch.device) -> None:
        self._max_slots = max_slots
        self._vocab_size = vocab_size
        self._known = known
        self._device = device
        self._host = torch.tensor([[1.0], [0.0], [0.0]]).repeat(1, max_slots)
        self._params = self._host.to(device)
        self._used = torch.zeros(max_slots, dtype=torch.bool)
        self._prompt_lens = torch.zeros(max_slots, dtype=torch.int64)
        self._counts: Tensor | None = None  # how often the output has each token [slots, vocab], made when needed

    def enter(self, edits: LogitEdits, history: History, tokens: Staged, staging: Staging) -> None:
        """A slot is taken by a request with penalties and this history, whose `tokens` are on the way to the device;
        on the device when `staging` is sent."""
        slot = history.slot
        params = torch.tensor([edits.repetition_penalty, edits.frequency_penalty, edits.presence_penalty])
        self._host[:, slot] = params
        self._used[slot] = True
        self._prompt_lens[slot] = history.prompt_len
        values = staging.put(params.double())

        def write() -> None:
            self._params[:, slot] = values.tensor.float()
            if edits.frequency_penalty:
                if self._counts is None:
                    shape = (self._max_slots, self._vocab_size)
                    self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
                output = tokens.tensor[history.prompt_len :]
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
            staging.put(table[:, repeats]) if len(repeats) else None,
            int(lengths[repeats].max()) if len(repeats) else 0,
            staging.put(table[:, subtracts]) if len(subtracts) else None,
            int((lengths - begins)[subtracts].max()) if len(subtracts) else 0,
            bool((host[_FREQUENCY, subtracts] != 0).any()),
        )

    def apply(self, logits: Tensor, step: PenaltyStep) -> None:
        """Change `logits` `[S, vocab]` in place."""
        if step.repeats is not None:
            for index in _parts(step.repeats.tensor, step.most_known):
                self._penalize_repetition(logits, index, step.most_known)
        if step.subtracts is not None:
            for index in _parts(step.subtracts.tensor, step.most_output):
                self._penalize_output(logits, step.with_counts, index, step.most_output)

    def append(self, slots: Tensor, tokens: Tensor) -> None:
        """These slots got `tokens` (int64, device)."""
        if self._counts is not None:  # slots without a frequency penalty have counts that nobody reads
            self._counts[slots, tokens] += 1  # a slot is in a step once, so that no entry is counted twice

    def _penalize_repetition(self, logits: Tensor, index: Tensor, most: int) -> None:
        known = self._known.table[index[1], :most].long()
        penalty = self._params[_REPETITION, index[1], None]
        rows = index[0, :, None]
        values = logits[rows, known]
        logits[rows, known] = torch.where(values > 0, values / penalty, values * penalty)

    def _penalize_output(self, logits: Tensor, with_counts: bool, index: Tensor, most: int) -> None:
        """Each row has at least one output token."""
        rows, slots, begins, lengths = index[:, :, None]
        columns = begins + torch.arange(most, device=self._device)
        columns = columns.minimum(lengths - 1)  # the last token again, to fill up
        output = self._known.table[slots, columns].long()
        values = logits[rows, output]
        if with_counts:
            assert self._counts is not None
            values = values - self._params[_FREQUENCY, slots] * self._counts[slots, output]
        logits[rows, output] = values - self._params[_PRESENCE, slots]


def _parts(index: Tensor, most: int) -> tuple[Tensor, ...]:
    """Columns of a table of rows that have up to `most` tokens each, as many as are worked on at once."""
    return torch.split(index, max(1, _MAX_ELEMENTS // most), dim=1)
