"""Slots and the batches made of them, against a plain Python model, and the plans that are refused."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.messages import StepPlan, ints
from tests.helpers_plans import GREEDY, PlanWriter, bitmap, empty_plan
from worker_proc.errors import PlanError
from worker_proc.input_batch import SlotTable
from worker_proc.staging import Staging
from worker_proc.verification import DraftRow, verify

MAX_SLOTS, NUM_PAGES, CONTEXT, VOCAB = 20, 400, 160, 100


def make_table(page_size: int = 4) -> SlotTable:
    return SlotTable(
        MAX_SLOTS, num_pages=NUM_PAGES, page_size=page_size, context_len=CONTEXT, vocab_size=VOCAB, device="cpu"
    )


def apply(table: SlotTable, plan: StepPlan) -> None:
    staging = Staging("cpu")
    table.apply(plan, staging)
    staging.send()


def step(table: SlotTable, plan: StepPlan) -> Any:
    staging = Staging("cpu")
    table.apply(plan, staging)
    layout = table.lay_out(plan, staging)
    staging.send()
    return table.build(layout), layout.sampled


def test_a_prefill_chunk() -> None:
    table, writer = make_table(), PlanWriter(NUM_PAGES, 4)
    batch, sampled = step(table, writer.plan(enter={7: GREEDY}, chunks=((7, [5, 6, 7, 8, 9], True),)))
    pages = writer.slots[7].pages
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4]
    assert batch.slot_mapping.tolist() == [4 * pages[0] + i for i in range(4)] + [4 * pages[1]]
    assert batch.page_table.tolist() == [pages]
    assert batch.kv_lens.tolist() == batch.kv_lens_host == batch.q_lens == [5]
    assert batch.num_prefill_rows == 1
    assert batch.logit_rows.tolist() == [4]
    assert sampled.slots.tolist() == [7] and sampled.positions.tolist() == [5]


def test_a_decode_continues_with_the_stored_token() -> None:
    table, writer = make_table(), PlanWriter(NUM_PAGES, 4)
    _, sampled = step(table, writer.plan(enter={2: GREEDY, 9: GREEDY}, chunks=((9, [1, 2], True), (2, [3], True))))
    assert sampled.slots.tolist() == [9, 2]
    table.store(sampled, torch.tensor([90, 20]))
    batch, sampled = step(table, writer.plan(decode=(2, 9)))
    assert batch.token_ids.tolist() == [20, 90]
    assert batch.positions.tolist() == [1, 2]
    assert batch.kv_lens_host == [2, 3] and batch.q_lens == [1, 1] and batch.num_prefill_rows == 0
    assert sampled.slots.tolist() == [2, 9] and sampled.positions.tolist() == [2, 3]


def test_a_chunk_that_does_not_sample_gives_no_logits() -> None:
    table, writer = make_table(), PlanWriter(NUM_PAGES, 4)
    batch, sampled = step(table, writer.plan(enter={0: GREEDY}, chunks=((0, [1, 2], False),)))
    assert batch.logit_rows.tolist() == [] and sampled.slots.tolist() == []


def test_a_cached_prefix_shifts_positions() -> None:
    table, writer = make_table(), PlanWriter(NUM_PAGES, 4)
    batch, _ = step(table, writer.plan(enter={0: GREEDY}, prefix={0: (8, [8, 3])}, chunks=((0, [1, 2], True),)))
    assert batch.positions.tolist() == [8, 9]
    assert batch.page_table.tolist() == [[8, 3, writer.slots[0].pages[2]]]
    assert batch.kv_lens_host == [10]


@given(st.integers(0, 10**9), st.sampled_from([1, 3, 16]))
def test_batches_equal_a_plain_model(seed: int, page_size: int) -> None:
    rng = random.Random(seed)
    table, writer = make_table(page_size), PlanWriter(NUM_PAGES * 4, page_size, seed=seed)
    writer.free = [page for page in writer.free if page < NUM_PAGES]
    last: dict[int, int] = {}  # slots that may decode, with their last tokens
    going: list[int] = []
    chunks: tuple[tuple[int, list[int], bool], ...] = ()
    for _ in range(24):
        again = going and not chunks and max(writer.slots[s].length for s in going) < 60 and rng.random() < 0.7
        leave = tuple(slot for slot in writer.slots if rng.random() < 0.15 and not again)
        kept = [slot for slot in writer.slots if slot not in leave]
        for slot in leave:
            last.pop(slot, None)
        unused = [slot for slot in range(MAX_SLOTS) if slot not in kept]
        enter = rng.sample(unused, min(len(unused), rng.randrange(3)))
        used = sum(len(writer.slots[slot].pages) for slot in kept)
        if used * page_size + 200 > NUM_PAGES * page_size or again:
            enter = []
        going = (
            going if again else [s for s in kept if s in last and writer.slots[s].length < 60 and rng.random() < 0.8]
        )
        rest = [s for s in kept if s not in last and writer.slots[s].length < 60 and not again]
        chunks = tuple(
            (slot, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))], rng.random() < 0.6)
            for slot in [*enter, *rest]
        )
        before = {slot: writer.slots[slot].length for slot in kept} | dict.fromkeys(enter, 0)
        plan = writer.plan(leave=leave, enter=dict.fromkeys(enter, GREEDY), chunks=chunks, decode=tuple(sorted(going)))
        if not plan.chunk_slots and not plan.decode:
            apply(table, plan)
            continue
        batch, sampled = step(table, plan)
        rows = [*chunks, *((slot, [last[slot]], True) for slot in sorted(going))]
        cells = [(slot, before[slot] + i) for slot, tokens, _ in rows for i in range(len(tokens))]
        assert batch.token_ids.tolist() == [token for _, tokens, _ in rows for token in tokens]
        assert batch.positions.tolist() == [position for _, position in cells]
        assert batch.slot_mapping.tolist() == [
            writer.slots[slot].pages[position // page_size] * page_size + position % page_size
            for slot, position in cells
        ]
        width = max(len(writer.slots[slot].pages) for slot, _, _ in rows)
        pages = [writer.slots[slot].pages for slot, _, _ in rows]
        assert batch.page_table.tolist() == [row + [0] * (width - len(row)) for row in pages]
        assert batch.kv_lens.tolist() == batch.kv_lens_host == [writer.slots[slot].length for slot, _, _ in rows]
        assert batch.q_lens == [len(tokens) for _, tokens, _ in rows]
        assert batch.num_prefill_rows == len(chunks)
        ends, end = [], 0
        for _, tokens, samples in rows:
            end += len(tokens)
            ends += [end - 1] * samples
        assert batch.logit_rows.tolist() == ends
        drawn = [slot for slot, _, samples in rows if samples]
        assert sampled.slots.tolist() == drawn
        assert sampled.positions.tolist() == [writer.slots[slot].length for slot in drawn]
        tokens = [rng.randrange(VOCAB) for _ in drawn]
        table.store(sampled, torch.tensor(tokens, dtype=torch.int64))
        last.update(zip(drawn, tokens, strict=True))


def test_guesses_are_drawn_at_and_trimmed() -> None:
    """Slot 3 verifies three guesses beside a prompt and a decode; one guess is right."""
    table, writer = make_table(), PlanWriter(NUM_PAGES, 4)
    _, sampled = step(table, writer.plan(enter={3: GREEDY, 5: GREEDY}, chunks=((3, [1, 2], True), (5, [4], True))))
    table.store(sampled, torch.tensor([30, 50]))
    chunks = ((3, [30, 31, 32, 33], True), (7, [8, 9], True))
    batch, sampled = step(table, writer.plan(enter={7: GREEDY}, chunks=chunks, decode=(5,), drafts={3: 3}))
    assert batch.token_ids.tolist() == [30, 31, 32, 33, 8, 9, 50]
    assert batch.positions.tolist() == [2, 3, 4, 5, 0, 1, 1]
    assert batch.kv_lens_host == [6, 2, 2] and batch.q_lens == [4, 2, 1]
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 5, 6]
    assert sampled.slots.tolist() == [3, 3, 3, 3, 7, 5]
    assert sampled.positions.tolist() == [3, 4, 5, 6, 2, 2]
    assert sampled.drafts == [DraftRow(3, 0, [31, 32, 33])]
    drawn = [31, 99, 98, 97, 70, 51]
    table.store(sampled, torch.tensor(drawn), verify(sampled.drafts, drawn))
    writer.trim(3, 2)
    batch, sampled = step(table, writer.plan(decode=(3, 5, 7)))
    assert batch.token_ids.tolist() == [99, 51, 70]
    assert batch.positions.tolist() == [4, 2, 2] and batch.kv_lens_host == [5, 3, 3]
    assert sampled.positions.tolist() == [5, 3, 3] and not sampled.drafts


def test_reset_frees_every_slot() -> None:
    table, writer = make_table(), PlanWriter(NUM_PAGES, 4)
    step(table, writer.plan(enter={3: GREEDY}, chunks=((3, [1], True),)))
    table.reset()
    with pytest.raises(PlanError, match="decode: slots 3 are free"):
        step(table, replace(empty_plan(), decode=bitmap([3])))
    apply(table, PlanWriter(NUM_PAGES, 4).plan(enter={3: GREEDY}))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"leave": ints(5)}, "leave: slots 5 are free"),
        ({"leave": ints(MAX_SLOTS)}, f"leave: slot {MAX_SLOTS} is not below {MAX_SLOTS}"),
        ({"leave": ints(0, 0)}, "leave: a slot is named twice in 0, 0"),
        ({"enter_slots": ints(0), "enter_lens": ints(0)}, "enter_slots: slots 0 are taken"),
        ({"enter_slots": ints(99), "enter_lens": ints(0)}, "enter_slots: slot 99"),
        ({"page_slots": ints(4), "page_counts": ints(1), "pages": ints(1)}, "page_slots: slots 4 are free"),
        ({"page_slots": ints(0), "page_counts": ints(1), "pages": ints(NUM_PAGES)}, f"page {NUM_PAGES} is not below"),
        ({"page_slots": ints(0), "page_counts": ints(40), "pages": ints(*range(40))}, "a context window has 40"),
        ({"chunk_slots": ints(2), "chunk_lens": ints(1), "chunk_tokens": ints(1)}, "chunk_slots: slots 2 are free"),
        ({"chunk_slots": ints(0), "chunk_lens": ints(1), "chunk_tokens": ints(VOCAB)}, f"{VOCAB} is outside"),
        ({"chunk_slots": ints(0), "chunk_lens": ints(3), "chunk_tokens": ints(1, 2, 3)}, "slot 0 would hold 5 tokens"),
        ({"decode": bitmap([MAX_SLOTS + 2])}, f"decode: slot {MAX_SLOTS + 2} is not below"),
        ({"decode": bitmap([6])}, "decode: slots 6"),
        ({"decode": bitmap([1])}, "decode: slots 1"),
        ({"decode": bitmap([0]), "chunk_slots": ints(0), "chunk_lens": ints(1), "chunk_tokens": ints(1)}, "decode: sl"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], problem: str) -> None:
    """Slot 0 holds two tokens of at most four and has sampled; slot 1 has not; the others are free."""
    table, writer = make_table(), PlanWriter(NUM_PAGES, 4)
    step(table, writer.plan(enter={0: GREEDY, 1: GREEDY}, chunks=((0, [1, 2], True), (1, [1, 2], False))))
    fields = {"chunk_samples": ints(*[1] * len(fields.get("chunk_slots", ()))), **fields}
    if "enter_slots" in fields:
        fields["enter_draw"] = (GREEDY,)
    with pytest.raises(PlanError, match=problem):
        step(table, replace(empty_plan(), **fields))


def test_a_slot_cannot_grow_beyond_the_context_window() -> None:
    table = SlotTable(1, num_pages=9, page_size=16, context_len=18, vocab_size=VOCAB)
    writer = PlanWriter(9, 16)
    step(table, writer.plan(enter={0: GREEDY}, chunks=((0, list(range(18)), True),)))
    with pytest.raises(PlanError, match="slot 0 would hold 19 tokens: its pages and the context window allow 18"):
        step(table, writer.plan(decode=(0,)))


def test_the_same_decodes_find_their_limit() -> None:
    table, writer = make_table(), PlanWriter(NUM_PAGES, 4)
    chunks = tuple((slot, [1] * (8 + slot), True) for slot in range(3))
    step(table, writer.plan(enter=dict.fromkeys(range(3), GREEDY), chunks=chunks))
    for _ in range(2):  # slot 0 gets its third page with the first of them
        step(table, writer.plan(decode=(0, 1, 2)))
    bits = bitmap([0, 1, 2])
    step(table, replace(empty_plan(), decode=bits, page_slots=ints(2), page_counts=ints(1), pages=ints(399)))
    step(table, replace(empty_plan(), decode=bits, page_slots=ints(1), page_counts=ints(1), pages=ints(398)))
    with pytest.raises(PlanError, match="slot 0 would hold 13 tokens: its pages and the context window allow 12"):
        step(table, replace(empty_plan(), decode=bits))
