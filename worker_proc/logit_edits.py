"""What LogitEdits do to the logits of a batch. Rows without them pay for nothing."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.messages import History
from common.sampling_params import DrawParams, LogitEdits
from worker_proc.errors import PlanError
from worker_proc.penalties import Penalties, PenaltyStep
from worker_proc.staging import Staged, Staging


@dataclass(frozen=True, slots=True)
class EditStep:
    """The edits of a step, beside the biases, which stay while its rows do."""

    ends: Staged | None  # int64 [2, N]: row, excluded token
    penalties: PenaltyStep | None


class LogitEditor:
    """The edits of every slot, applied in the order that LogitEdits prescribes."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._edits: dict[int, LogitEdits] = {}
        self._penalties = Penalties(max_slots, vocab_size, self._device)
        self._bias_of: list[int] = []  # the slots that `_bias` was made for, row by row, while their edits stay
        self._bias: tuple[Staged, Staged] | None = None  # int64 [2, N]: row, token; float64 [N]

    def enter(
        self,
        slots: Sequence[int],
        draws: Sequence[DrawParams],
        histories: Mapping[int, History],
        staging: Staging,
    ) -> None:
        """From now on slot `slots[i]` is edited as `draws[i]` says; on the device when `staging` is sent. Raises
        PlanError when it lacks a history."""
        for slot, draw in zip(slots, draws, strict=True):
            self.leave([slot])
            if draw.edits is None:
                continue
            ends = array("i", (token for token in draw.edits.ends if token < self._vocab_size))
            self._edits[slot] = replace(draw.edits, ends=ends)
            self._bias_of = []
            if draw.edits.counts_tokens:
                if slot not in histories or not histories[slot].tokens:
                    raise PlanError(f"histories: slot {slot} has penalties and no history")
                self._penalties.enter(draw.edits, histories[slot], staging)

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

    def prepare(self, slots: Tensor, lengths: Tensor, staging: Staging) -> EditStep | None:
        """What a step needs whose rows are of `slots` (int64 `[S]`, host) and have `lengths` (int64 `[S]`, host) tokens
        before the one to be drawn; None if no row is edited."""
        if not self.touches(slots):
            return None
        self._prepare_bias(slots.tolist(), staging)
        ends = self._excluded(slots.tolist(), lengths.tolist(), staging)
        return EditStep(ends, self._penalties.prepare(slots, lengths, staging))

    def apply(self, logits: Tensor, step: EditStep) -> None:
        """Change `logits` (float32 `[S, vocab]`, device) in place. `step` is from `prepare`, and sent."""
        if self._bias is not None:
            pairs, values = self._bias
            rows, tokens = pairs.tensor
            logits[rows, tokens] += values.tensor.float()  # no pair is named twice
        if step.ends is not None:
            rows, tokens = step.ends.tensor
            logits[rows, tokens] = -torch.inf
        if step.penalties is not None:
            self._penalties.apply(logits, step.penalties)

    def append(self, step: EditStep, slots: Tensor, tokens: Tensor) -> None:
        """The step's `slots` got `tokens` (int64 `[S]`, device)."""
        if step.penalties is not None:
            self._penalties.append(step.penalties, slots, tokens)

    def _prepare_bias(self, slots: list[int], staging: Staging) -> None:
        if self._bias_of == slots:  # a steady batch needs no new index
            return
        rows: list[int] = []
        tokens: list[int] = []
        values: list[float] = []
        for row, slot in enumerate(slots):
            edits = self._edits.get(slot)
            if edits is not None and edits.logit_bias:
                rows += [row] * len(edits.logit_bias)
                tokens += edits.logit_bias
                values += edits.logit_bias.values()
        self._bias_of, self._bias = slots, None
        if rows:
            pairs = staging.put(torch.tensor([rows, tokens], dtype=torch.int64))
            self._bias = (pairs, staging.put(torch.tensor(values, dtype=torch.float64)))

    def _excluded(self, slots: list[int], lengths: list[int], staging: Staging) -> Staged | None:
        rows: list[int] = []
        tokens: list[int] = []
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            edits = self._edits.get(slot)
            if edits is not None and length < edits.min_len:
                rows += [row] * len(edits.ends)
                tokens += edits.ends
        return staging.put(torch.tensor([rows, tokens], dtype=torch.int64)) if rows else None
