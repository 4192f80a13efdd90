"""Logit edits against transformers' logits processors, in batches with rows that have none."""

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from common.messages import History
from common.sampling_params import DrawParams, LogitEdits
from worker_proc.errors import PlanError
from worker_proc.known_tokens import _FIRST_COLUMNS
from worker_proc.logit_edits import EditStep, LogitEditor
from worker_proc.staging import Staging

VOCAB = 60
TOKENS = st.integers(0, VOCAB - 1)
EDITS = st.builds(
    LogitEdits,
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=5),
    min_len=st.integers(0, 24),
    ends=st.lists(TOKENS, max_size=3, unique=True).map(lambda ids: array("i", ids)),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.2, 10.0]),
    frequency_penalty=st.sampled_from([0.0, -2.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, -0.3, 2.0]),
    allowed=st.lists(TOKENS, max_size=4).map(lambda ids: array("i", ids)),
    bad_words=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=3).map(lambda ids: array("i", ids)), max_size=4
    ).map(tuple),
)


def random_logits(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def excluded_row(row: Tensor, biased: Tensor, edits: LogitEdits, output: list[int]) -> Tensor:
    """Bad words as vLLM excludes them, then all but the allowed tokens, as `biased` where none of these is left."""
    for *beginning, last in edits.bad_words:
        if not beginning or output[-len(beginning) :] == beginning:
            row[last] = -torch.inf
    if edits.allowed:
        allowed = sorted(set(edits.allowed))
        left = row if not row[allowed].isinf().all() else biased
        row = torch.full_like(row, -torch.inf)
        row[allowed] = left[allowed]
    return row


def expected_row(row: Tensor, edits: LogitEdits, prompt: list[int], output: list[int]) -> Tensor:
    """transformers' processors where it has them; OpenAI's formula of the penalties on the output."""
    processors = LogitsProcessorList()
    if edits.logit_bias:
        bias = [[[token], value] for token, value in edits.logit_bias.items()]
        processors.append(SequenceBiasLogitsProcessor(bias))
    biased = processors(torch.tensor([prompt + output]), row[None].clone())[0]
    if edits.ends:
        processors.append(MinLengthLogitsProcessor(edits.min_len, list(edits.ends), device="cpu"))
    row = processors(torch.tensor([prompt + output]), row[None].clone())[0]
    row = excluded_row(row, biased, edits, output)
    if edits.repetition_penalty != 1:
        row = RepetitionPenaltyLogitsProcessor(edits.repetition_penalty)(torch.tensor([prompt + output]), row[None])[0]
    for token in set(output):
        row[token] -= edits.frequency_penalty * output.count(token)
        row[token] -= edits.presence_penalty
    return row


def enter(editor: LogitEditor, slot: int, edits: LogitEdits | None, prompt: list[int], output: list[int]) -> None:
    draw = DrawParams(edits=edits)
    known = {slot: History(slot, len(prompt), array("i", prompt + output))} if draw.needs_history else {}
    staging = Staging("cpu")
    editor.enter([slot], [draw], known, staging)
    staging.send()


def apply(editor: LogitEditor, logits: Tensor, slots: Tensor, lengths: Tensor) -> EditStep | None:
    staging = Staging("cpu")
    step = editor.prepare(slots, lengths, staging)
    staging.send()
    if step is not None:
        editor.apply(logits, step)
    return step


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_every_step_of_a_batch_is_edited_as_its_requests_say(data: st.DataObject) -> None:
    """Requests in random slots; tokens come one by one, slots are left and entered again with all that is known, as
    after a preemption, or by somebody else."""
    editor = LogitEditor(8, VOCAB)
    requests: dict[int, tuple[LogitEdits | None, list[int], list[int]]] = {}
    for step in range(data.draw(st.integers(1, 8))):
        for slot in data.draw(st.lists(st.integers(0, 7), max_size=4, unique=True)):
            if slot in requests and data.draw(st.booleans()):
                edits, prompt, output = requests.pop(slot)
                editor.leave([slot])
                if data.draw(st.booleans()):
                    free = data.draw(st.sampled_from([s for s in range(8) if s not in requests]))
                    requests[free] = (edits, prompt, output)
                    enter(editor, free, edits, prompt, output)
            elif slot not in requests:
                prompt = data.draw(st.lists(TOKENS, min_size=1, max_size=12))  # may end as a bad word begins
                requests[slot] = (data.draw(st.none() | EDITS), prompt, [])
                enter(editor, slot, *requests[slot])
        slots = data.draw(st.permutations(sorted(requests)))
        if not slots:
            continue
        logits = random_logits(len(slots), step)
        edited = logits.clone()
        lengths = torch.tensor([len(requests[s][1]) + len(requests[s][2]) for s in slots])
        index = torch.tensor(slots)
        edit_step = apply(editor, edited, index, lengths)
        for row, slot in enumerate(slots):
            edits, prompt, output = requests[slot]
            wanted = logits[row] if edits is None else expected_row(logits[row], edits, prompt, output)
            torch.testing.assert_close(edited[row], wanted, rtol=1e-6, atol=1e-5)
        few = data.draw(st.sampled_from([TOKENS, st.integers(0, 3)]))  # those of bad words
        tokens = data.draw(st.lists(few, min_size=len(slots), max_size=len(slots)))
        if edit_step is not None:
            editor.append(edit_step, index, torch.tensor(tokens))
        for slot, token in zip(slots, tokens, strict=True):
            requests[slot][2].append(token)


def test_histories_longer_than_the_table_at_first() -> None:
    editor = LogitEditor(3, VOCAB)
    edits = LogitEdits(repetition_penalty=1.5, frequency_penalty=0.1)
    long, short = [i % 50 for i in range(1000)], [55, 56]
    enter(editor, 0, edits, short, [])
    enter(editor, 2, edits, long, [58])
    logits = random_logits(2, 0)
    edited = logits.clone()
    apply(editor, edited, torch.tensor([0, 2]), torch.tensor([2, 1001]))
    torch.testing.assert_close(edited[0], expected_row(logits[0], edits, short, []))
    torch.testing.assert_close(edited[1], expected_row(logits[1], edits, long, [58]))


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_penalties_that_people_use(name: str) -> None:
    """Whole numbers, which no random one is; with a history that fills the table, and goes on."""
    editor, prompt, output = LogitEditor(2, VOCAB), [i % 50 for i in range(_FIRST_COLUMNS - 1)], [7]
    for value in (1.0, 2.0):
        edits, output = LogitEdits(**{name: value}), output[:1]
        enter(editor, 1, edits, prompt, output)
        slots = torch.tensor([1])
        for token in (51, 52, 51):
            logits = random_logits(1, token)
            edited = logits.clone()
            step = apply(editor, edited, slots, torch.tensor([len(prompt) + len(output)]))
            torch.testing.assert_close(edited[0], expected_row(logits[0], edits, prompt, output))
            if step is not None:
                editor.append(step, slots, torch.tensor([token]))
            output = [*output, token]


def test_many_known_tokens_are_edited_in_parts_that_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_proc.penalties._MAX_ELEMENTS", 12)  # three of the rows below, then one
    editor = LogitEditor(8, VOCAB)
    edits = LogitEdits(repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.2)
    known = [([row, 7, row], [row, 9, 9][: row % 3 + 1]) for row in range(7)]
    for slot, (prompt, output) in enumerate(known):
        enter(editor, slot, edits, prompt, output)
    logits = random_logits(7, 0)
    edited = logits.clone()
    apply(editor, edited, torch.arange(7), torch.tensor([len(prompt) + len(output) for prompt, output in known]))
    for row, (prompt, output) in enumerate(known):
        torch.testing.assert_close(edited[row], expected_row(logits[row], edits, prompt, output))


def test_the_table_of_tokens_grows_to_the_context_window_and_no_further() -> None:
    editor = LogitEditor(2, VOCAB, context_len=300)
    edits = LogitEdits(repetition_penalty=1.5)
    enter(editor, 0, edits, [1] * 299, [])
    step = apply(editor, random_logits(1, 0), torch.tensor([0]), torch.tensor([299]))
    assert step is not None
    editor.append(step, torch.tensor([0]), torch.tensor([3]))
    step = apply(editor, random_logits(1, 0), torch.tensor([0]), torch.tensor([300]))
    assert step is not None
    editor.append(step, torch.tensor([0]), torch.tensor([4]))  # the last one, which is never computed
    tokens = editor._known.table
    assert tokens.shape == (2, 301) and tokens.dtype == torch.int32
    assert tokens[0].tolist() == [1] * 299 + [3, 4]


def test_rows_without_edits_are_not_touched() -> None:
    editor = LogitEditor(2, VOCAB)
    enter(editor, 1, LogitEdits(presence_penalty=1.0, logit_bias={3: -5.0}), [1], [3])
    logits = random_logits(1, 0)
    edited = logits.clone()
    assert not editor.touches(torch.tensor([0]))
    apply(editor, edited, torch.tensor([0]), torch.tensor([5]))
    assert torch.equal(edited, logits)
    editor.leave([1])
    apply(editor, edited, torch.tensor([1]), torch.tensor([2]))
    assert torch.equal(edited, logits)


def test_a_bad_word_is_found_in_the_output_alone_and_where_a_step_in_flight_has_drawn_its_beginning() -> None:
    editor = LogitEditor(2, VOCAB)
    words = (array("i", [5, 6, 7]), array("i", [9]), array("i", [6, 7]), array("i", [8, 7]))
    enter(editor, 1, LogitEdits(bad_words=words), [5, 6], [])
    slots = torch.tensor([1])
    steps = []
    for length, drawn in ((2, 5), (3, 6), (4, 0)):
        logits = torch.zeros(1, VOCAB)
        step = apply(editor, logits, slots, torch.tensor([length]))
        assert step is not None
        editor.append(step, slots, torch.tensor([drawn]))
        steps.append(logits[0].isinf().nonzero().squeeze(1).tolist())
    assert steps == [[9], [9], [7, 9]]


def test_an_end_outside_the_vocabulary_is_harmless_and_a_missing_history_is_not() -> None:
    editor = LogitEditor(2, VOCAB)
    enter(editor, 0, LogitEdits(min_len=9, ends=array("i", [VOCAB + 7, 2])), [1], [])
    logits = random_logits(1, 0)
    apply(editor, logits, torch.tensor([0]), torch.tensor([8]))
    assert logits[0].isinf().nonzero().tolist() == [[2]]
    with pytest.raises(PlanError, match="slot 1 has penalties or bad words and no history"):
        editor.enter([1], [DrawParams(edits=LogitEdits(repetition_penalty=2.0))], {}, Staging("cpu"))


def test_a_slot_without_edits_that_is_taken_by_a_request_with_a_bias() -> None:
    """The other rows of the batch stay what they are, and with them the slots of the step."""
    editor = LogitEditor(2, VOCAB)
    enter(editor, 0, None, [1], [])
    enter(editor, 1, LogitEdits(logit_bias={3: 5.0}), [1], [])
    slots, lengths = torch.tensor([0, 1]), torch.tensor([1, 1])
    apply(editor, torch.zeros(2, VOCAB), slots, lengths)
    editor.leave([0])
    enter(editor, 0, LogitEdits(logit_bias={7: 9.0}), [1], [])
    logits = torch.zeros(2, VOCAB)
    apply(editor, logits, slots, lengths)
    assert logits.nonzero().tolist() == [[0, 7], [1, 3]]
