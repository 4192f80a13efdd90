"""What a worker knows of the running requests, slot by slot, and the batch that a StepPlan makes of it.

The page tables and the last sampled tokens live on the device: the input of a decode never comes through the host, so
the next plan may be sent before the result of this one is read. Lengths follow from the plans alone; they are kept on
the host, where batches are laid out. What a step has for the device goes there with its other numbers (`Staging`).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.fields import IntArray
from common.messages import StepPlan
from worker_proc.attention.interface import ForwardBatch, SharedPages
from worker_proc.errors import PlanError
from worker_proc.staging import Staged, Staging
from worker_proc.verification import DraftRow, Verdict

_FIRST_COLUMNS = 16  # pages per slot that a new page table has room for


@dataclass(frozen=True, slots=True, eq=False)
class SampledRows:
    """The positions of a step at which a token is drawn, in the order of the result; several of a row with guesses."""

    slots: Tensor  # int64 [S], host
    positions: Tensor  # int64 [S], host: tokens before the one to be drawn
    staged_slots: Staged  # `slots` on the device
    drafts: list[DraftRow] = field(default_factory=list)  # rows with guesses


@dataclass(slots=True, eq=False)  # not frozen, which is quicker to make, in every step
class Layout:
    """A step as the host knows it: rows, chunks first, and their tokens. The vectors are int64, staged."""

    num_chunks: int
    decode_slots: Tensor  # host, ascending
    q_lens: list[int]
    kv_lens: list[int]
    columns: int  # of the page table that are in use
    rows: Staged  # slots [B]
    ends: Staged  # [B]
    row_of_token: Staged  # [T]
    positions: Staged  # [T]
    chunk_tokens: Staged  # token ids of the chunks
    chunk_starts: Staged | None  # [chunks + 1], None without chunks
    last_token: Staged  # [S]
    sampled: SampledRows


@dataclass(slots=True, eq=False)
class _Decodes:
    """The last step, of decodes alone. One of the same slots differs from it in lengths, and perhaps in pages: its
    numbers are made of this one's, in place."""

    bits: bytes  # StepPlan.decode
    layout: Layout
    begins: Tensor  # int64 [B], host: the tokens of each row before the step
    ends: Tensor  # int64 [B], host: and after it
    room: int  # tokens that any row could grow by, at least
    page_table: Tensor | None = None  # of the last batch, None when pages have come since
    slot_mapping: Tensor | None = None  # of the last batch
    in_page: int = 0  # steps for which every row stays in its page, and `slot_mapping` grows by 1


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
        self._decodes: _Decodes | None = None

    def reset(self) -> None:
        """Free every slot."""
        self._taken.zero_()
        self._may_decode.zero_()
        self._decodes = None

    def apply(self, plan: StepPlan, staging: Staging) -> None:
        """Slots leave and enter, and page tables grow when `staging` is sent."""
        if plan.leave or plan.enter_slots:
            self._decodes = None
            self._leave(self._slots("leave", plan.leave, taken=True))
            self._enter(self._slots("enter_slots", plan.enter_slots, taken=False), plan.enter_lens, staging)
        if plan.page_slots:
            slots = self._slots("page_slots", plan.page_slots, taken=True)
            self._append_pages(slots, _tensor(plan.page_counts), _tensor(plan.pages), staging)

    def lay_out(self, plan: StepPlan, staging: Staging) -> Layout:
        """The step of a plan that has chunks or decodes. The slots' lengths then include its tokens."""
        if self._decodes is not None and not plan.chunk_slots and plan.decode == self._decodes.bits:
            return self._lay_out_again(self._decodes, staging)
        self._decodes = None
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

        starts = torch.nn.functional.pad(q_lens[:num_chunks].cumsum(0), (1, 0)) if num_chunks else None
        layout = Layout(
            num_chunks,
            decode_slots,
            q_lens.tolist(),
            ends.tolist(),
            -(-int(ends.max()) // self._page_size),
            staging.put(rows),
            staging.put(ends),
            staging.put(row_of_token),
            staging.put(positions),
            staging.put(chunk_tokens),
            None if starts is None else staging.put(starts),
            staging.put(last_token),
            SampledRows(sample_slots, sample_ends, staging.put(sample_slots), drafts),
        )
        if not num_chunks:
            self._decodes = _Decodes(plan.decode, layout, begins, ends, self._room(rows, ends))
        return layout

    def _lay_out_again(self, last: _Decodes, staging: Staging) -> Layout:
        """The same decodes as in the last step: each row has one token more."""
        layout, ends = last.layout, last.ends
        last.begins.add_(1)
        ends.add_(1)
        last.room -= 1
        if last.room < 0:
            self._check_room(layout.decode_slots, ends)
            last.room = self._room(layout.decode_slots, ends)
        self._lengths.index_copy_(0, layout.decode_slots, ends)
        layout.kv_lens = [length + 1 for length in layout.kv_lens]
        layout.columns = -(-max(layout.kv_lens) // self._page_size)
        layout.ends, layout.positions = staging.put(ends), staging.put(last.begins)
        return layout

    def _room(self, rows: Tensor, ends: Tensor) -> int:
        """Tokens that every row may grow by."""
        return int((self._limits.index_select(0, rows) - ends).min())

    def build(self, layout: Layout, shared: SharedPages | None = None) -> ForwardBatch:
        """The batch of a step that was laid out and sent."""
        rows, positions, chunks = layout.rows.tensor, layout.positions.tensor, layout.num_chunks
        last = self._decodes
        page_table = last.page_table if last is not None else None
        if page_table is None or page_table.shape[1] != layout.columns:
            page_table = self._page_table[:, : layout.columns].index_select(0, rows)
        if last is None:
            slot_mapping = self._slot_mapping(layout, page_table)
        elif last.slot_mapping is not None and last.in_page:
            slot_mapping = last.slot_mapping.add_(1)
            last.in_page -= 1
        else:
            slot_mapping = last.slot_mapping = self._slot_mapping(layout, page_table)
            last.in_page = min(-length % self._page_size for length in layout.kv_lens)
        if last is not None:
            last.page_table = page_table
        token_ids = self._last_tokens.index_select(0, rows[chunks:] if chunks else rows)
        if chunks:
            token_ids = torch.cat((layout.chunk_tokens.tensor, token_ids))
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            page_table=page_table,
            kv_lens=layout.ends.tensor,
            q_lens=layout.q_lens,
            kv_lens_host=layout.kv_lens,
            num_prefill_rows=chunks,
            logit_rows=layout.last_token.tensor,
            chunk_starts=layout.chunk_starts.tensor if layout.chunk_starts is not None else None,
            shared=shared,
        )

    def _slot_mapping(self, layout: Layout, page_table: Tensor) -> Tensor:
        """Where the step's tokens go in the cache, int64 `[T]`."""
        positions = layout.positions.tensor
        columns = positions // self._page_size
        if layout.num_chunks:
            pages = page_table[layout.row_of_token.tensor, columns]
        else:
            pages = page_table.gather(1, columns[:, None])[:, 0]
        return (pages - columns) * self._page_size + positions

    def store(self, sampled: SampledRows, tokens: Tensor, verdict: Verdict | None = None) -> None:
        """Remember the drawn `tokens` (int64 `[S]`, device) as the inputs of the next decodes. Where the step had
        guesses, `verdict` says which were right: a slot goes on after those, and the rest is overwritten."""
        slots = sampled.staged_slots.tensor
        if verdict is None:
            self._last_tokens.index_copy_(0, slots, tokens)
            return
        staging = Staging(self._device)
        kept = staging.put(torch.tensor(verdict.last))
        staging.send()
        self._last_tokens.index_copy_(0, slots[kept.tensor], tokens[kept.tensor])
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

    def _enter(self, slots: Tensor, lengths: IntArray, staging: Staging) -> None:
        if len(slots):
            self._taken[slots] = True
            self._lengths[slots] = _tensor(lengths)
            self._page_counts[slots] = 0
            self._limits[slots] = 0
            there = staging.put(slots)
            # unused columns read as page 0, which always exists
            staging.then(lambda: self._page_table.index_fill_(0, there.tensor, 0))

    def _append_pages(self, slots: Tensor, counts: Tensor, pages: Tensor, staging: Staging) -> None:
        if int(pages.max()) >= self._num_pages:
            raise PlanError(f"pages: page {int(pages.max())} is not below {self._num_pages}")
        if self._decodes is not None:
            self._decodes.room, self._decodes.page_table = 0, None  # there may be more
        begins = self._page_counts[slots]
        ends = begins + counts
        if int(ends.max()) > self._max_columns:
            raise PlanError(f"pages: a slot gets {int(ends.max())} pages, a context window has {self._max_columns}")
        self._page_counts[slots] = ends
        self._limits[slots] = (ends * self._page_size).clamp_max(self._context_len)
        self._grow(int(ends.max()))
        columns = torch.arange(len(pages)) + torch.repeat_interleave(begins + counts - counts.cumsum(0), counts)
        there = staging.put(torch.stack((torch.repeat_interleave(slots, counts), columns, pages)))

        def write() -> None:
            rows, columns, pages = there.tensor
            self._page_table[rows, columns] = pages

        staging.then(write)

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
