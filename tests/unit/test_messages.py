"""Every message: round trip, its own checks, compactness on the wire."""

from array import array
from enum import IntEnum
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.codec import MAX_FRAME_BYTES, FrameError, decode, encode, message_types, schema_of
from common.fields import FieldError, Float, Int
from common.messages import (
    MAX_CHOICES,
    MAX_PROMPT_CHARS,
    AddRequest,
    ChatMessage,
    ErrorCode,
    Finish,
    Generate,
    RequestError,
    StepPlan,
    StepResult,
    TextBatch,
    TokenBatch,
    Tokenize,
    ints,
)
from common.sampling_params import SamplingParams
from tests.examples import examples
from tests.helpers_wire import whole_body
from tests.unit.wire_strategies import messages_of

NONE = ints()
DRAFTS = {
    "chunk_slots": ints(1), "chunk_lens": ints(2), "chunk_samples": ints(1), "chunk_tokens": ints(5, 6),
    "chunk_drafts": ints(1),
}  # fmt: skip


def plan(**changes: Any) -> StepPlan:
    """A StepPlan with nothing in it, but for the changes."""
    return StepPlan(**{"step_id": 0, "epoch": 0, "group": "0", **changes})


def text_batch(**changes: Any) -> TextBatch:
    row: dict[str, Any] = {
        "rids": ints(7), "choices": ints(1), "counts": ints(2), "token_ids": ints(4, 5), "texts": ("ab",),
        "finish": bytes([Finish.NONE]), "prompt_tokens": ints(3), "cached": ints(0), "times": array("q", [1, 2]),
    }  # fmt: skip
    return TextBatch(**{**row, **changes})


@pytest.mark.parametrize("cls", message_types(), ids=lambda cls: cls.__name__)
def test_round_trip(cls: type) -> None:
    @settings(max_examples=examples(60))
    @given(messages_of(cls))
    def check(msg: Any) -> None:
        frame = encode(msg)
        assert decode(frame, message_types()) == msg
        assert decode(frame, {cls}) == msg

    check()


def test_tags_are_unique_and_part_of_the_protocol() -> None:
    """A tag or a field order that changes breaks old peers: raise PROTOCOL_VERSION and change this list then."""
    tags = {cls.TAG: cls.__name__ for cls in message_types()}
    assert sorted(tags.items()) == [
        (1, "Generate"), (2, "Abort"), (3, "GetStats"), (4, "AddRequest"), (5, "OpenStream"), (6, "StepPlan"),
        (7, "StepResult"), (8, "TokenBatch"), (9, "TextBatch"), (10, "RequestError"), (11, "Stats"), (12, "Beat"),
        (13, "Ready"), (14, "Fatal"), (15, "Go"), (16, "Progress"),
        (20, "Tokenize"), (21, "Tokens"), (22, "Detokenize"), (23, "Text"), (24, "GetInfo"), (25, "Info"),
        (40, "Pulse"), (41, "Joined"), (42, "Drained"), (43, "Resync"),
    ]  # fmt: skip


@pytest.mark.parametrize("cls", message_types(), ids=lambda cls: cls.__name__)
def test_numbers_outside_their_range_are_refused_by_name(cls: type) -> None:
    """For every number field of every message: just outside each limit is refused, and the error names the field."""

    @settings(max_examples=3)
    @given(messages_of(cls))
    def check(msg: Any) -> None:
        for position, (name, checker) in enumerate(schema_of(cls)):
            if isinstance(checker, Int):
                wrong: list[Any] = [checker.lo - 1, checker.hi + 1, 1.0, True, None, "1"]
            elif isinstance(checker, Float):
                above = checker.hi * 2 + 1
                wrong = [checker.lo - 1, above, float("nan"), float("inf"), -float("inf"), True, None, "1"]
            else:
                continue
            for value in wrong:
                frame = reencode(msg, position, value)
                with pytest.raises(FrameError) as caught:
                    decode(frame, {cls})
                assert (caught.value.cause, caught.value.field) == ("invalid", name)

    check()


