"""What LogitEdits do to the logits of a batch. Rows without them pay for nothing."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.messages import History
from common.sampling_params import DrawParams, LogitEdits
from worker_proc.errors import PlanError
from worker_proc.exclusions import Excluded, lay_out
from worker_proc.known_tokens import KnownRows, KnownTokens
from worker_proc.penalties import Penalties, PenaltyStep
from worker_proc.staging import Staged, Staging


@dataclass(frozen=True, slots=True)
class _Fixed:
    """The edits of a batch that stay while its rows do."""

    slots: list[int]  # row by row
    bias: tuple[Staged, Staged] | None  # int64 [2, N]: row, token; float64 [N]
    excluded: Excluded


@dataclass(frozen=True, slots=True)
class EditStep:
    """The edits of a step."""

    fixed: _Fixed
    ends: Staged | None  # int64 [2, N]: row, excluded token
    word_lengths: Staged | None  # of the bad words of several tokens
    penalties: PenaltyStep | None
    known: KnownRows | None  # rows whose drawn tokens are to be kept


class LogitEditor:
    """The edits of every slot, applied in the order that LogitEdits prescribes."""

    def __init__(
        self, max_slots: int, vocab_size: int, device: torch.device | str = "cpu", context_len: int = 2**20
    ) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._edits: dict[int, LogitEdits] = {}
        self._known = KnownTokens(max_slots, self._device, context_len)
        self._prompts: dict[int, int] = {}  # tokens of the prompt, of slots in `_known`
        self._penalties = Penalties(max_slots, vocab_size, self._known, self._device)
        self._fixed: _Fixed | None = None  # of the last step with edits, while they stay

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
            self._fixed = None
            if draw.edits.needs_history:
                if slot not in histories or not histories[slot].tokens:
                    raise PlanError(f"histories: slot {slot} has penalties or bad words and no history")
                self._prompts[slot] = histories[slot].prompt_len
                tokens = self._known.enter(histories[slot], staging)
                if draw.edits.counts_tokens:
                    self._penalties.enter(draw.edits, histories[slot], tokens, staging)

    def leave(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if self._edits.pop(slot, None) is not None:
                self._known.leave(slot)
                self._prompts.pop(slot, None)
                self._penalties.leave(slot)
                self._fixed = None

    def touches(self, slots: Tensor) -> bool:
        """Whether any of these slots (int64, host) has edits."""
        return bool(self._edits) and not self._edits.keys().isdisjoint(slots.tolist())

    def follows_tokens(self, slot: int) -> bool:
        """Whether a slot has edits that depend on its tokens."""
        return slot in self._prompts

    def allows_few(self, slots: Tensor) -> list[int]:
        """The rows of `slots` (int64, host) in which some tokens alone are allowed."""
        allowed = {slot for slot, edits in self._edits.items() if edits.allowed}
        return [row for row, slot in enumerate(slots.tolist()) if slot in allowed] if allowed else []

    def prepare(self, slots: Tensor, lengths: Tensor, staging: Staging) -> EditStep | None:
        """What a step needs whose rows are of `slots` (int64 `[S]`, host) and have `lengths` (int64 `[S]`, host) tokens
        before the one to be drawn; None if no row is edited."""
        if not self.touches(slots):
            return None
        fixed = self._prepare_fixed(slots.tolist(), staging)
        return EditStep(
            fixed,
            self._excluded(slots.tolist(), lengths.tolist(), staging),
            fixed.excluded.lengths(lengths, staging),
            self._penalties.prepare(slots, lengths, staging),
            self._known.prepare(slots, lengths, staging),
        )

    def apply(self, logits: Tensor, step: EditStep) -> None:
        """Change `logits` (float32 `[S, vocab]`, device) in place. `step` is from `prepare`, and sent."""
        bias, excluded = step.fixed.bias, step.fixed.excluded
        if bias is not None:
            pairs, values = bias
            rows, tokens = pairs.tensor
            logits[rows, tokens] += values.tensor.float()  # no pair is named twice
        before = excluded.allowed.read(logits) if excluded.allowed is not None else None
        if step.ends is not None:
            rows, tokens = step.ends.tensor
            logits[rows, tokens] = -torch.inf
        excluded.apply(logits, self._known, step.word_lengths)
        if excluded.allowed is not None and before is not None:
            excluded.allowed.restrict(logits, before)
        if step.penalties is not None:
            self._penalties.apply(logits, step.penalties)

    def append(self, step: EditStep, slots: Tensor, tokens: Tensor) -> None:
        """The step's `slots` got `tokens` (int64 `[S]`, device)."""
        if step.known is not None:
            own, new = self._known.append(step.known, slots, tokens)
            self._penalties.append(own, new)

    def _prepare_fixed(self, slots: list[int], staging: Staging) -> _Fixed:
        if self._fixed is None or self._fixed.slots != slots:  # a steady batch needs no new index
            excluded = lay_out(slots, self._edits, self._prompts, staging)
            self._fixed = _Fixed(slots, self._bias(slots, staging), excluded)
        return self._fixed

    def _bias(self, slots: list[int], staging: Staging) -> tuple[Staged, Staged] | None:
        rows: list[int] = []
        tokens: list[int] = []
        values: list[float] = []
        for row, slot in enumerate(slots):
            edits = self._edits.get(slot)
            if edits is not None and edits.logit_bias:
                rows += [row] * len(edits.logit_bias)
                tokens += edits.logit_bias
                values += edits.logit_bias.values()
        if not rows:
            return None
        pairs = staging.put(torch.tensor([rows, tokens], dtype=torch.int64))
        return pairs, staging.put(torch.tensor(values, dtype=torch.float64))

    def _excluded(self, slots: list[int], lengths: list[int], staging: Staging) -> Staged | None:
        rows: list[int] = []
        tokens: list[int] = []
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            edits = self._edits.get(slot)
            if edits is not None and length < edits.min_len:
                rows += [row] * len(edits.ends)
                tokens += edits.ends
        return staging.put(torch.tensor([rows, tokens], dtype=torch.int64)) if rows else None
