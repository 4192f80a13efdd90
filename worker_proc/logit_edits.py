"""What LogitEdits do to the logits of a batch. Rows without them pay for nothing."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common.messages import History
from common.sampling_params import DrawParams, LogitEdits
from worker_proc.errors import PlanError
from worker_proc.penalties import Penalties


class LogitEditor:
    """The edits of every slot, applied in the order that LogitEdits prescribes."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._edits: dict[int, LogitEdits] = {}
        self._penalties = Penalties(max_slots, vocab_size, self._device)
        self._bias_of: list[int] = []  # the slots that `_bias` was made for, row by row
        self._bias: tuple[Tensor, Tensor, Tensor] | None = None

    def enter(self, slots: Sequence[int], draws: Sequence[DrawParams], histories: Mapping[int, History]) -> None:
        """From now on slot `slots[i]` is edited as `draws[i]` says. Raises PlanError when it lacks a history."""
        for slot, draw in zip(slots, draws, strict=True):
            self.leave([slot])
            if draw.edits is None:
                continue
            ends = array("i", (token for token in draw.edits.ends if token < self._vocab_size))
            self._edits[slot] = replace(draw.edits, ends=ends)
            if draw.edits.counts_tokens:
                if slot not in histories or not histories[slot].tokens:
                    raise PlanError(f"histories: slot {slot} has penalties and no history")
                self._penalties.enter(draw.edits, histories[slot])

    def leave(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if self._edits.pop(slot, None) is not None:
                self._penalties.leave(slot)
                self._bias_of = []

    def touches(self, slots: Tensor) -> bool:
        """Whether any of these slots (int64, host) has edits."""
        return bool(self._edits) and not self._edits.keys().isdisjoint(slots.tolist())

    def counts_tokens(self, slot: int) -> bool:
        """Whether a slot has penalties that depend on its tokens."""
        edits = self._edits.get(slot)
        return edits is not None and edits.counts_tokens

    def apply(self, logits: Tensor, slots: Tensor, lengths: Tensor) -> None:
        """Change `logits` (float32 `[S, vocab]`, device) in place.

        `slots` (int64 `[S]`, host) says whose edits a row gets, `lengths` (int64 `[S]`, host) how many tokens the
        request has before the one to be drawn.
        """
        if not self.touches(slots):
            return
        self._add_bias(logits, slots.tolist())
        self._exclude_ends(logits, slots.tolist(), lengths.tolist())
        self._penalties.apply(logits, slots, lengths)

    def append(self, slots: Tensor, lengths: Tensor, slots_on_device: Tensor, tokens: Tensor) -> None:
        """The slots got `tokens` (int64 `[S]`, device) after `lengths` known ones."""
        if self._edits:
            self._penalties.append(slots, lengths, slots_on_device, tokens)

    def _add_bias(self, logits: Tensor, slots: list[int]) -> None:
        if self._bias_of != slots:  # a steady batch needs no new index
            rows: list[int] = []
            tokens: list[int] = []
            values: list[float] = []
            for row, slot in enumerate(slots):
                edits = self._edits.get(slot)
                if edits is not None and edits.logit_bias:
                    rows += [row] * len(edits.logit_bias)
                    tokens += edits.logit_bias
                    values += edits.logit_bias.values()
            index = torch.tensor([rows, tokens], dtype=torch.int64).to(self._device)
            self._bias_of = slots
            self._bias = (index[0], index[1], torch.tensor(values).to(self._device)) if rows else None
        if self._bias is not None:
            row_index, token_index, bias = self._bias
            logits[row_index, token_index] += bias  # no pair is named twice

    def _exclude_ends(self, logits: Tensor, slots: list[int], lengths: list[int]) -> None:
        rows: list[int] = []
        tokens: list[int] = []
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            edits = self._edits.get(slot)
            if edits is not None and length < edits.min_len:
                rows += [row] * len(edits.ends)
                tokens += edits.ends
        if rows:
            index = torch.tensor([rows, tokens], dtype=torch.int64).to(self._device)
            logits[index[0], index[1]] = -torch.inf