def reencode(msg: Any, position: int, value: Any) -> bytes:
    """The frame of a message with the value of one field replaced."""
    body = whole_body(msg)
    body[2 + position] = value
    return bytes(msgpack.packb(body))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rids": ints(7, 8)}, "rids"),
        ({"choices": NONE}, "rids"),
        ({"counts": ints(1)}, "token_ids"),
        ({"token_ids": ints(4)}, "token_ids"),
        ({"texts": ()}, "rids"),
        ({"finish": b""}, "rids"),
        ({"finish": bytes([max(Finish) + 1])}, "finish"),
        ({"prompt_tokens": NONE}, "rids"),
        ({"cached": ints(1, 2)}, "rids"),
    ],
)
def test_text_batch_columns_must_fit(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        text_batch(**changes)
    assert caught.value.field == field


def test_token_batch_refuses_an_unknown_finish_code() -> None:
    with pytest.raises(FieldError, match="finish"):
        TokenBatch(ints(1), ints(0), NONE, bytes([200]), ints(0), array("q"))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"enter_slots": ints(1)}, "enter"),
        ({"enter_lens": ints(1)}, "enter"),
        ({"page_slots": ints(1)}, "page"),
        ({"page_slots": ints(1), "page_counts": ints(2), "pages": ints(5)}, "pages"),
        ({"chunk_slots": ints(1), "chunk_lens": ints(1), "chunk_tokens": ints(1)}, "chunk"),
        ({"chunk_slots": ints(1), "chunk_lens": ints(2), "chunk_samples": ints(1)}, "chunk_tokens"),
        ({"copies": ints(1, 2, 3)}, "copies"),
        ({"state_loads": ints(1)}, "state_loads"),
        ({"state_saves": ints(1, 2)}, "state_saves"),
        (DRAFTS | {"chunk_drafts": ints(2)}, "chunk_drafts"),
        (DRAFTS | {"chunk_samples": ints(0)}, "chunk_drafts"),
        (DRAFTS | {"chunk_drafts": ints(1, 0)}, "chunk_drafts"),
    ],
)
def test_plan_columns_must_fit(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        plan(**changes)
    assert caught.value.field == field


def test_guesses_leave_a_token_that_is_known() -> None:
    assert list(plan(**DRAFTS).chunk_drafts) == [1]
    assert plan(**DRAFTS | {"chunk_samples": ints(0), "chunk_drafts": ints(0)}).chunk_drafts


@pytest.mark.parametrize(
    ("rids", "counts", "tokens", "finish", "cached", "field"),
    [
        (2, 1, 0, 1, 1, "rids"), (1, 2, 0, 1, 1, "rids"), (1, 1, 0, 2, 1, "rids"), (1, 1, 0, 1, 2, "rids"),
        (1, 1, 1, 1, 1, "token_ids"),
    ],
)  # fmt: skip
def test_token_batch_columns_must_fit(
    rids: int, counts: int, tokens: int, finish: int, cached: int, field: str
) -> None:
    columns = (ints(*rids * [0]), ints(*counts * [0]), ints(*tokens * [0]), bytes(finish), ints(*cached * [0]))
    with pytest.raises(FieldError) as caught:
        TokenBatch(*columns, array("q"))
    assert caught.value.field == field


def test_every_token_that_cannot_be_used_has_its_problem() -> None:
    with pytest.raises(FieldError, match="failed"):
        StepResult(0, 0, "0", ints(1), array("q"), failed=ints(0))


@pytest.mark.parametrize(("prompt", "most", "good"), [(3, 9, True), (2, 9, False), (9, 2, False), (9, 3, True)])
def test_what_goes_on_has_a_prompt_and_more_to_generate(prompt: int, most: int, good: bool) -> None:
    fields = (ints(*range(prompt)), most, ints(), SamplingParams().draw(0))
    if good:
        assert AddRequest(1, *fields, generated=2).generated == 2
    else:
        with pytest.raises(FieldError, match="generated"):
            AddRequest(1, *fields, generated=2)
    assert AddRequest(1, *fields).generated == 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, "prompt"),
        ({"text": "a", "chat": (ChatMessage("user", "a"),)}, "prompt"),
        ({"text": "a", "tools": "[]"}, "tools"),
        ({"text": "a", "template_args": "{}"}, "template_args"),
        ({"text": "a", "continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
        ({"chat": (ChatMessage("user", "a"),), "continue_final_message": True}, "continue_final_message"),
    ],
)
@pytest.mark.parametrize("kind", ["generate", "tokenize"])
def test_what_is_for_chats_is_refused_elsewhere(kind: str, changes: dict[str, Any], field: str) -> None:
    given = {"text": None, "chat": None} | changes
    with pytest.raises(FieldError) as caught:
        if kind == "generate":
            Generate(1, token_ids=None, params=SamplingParams(), **given)
        else:
            Tokenize(1, **given)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "given_prompts", [{}, {"text": "a", "token_ids": ints(1)}, {"text": "", "chat": ()}], ids=["none", "two", "empty"]
)
def test_generate_takes_exactly_one_prompt(given_prompts: dict[str, Any]) -> None:
    with pytest.raises(FieldError, match="prompt"):
        Generate(1, **{"text": None, "token_ids": None, "chat": None, **given_prompts}, params=SamplingParams())


