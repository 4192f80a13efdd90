"""What a worker knows of the running requests, slot by slot, and the batch that a StepPlan makes of it.

The page tables and the last sampled tokens live on the device: the input of a decode never comes through the host, so
the next plan may be sent before the result of this one is read. Lengths follow from the plans alone; they are kept on
the host, where batches are laid out.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.fields import IntArray
from common.messages import StepPlan
from worker_proc.attention.interface import ForwardBatch
from worker_proc.errors import PlanError
from worker_proc.verification import DraftRow, Verdict

_FIRST_COLUMNS = 16  # pages per slot that a new page table has room for


@dataclass(frozen=True, slots=True, eq=False)
class SampledRows:
    """The positions of a step at which a token is drawn, in the order of the result; several of a row with guesses."""

    slots: Tensor  # int64 [S], host
    positions: Tensor  # int64 [S], host: tokens before the one to be drawn
    slots_on_device: Tensor  # int64 [S]
    drafts: list[DraftRow] = field(default_factory=list)  # rows with guesses


class SlotTable:
    """The state of `max_slots` slots. Every method raises PlanError, and then the state is not usable any more."""

    def __init__(
        self,
        max_slots: int,
        *,
        num_pages: int,
        page_size: int,
        context_len: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._max_slots = max_slots
        self._num_pages = num_pages
        self._page_size = page_size
        self._context_len = context_len
        self._max_columns = -(-context_len // page_size)
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        columns = min(_FIRST_COLUMNS, self._max_columns)
        self._page_table = torch.zeros(max_slots, columns, dtype=torch.int64, device=self._device)
        self._last_tokens = torch.zeros(max_slots, dtype=torch.int64, device=self._device)
        self._lengths = torch.zeros(max_slots, dtype=torch.int64)
        self._page_counts = torch.zeros(max_slots, dtype=torch.int64)
        self._limits = torch.zeros(max_slots, dtype=torch.int64)  # tokens that pages and context window allow
        self._taken = torch.zeros(max_slots, dtype=torch.bool)
        self._may_decode = torch.zeros(max_slots, dtype=torch.bool)  # taken, and has sampled a token
        self._bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)
        self._numbers = torch.arange(max_slots)
        self._ones = torch.ones(max_slots, dtype=torch.int64)

    def reset(self) -> None:
        """Free every slot."""
        self._taken.zero_()
        self._may_decode.zero_()

    def apply(self, plan: StepPlan) -> None:
        """Slots leave and enter, and page tables grow."""
        self._leave(self._slots("leave", plan.leave, taken=True))
        self._enter(self._slots("enter_slots", plan.enter_slots, taken=False), plan.enter_lens)
        self._append_pages(
            self._slots("page_slots", plan.page_slots, taken=True), _tensor(plan.page_counts), _tensor(plan.pages)
        )

    def build(self, plan: StepPlan) -> tuple[ForwardBatch, SampledRows]:
        """The batch of a plan that has chunks or decodes. The slots' lengths then include its tokens."""
        chunk_slots = self._slots("chunk_slots", plan.chunk_slots, taken=True)
        decode_slots = self._decode_slots(plan, chunk_slots)
        chunk_tokens = _tensor(plan.chunk_tokens)
        if len(chunk_tokens) and int(chunk_tokens.max()) >= self._vocab_size:
            raise PlanError(f"chunk_tokens: {int(chunk_tokens.max())} is outside a vocabulary of {self._vocab_size}")
        num_chunks, num_rows = len(chunk_slots), len(chunk_slots) + len(decode_slots)
        if num_chunks:
            rows = torch.cat((chunk_slots, decode_slots))
            q_lens = torch.cat((_tensor(plan.chunk_lens), self._ones[: len(decode_slots)]))
        else:
            rows, q_lens = decode_slots, self._ones[:num_rows]
        begins = self._lengths.index_select(0, rows)
        ends = begins + q_lens
        self._check_room(rows, ends)
        self._lengths.index_copy_(0, rows, ends)

        drafts: list[DraftRow] = []
        row_of_token = last_token = self._numbers[:num_rows]
        positions, sample_slots, sample_ends = begins, rows, ends
        if num_chunks:
            first_token = q_lens.cumsum(0) - q_lens
            row_of_token = torch.repeat_interleave(row_of_token, q_lens)
            positions = (begins - first_token)[row_of_token] + torch.arange(len(row_of_token))
            samples = torch.cat((_tensor(plan.chunk_samples), self._ones[: len(decode_slots)])).bool()
            last_token, sample_slots, sample_ends = (first_token + q_lens - 1)[samples], rows[samples], ends[samples]
            self._may_decode[sample_slots] = True
            if any(plan.chunk_drafts):
                counts = torch.cat((_tensor(plan.chunk_drafts), 0 * decode_slots))[samples]
                drafts = _draft_rows(sample_slots, counts, last_token, chunk_tokens)
                last_token, sample_slots, sample_ends = _with_drafts(counts, last_token, sample_slots, sample_ends)

        on_device = self._to_device(rows, ends, row_of_token, positions, chunk_tokens, last_token, sample_slots)
        rows_d, ends_d, row_of_token_d, positions_d, chunk_tokens_d, last_token_d, sample_slots_d = on_device
        width = -(-int(ends.max()) // self._page_size)
        page_table = self._page_table[:, :width].index_select(0, rows_d)
        columns = positions_d // self._page_size
        pages = page_table[row_of_token_d, columns] if num_chunks else page_table.gather(1, columns[:, None])[:, 0]
        decode_tokens = self._last_tokens.index_select(0, rows_d[num_chunks:])
        batch = ForwardBatch(
            token_ids=torch.cat((chunk_tokens_d, decode_tokens)),
            positions=positions_d,
            slot_mapping=(pages - columns) * self._page_size + positions_d,
            page_table=page_table,
            kv_lens=ends_d,
            q_lens=q_lens.tolist(),
            kv_lens_host=ends.tolist(),
            num_prefill_rows=num_chunks,
            logit_rows=last_token_d,
        )
        return batch, SampledRows(sample_slots, sample_ends, sample_slots_d, drafts)

    def store(self, sampled: SampledRows, tokens: Tensor, verdict: Verdict | None = None) -> None:
        """Remember the drawn `tokens` (int64 `[S]`, device) as the inputs of the next decodes. Where the step had
        guesses, `verdict` says which were right: a slot goes on after those, and the rest is overwritten."""
        if verdict is None:
            self._last_tokens.index_copy_(0, sampled.slots_on_device, tokens)
            return
        last = torch.tensor(verdict.last, device=self._device)
        self._last_tokens.index_copy_(0, sampled.slots_on_device[last], tokens[last])
        for row, accepted in zip(sampled.drafts, verdict.accepted, strict=True):
            self._lengths[row.slot] -= len(row.drafts) - accepted

    def _slots(self, field: str, values: IntArray, *, taken: bool) -> Tensor:
        """The slots of a plan's column, each at most once and all of them taken or free as expected."""
        slots = _tensor(values)
        if not values:
            return slots
        if max(values) >= self._max_slots:
            raise PlanError(f"{field}: slot {max(values)} is not below {self._max_slots}")
        if len(set(values)) != len(values):
            raise PlanError(f"{field}: a slot is named twice in {_shown(slots)}")
        wrong = slots[self._taken.index_select(0, slots) != taken]
        if len(wrong):
            raise PlanError(f"{field}: slots {_shown(wrong)} are {'free' if taken else 'taken'}")
        return slots

    def _leave(self, slots: Tensor) -> None:
        if len(slots):
            self._taken[slots] = False
            self._may_decode[slots] = False

    def _enter(self, slots: Tensor, lengths: IntArray) -> None:
        if len(slots):
            self._taken[slots] = True
            self._lengths[slots] = _tensor(lengths)
            self._page_counts[slots] = 0
            self._limits[slots] = 0
            self._page_table[slots.to(self._device)] = 0  # unused columns read as page 0, which always exists

    def _append_pages(self, slots: Tensor, counts: Tensor, pages: Tensor) -> None:
        if not len(slots):
            return
        if int(pages.max()) >= self._num_pages:
            raise PlanError(f"pages: page {int(pages.max())} is not below {self._num_pages}")
        begins = self._page_counts[slots]
        ends = begins + counts
        if int(ends.max()) > self._max_columns:
            raise PlanError(f"pages: a slot gets {int(ends.max())} pages, a context window has {self._max_columns}")
        self._page_counts[slots] = ends
        self._limits[slots] = (ends * self._page_size).clamp_max(self._context_len)
        self._grow(int(ends.max()))
        columns = torch.arange(len(pages)) + torch.repeat_interleave(begins + counts - counts.cumsum(0), counts)
        rows, columns, pages = self._to_device(torch.repeat_interleave(slots, counts), columns, pages)
        self._page_table[rows, columns] = pages

    def _grow(self, columns: int) -> None:
        """Make room for `columns` pages per slot, at least doubling it so that growing is rare."""
        present = self._page_table.shape[1]
        if columns > present:
            wider = min(max(columns, 2 * present), self._max_columns)
            self._page_table = torch.nn.functional.pad(self._page_table, (0, wider - present))

    def _decode_slots(self, plan: StepPlan, chunk_slots: Tensor) -> Tensor:
        """The slots whose bit is set in `plan.decode`, ascending."""
        if not plan.decode:
            return torch.empty(0, dtype=torch.int64)
        octets = torch.frombuffer(bytearray(plan.decode), dtype=torch.uint8)
        slots = (octets[:, None] & self._bits).view(-1).nonzero().squeeze(1)
        if not len(slots):
            return slots
        if int(slots[-1]) >= self._max_slots:
            raise PlanError(f"decode: slot {int(slots[-1])} is not below {self._max_slots}")
        ready = self._may_decode
        if len(chunk_slots):
            ready = ready.index_fill(0, chunk_slots, False)
        wrong = ~ready.index_select(0, slots)
        if bool(wrong.any()):
            raise PlanError(
                f"decode: slots {_shown(slots[wrong])} are free, have sampled no token yet or are in a chunk too"
            )
        return slots

    def _check_room(self, rows: Tensor, ends: Tensor) -> None:
        """A row's tokens must fit in its pages and in the context window."""
        limits = self._limits.index_select(0, rows)
        wrong = ends > limits
        if bool(wrong.any()):
            slot, end, limit = int(rows[wrong][0]), int(ends[wrong][0]), int(limits[wrong][0])
            raise PlanError(f"slot {slot} would hold {end} tokens: its pages and the context window allow {limit}")

    def _to_device(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Host int64 vectors on the device, in one transfer."""
        if self._device.type == "cpu":
            return parts
        packed = torch.cat(parts).pin_memory().to(self._device, non_blocking=True)
        return torch.split(packed, [len(part) for part in parts])


def _draft_rows(slots: Tensor, counts: Tensor, last_token: Tensor, chunk_tokens: Tensor) -> list[DraftRow]:
    """The sampling rows with guesses: `counts[i]` of them up to token `last_token[i]` of the step."""
    rows, first = [], 0
    for slot, count, last in zip(slots.tolist(), counts.tolist(), last_token.tolist(), strict=True):
        if count:
            rows.append(DraftRow(slot, first, chunk_tokens[last + 1 - count : last + 1].tolist()))
        first += count + 1
    return rows


def _with_drafts(counts: Tensor, last_token: Tensor, slots: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The drawn positions of sampling rows: for each row its guesses' and the one before them, which is the last one
    known. Returns the tokens whose logits are needed, their slots, and how many tokens come before what is drawn."""
    sizes = counts + 1
    row = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    back = (sizes.cumsum(0) - 1)[row] - torch.arange(len(row))  # guesses after this position
    return last_token[row] - back, slots[row], ends[row] - back


def _tensor(values: IntArray) -> Tensor:
    """int64 on the host; `values` are int32."""
    if not values:  # which frombuffer refuses
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(values, dtype=torch.int32).to(torch.int64)


def _shown(slots: Tensor) -> str:
    shown = ", ".join(str(slot) for slot in slots[:8].tolist())
    return shown if len(slots) <= 8 else f"{shown}, ... ({len(slots)} in all)"