def test_a_refused_frame_tells_its_rid() -> None:
    """The receiver can answer the sender of a bad request only when the request id is known."""
    good = Generate(41, "hello", None, None, SamplingParams())
    assert schema_of(Generate)[4][0] == "params"
    frame = reencode(good, 4, [200.0, *[0] * (len(schema_of(SamplingParams)) - 1)])
    with pytest.raises(FrameError) as caught:
        decode(frame, {Generate})
    assert (caught.value.rids, caught.value.field) == ((41,), "params.temperature")
    with pytest.raises(FrameError) as caught:
        decode(reencode(good, 0, -1), {Generate})
    assert caught.value.rids == ()


def test_a_choice_beyond_the_largest_is_refused() -> None:
    last = text_batch(choices=ints(MAX_CHOICES - 1))
    assert decode(encode(last), {TextBatch}) == last
    with pytest.raises(FrameError) as caught:
        decode(encode(text_batch(choices=ints(MAX_CHOICES))), {TextBatch})
    assert caught.value.field == "choices"


def test_what_generate_leaves_out() -> None:
    plain = Generate(1, "x", None, None, SamplingParams())
    assert (plain.stream, plain.n, plain.cache_salt, plain.priority, plain.deadline_ms) == (True, 1, "", 0, 0)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("n", (1, 64), (0, 65)),
        ("cache_salt", ("", "x" * 256), ("x" * 257, 5)),
        ("priority", (-1000, 1000), (-1001, 1001)),
        ("deadline_ms", (0, 2**31 - 1), (-1, 2**31)),
    ],
)
def test_ranges_of_generate(name: str, good: tuple[Any, ...], bad: tuple[Any, ...]) -> None:
    def frame(value: Any) -> bytes:
        return encode(Generate(41, "x", None, None, SamplingParams(), **{name: value}))

    for value in good:
        assert getattr(decode(frame(value), {Generate}), name) == value
    for value in bad:
        with pytest.raises(FrameError) as caught:
            decode(frame(value), {Generate})
        assert (caught.value.rids, caught.value.field) == ((41,), name)


@given(st.sampled_from(ErrorCode))
def test_every_error_code_travels(code: IntEnum) -> None:
    error = RequestError(1, code, "no", field="max_tokens", limit=7)
    assert ErrorCode(decode(encode(error), {RequestError}).code) is code


def test_the_largest_prompt_fits_in_a_frame() -> None:
    """A prompt at its limit in one-byte characters travels; one that is larger in bytes is refused when encoded."""
    frame = encode(Generate(1, "x" * MAX_PROMPT_CHARS, None, None, SamplingParams()))
    assert len(decode(frame, {Generate}).text) == MAX_PROMPT_CHARS
    wide = Generate(1, "\N{GRINNING FACE}" * MAX_PROMPT_CHARS, None, None, SamplingParams())
    with pytest.raises(FrameError, match="oversized"):
        encode(wide)
    assert 4 * MAX_PROMPT_CHARS > MAX_FRAME_BYTES


def test_a_steady_decode_step_of_256_slots_is_small() -> None:
    """Cost is in what changed: all slots decode, and at page size 16 every 16th of them gets a page in a step."""
    everyone = b"\xff" * 32
    assert len(encode(plan(step_id=10**6, decode=everyone))) < 100
    grown = array("i", range(0, 256, 16))
    pages = array("i", range(70_000, 70_016))
    step = plan(step_id=10**6, decode=everyone, page_slots=grown, page_counts=ints(*[1] * 16), pages=pages)
    assert len(encode(step)) < 400


def test_a_step_of_256_results_costs_little_more_than_its_tokens() -> None:
    result = StepResult(10**6, 3, "0", array("i", range(256)), array("q", [1, 2, 3]))
    assert len(encode(result)) < 4 * 256 + 60
