"""Log probabilities on their way: columns, the detokenizer's bytes, the tokenizer's rows, the client's entries."""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.codec import FrameError, decode, encode
from common.fields import FieldError
from common.json_request import parse_request
from common.logprobs import LogprobRows, Logprobs, TopLogprob
from common.messages import (
    Abort,
    AddRequest,
    ErrorCode,
    Finish,
    OpenStream,
    RequestError,
    Stopped,
    TextBatch,
    Timing,
    TokenBatch,
    ints,
)
from common.rows import Row, RowReader
from common.sampling_params import DrawParams, LogitEdits, SamplingParams
from tests.unit.frontend_world import World, request, run
from tests.unit.test_streams import TIMES, decoders, ids_of, tokenizer
from tests.unit.wire_strategies import messages_of
from tokenizer_proc.limits import Limits
from tokenizer_proc.streams import Streams
from tokenizer_proc.token_bytes import TokenBytes


def columns(tokens: Sequence[int], top: int = 1) -> Logprobs:
    """Entry i says -i/4 of its token, and its alternatives are the tokens from 100 on."""
    values = [-i / 4 for i in range(len(tokens))]
    return Logprobs(
        ints(*tokens), array("f", values), ints(*[2] * len(tokens)), ints(*[top] * len(tokens)),
        ints(*[100 + i for _ in tokens for i in range(top)]), array("f", [-0.5] * top * len(tokens)),
    )  # fmt: skip


@given(messages_of(Logprobs), st.data())
def test_columns_come_apart_and_together(entries: Logprobs, data: st.DataObject) -> None:
    size = len(entries)
    cut = data.draw(st.integers(0, size))
    first, rest = entries.split([cut, size - cut])
    assert first == entries.first(cut)
    whole = Logprobs.empty()
    for part in (first, rest):
        whole.extend(part)
    assert whole == entries
    rows = LogprobRows.of({5: first, 2: rest})
    assert rows is not None and rows.by_row() == {5: first, 2: rest}
    assert [e.token_id for e in entries.entries({})] == list(entries.token_ids)
    assert [t.token_id for e in entries.entries({}) for t in e.top] == list(entries.top_ids)


def test_rows_with_many_alternatives_come_apart() -> None:
    parts = {row: columns([10 + row, 20 + row], top=3) for row in (4, 0, 2)}
    rows = LogprobRows.of(parts)
    assert rows is not None and rows.by_row() == parts


def test_columns_that_do_not_fit_are_refused() -> None:
    good = columns([1, 2])
    with pytest.raises(FieldError, match="logprobs"):
        Logprobs(ints(1), array("f"), ints(1), ints(0), ints(), array("f"))
    with pytest.raises(FieldError, match="top_ids"):
        Logprobs(ints(1), array("f", [0]), ints(1), ints(2), ints(3), array("f", [0]))
    with pytest.raises(FieldError, match="entries"):
        LogprobRows(ints(0), ints(1), good)
    with pytest.raises(FieldError, match="rows"):
        LogprobRows(ints(0, 0), ints(1, 1), good)
    with pytest.raises(FieldError, match="rows"):
        LogprobRows(ints(0, 1), ints(2), good)
    batch = TokenBatch(ints(1), ints(2), ints(1, 2), b"\0", ints(0), TIMES, LogprobRows.of({0: good}))
    assert batch.logprobs is not None
    batch.logprobs.entries.logprobs[1] = float("nan")
    with pytest.raises(FrameError, match="finite"):
        decode(encode(batch), {TokenBatch})


def streams(*stop: str, min_tokens: int = 0) -> Streams:
    made = Streams(decoders(), TokenBytes(tokenizer(), decoders()).of)
    made.open(OpenStream(1, stop, True, min_tokens))
    return made


def token_batch(tokens: list[int], finish: Finish = Finish.NONE, prompt: list[int] | None = None) -> TokenBatch:
    return TokenBatch(
        ints(1), ints(len(tokens)), ints(*tokens), bytes([finish]), ints(0), TIMES,
        LogprobRows.of({0: columns(tokens)}), None if prompt is None else LogprobRows.of({0: columns(prompt)}),
    )  # fmt: skip


def test_the_detokenizer_adds_bytes_and_cuts_with_the_tokens() -> None:
    tokens = ids_of(" fox") + ids_of(" jumps") + ids_of(" over")
    out = streams("jumps").push(token_batch(tokens), 6)
    assert out is not None and out.logprobs is not None
    shown = len(out.token_ids)
    assert 0 < shown < len(tokens) and out.stopped == (Stopped(0, None, "jumps"),)
    assert out.logprobs.by_row() == {0: columns(tokens[:shown])}
    text = b"".join(out.token_bytes[token] for token in out.token_ids)
    assert text == b" fox jumps" and set(out.token_bytes) == {*tokens[:shown], 100}


def test_rows_with_prompt_scores_alone_pass_and_early_ones_are_kept() -> None:
    made = streams()
    out = made.push(token_batch([], prompt=[5, 6]), 6)
    assert out is not None and out.prompt_logprobs is not None and list(out.counts) == [0]
    late = Streams(decoders(), TokenBytes(tokenizer(), decoders()).of)
    fox, over = ids_of(" fox"), ids_of(" over")
    assert late.push(token_batch([], prompt=[5]), 6) is None
    assert late.push(token_batch(fox, prompt=[6]), 6) is None
    assert late.push(token_batch(over), 6) is None
    out = late.open(OpenStream(1, (), True))
    assert isinstance(out, TextBatch) and out.prompt_logprobs is not None and out.logprobs is not None
    assert list(out.prompt_logprobs.entries.token_ids) == [5, 6]
    assert list(out.logprobs.entries.token_ids) == fox + over


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    fox = ids_of(" fox")
    made = streams("fox", min_tokens=len(fox))
    assert (out := made.push(token_batch(fox + fox), 6)) is not None
    assert out.texts == (" fox ",) and bytes(out.finish) == bytes([Finish.STOP])
    made = streams("fox", min_tokens=2 * len(fox))
    assert (out := made.push(token_batch(fox + fox), 6)) is not None
    assert out.texts == (" fox fox",) and out.stopped == ()


def read(reader: RowReader, *batches: TextBatch) -> list[Row]:
    return [row for batch in batches for row in reader.rows(batch, 5, lambda rid, choice: rid != 9)]


def text_batch(rid: int, tokens: list[int], finish: Finish = Finish.NONE, prompt: list[int] | None = None) -> TextBatch:
    return TextBatch(
        ints(rid), ints(0), ints(len(tokens)), ints(*tokens), ("x",), bytes([finish]), ints(3), ints(0), TIMES,
        LogprobRows.of({0: columns(tokens)}) if tokens else None,
        None if prompt is None else LogprobRows.of({0: columns(prompt)}),
        {7: b"\xe2", 100: b"a"}, (Stopped(0, 7),) if finish == Finish.STOP else (),
    )  # fmt: skip


def test_a_client_gets_the_prompts_scores_with_the_first_row() -> None:
    reader = RowReader()
    pieces = [text_batch(1, [], prompt=[5]), text_batch(1, [], prompt=[6, 7]), text_batch(9, [], prompt=[1])]
    first, last = read(reader, *pieces, text_batch(1, [7]), text_batch(1, [7, 8], Finish.STOP))
    assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
    assert [e.token_id for e in first.prompt_logprobs[1:] if e] == [5, 6, 7]
    assert first.logprobs is not None and (first.logprobs[0].token, first.logprobs[0].rank) == (b"\xe2", 2)
    assert first.logprobs[0].top == (TopLogprob(100, b"a", -0.5),)
    assert last.prompt_logprobs is None and last.logprobs is not None and len(last.logprobs) == 2
    assert (first.stop_reason, last.stop_reason) == (None, 7)
    read(reader, text_batch(2, [], prompt=[5]))
    reader.forget(2)
    assert read(reader, text_batch(2, [7]))[0].prompt_logprobs is None
    for tokens, finish in (([7], Finish.NONE), ([], Finish.ABORT)):
        (row,) = read(reader, text_batch(2, tokens, finish, prompt=[5]))
        assert row.prompt_logprobs is not None and (list(row.token_ids), row.finish) == (tokens, finish)
    both = TextBatch(
        ints(9, 2), ints(0, 0), ints(1, 1), ints(7, 8), ("x", "y"), bytes(2), ints(3, 3), ints(0, 0), TIMES,
        None, None, {}, (Stopped(0, 7), Stopped(1, None, "y")),
    )  # fmt: skip
    (row,) = read(reader, both)
    assert (row.text, list(row.token_ids), row.stop_reason) == ("y", [8], "y"), "nobody awaits the other one"
    assert not reader._prompts


def test_the_frontend_passes_scores_and_reasons_on() -> None:
    async def test() -> None:
        world = World()
        params = SamplingParams(
            temperature=0.0, seed=1, logprobs=1, prompt_logprobs=0, stop_token_ids=ints(7, 0), min_tokens=2,
            frequency_penalty=0.5, max_tokens=9,
        )  # fmt: skip
        world.receive(request(params=params, stream=False))
        await world.settle()
        (added,) = world.added
        edits = LogitEdits(min_len=5, ends=ints(0, 7), frequency_penalty=0.5)
        assert added.draw == DrawParams(0.0, seed=1, edits=edits, logprobs=1, prompt_logprobs=0)
        assert world.detokenizer == [OpenStream(added.rid, (), True, 2)]
        for batch in (
            text_batch(added.rid, [], prompt=[5, 6]),
            replace(text_batch(added.rid, [7]), timings=(Timing(0, started=60),)),
            text_batch(added.rid, [7, 7], Finish.STOP),
        ):
            for name in ("logprobs", "prompt_logprobs"):
                for token in getattr(getattr(batch, name), "entries", Logprobs.empty()).token_ids:
                    batch.token_bytes.setdefault(token, b"t")
            world.frontend.on_detokenizer(batch)
        (answer,) = world.answers[b"a"]
        assert list(answer.token_ids) == [7, 7, 7] and answer.texts == ("xxx",)
        assert list(answer.logprobs.entries.token_ids) == [7, 7, 7]
        assert list(answer.prompt_logprobs.entries.token_ids) == [5, 6]
        assert answer.stopped == (Stopped(0, 7),)
        assert [timing.started for timing in answer.timings] == [60]

    run(test)


def test_an_answer_with_many_scores_comes_in_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("frontend", "rows"):  # what is held for one row, and for one batch
        monkeypatch.setattr(f"tokenizer_proc.{module}.MAX_SCORED", 5)

    async def test() -> None:
        world = World()
        rids = await world.choices(2, params=SamplingParams(seed=1, logprobs=1), stream=False)
        for rid in rids:
            world.frontend.on_detokenizer(text_batch(rid, [7, 7]))
            world.frontend.on_detokenizer(text_batch(rid, [7]))
        both = TextBatch(
            ints(*rids), ints(0, 0), ints(1, 1), ints(7, 7), ("x", "x"), bytes([Finish.LENGTH] * 2), ints(3, 3),
            ints(0, 0), TIMES, LogprobRows.of({0: columns([7], 5), 1: columns([7], 5)}), None,
            {7: b"x", **{100 + i: b"y" for i in range(5)}},
        )  # fmt: skip
        world.frontend.on_detokenizer(both)
        rows = [(list(m.choices), list(m.token_ids), m.texts) for m in world.answers[b"a"]]
        assert rows == [([0], [7, 7, 7], ("xx",)), ([1], [7, 7, 7], ("xx",)), ([0], [7], ("x",)), ([1], [7], ("x",))]

    run(test)


def test_prompt_scores_that_nobody_could_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenizer_proc.sampling_checks.MAX_PROMPT_LOGPROBS", 8)

    async def test() -> None:
        world = World()
        for top in (1, 2):
            world.receive(request(rid=top, params=SamplingParams(prompt_logprobs=top)))
        await world.settle()
        (error,) = world.answers[b"a"]
        assert isinstance(error, RequestError) and (error.rid, error.code) == (2, ErrorCode.INVALID)
        assert (error.field, error.limit) == ("params.prompt_logprobs", 1)

    run(test)


@pytest.mark.parametrize(
    ("ends", "tokens", "reason"),
    [({}, [7], 7), ({}, [0], None), ({"ignore_eos": True}, [0], 0), ({}, [7, 3], None)],
)
def test_which_token_is_a_reason(ends: dict[str, bool], tokens: list[int], reason: int | None) -> None:
    async def test() -> None:
        world = World()
        (rid,) = await world.choices(1, params=SamplingParams(stop_token_ids=ints(7, 0), seed=0, **ends))  # type: ignore[arg-type]
        batch = TextBatch(
            ints(rid), ints(0), ints(len(tokens)), ints(*tokens), ("x",), bytes([Finish.STOP]), ints(0), ints(0), TIMES
        )
        world.frontend.on_detokenizer(batch)
        (answer,) = world.answers[b"a"]
        assert [s.token for s in answer.stopped] == ([] if reason is None else [reason])

    run(test)


@pytest.mark.parametrize("top", [None, 0, 1])
def test_beam_steps_are_requests_for_one_token(top: int | None) -> None:
    async def test() -> None:
        world = World()
        params = SamplingParams(use_beam_search=True, max_tokens=2, length_penalty=0.0, logprobs=top)
        world.receive(request(params=params, n=2))
        await world.settle()
        (first,) = world.added
        assert (list(first.prompt), first.max_tokens, first.draw) == (
            [1, 2, 3], 1, DrawParams(temperature=0.0, logprobs=4),
        )  # fmt: skip
        world.scheduler.clear()

        def following(rid: int, *best: tuple[int, float]) -> TextBatch:
            ids, values = zip(*best, strict=True)
            entries = Logprobs(
                ints(ids[0]), array("f", values[:1]), ints(1), ints(len(ids)), ints(*ids), array("f", values)
            )
            return TextBatch(
                ints(rid), ints(0), ints(1), ints(ids[0]), ("",), bytes([Finish.LENGTH]), ints(0), ints(2),
                array("q", range(7)), LogprobRows.of({0: entries}), None, dict.fromkeys(ids, b""),
            )  # fmt: skip

        world.frontend.on_detokenizer(following(first.rid, (8, -0.5), (9, -1.0), (4, -3.0), (5, -4.0)))
        one, two = world.added
        assert [list(m.prompt) for m in (one, two)] == [[1, 2, 3, 8], [1, 2, 3, 9]]
        assert (first.counted, one.counted, two.counted) == (False, True, True), "the prompt is one prompt"
        world.detokenizer.clear()
        world.frontend.on_detokenizer(following(two.rid, (6, -0.1), (7, -5.0), (4, -6.0), (5, -6.0)))
        assert b"a" not in world.answers
        world.frontend.on_detokenizer(following(one.rid, (0, -2.0), (7, -3.0), (4, -6.0), (5, -6.0)))
        done = [m for m in world.detokenizer if isinstance(m, TokenBatch)]
        assert [(m.rids[0], list(m.token_ids), Finish(m.finish[0])) for m in done] == [
            (one.rid, [9, 6], Finish.LENGTH),
            (two.rid, [8, 0], Finish.STOP),
        ]
        wanted = {
            9: (-1.0, 2, 8),
            6: (-0.1, 1, 6),
            8: (-0.5, 1, 8),
            0: (-2.0, 1, 0),
        }  # log probability, rank, likeliest
        for m in done:
            if top is None:
                assert m.logprobs is None
                continue
            assert m.logprobs is not None
            entries = m.logprobs.by_row()[0].entries({})
            assert [(e.token_id, pytest.approx(e.logprob), e.rank) for e in entries] == [
                (token, *wanted[token][:2]) for token in m.token_ids
            ]
            assert [[t.token_id for t in e.top] for e in entries] == [[wanted[t][2]] * top for t in m.token_ids]
        for m in done:
            world.frontend.on_detokenizer(
                TextBatch(m.rids, ints(0), m.counts, m.token_ids, ("t",), m.finish, ints(0), m.cached, TIMES)
            )
        answers = world.answers[b"a"]
        assert [(list(m.choices), list(m.token_ids), list(m.cached)) for m in answers] == [
            ([0], [9, 6], [2]), ([1], [8, 0], [2]),
        ]  # fmt: skip
        assert world.frontend.preparing == 0

    run(test)


def test_log_probabilities_of_beams_that_are_too_many_are_refused() -> None:
    async def test() -> None:
        world = World()
        params = SamplingParams(use_beam_search=True, logprobs=20)
        world.frontend._limits = world.frontend._handover._limits = Limits(2**17, 2**17, 1000, 9, 9)
        world.receive(request(params=params, n=2))
        await world.settle()
        (error,) = world.answers[b"a"]
        assert (error.field, error.limit, error.code) == ("params.logprobs", 7, ErrorCode.INVALID)

    run(test)


def test_an_aborted_search_answers_at_once() -> None:
    async def test() -> None:
        world = World()
        world.receive(request(params=SamplingParams(use_beam_search=True), n=2))
        await world.settle()
        rids = {m.rid for m in world.added}
        world.receive(Abort(5))
        (answer,) = world.answers[b"a"]
        assert list(answer.choices) == [0, 1] and bytes(answer.finish) == bytes([Finish.ABORT] * 2)
        assert rids <= {m.rid for m in world.scheduler if isinstance(m, Abort)}
        await asyncio.sleep(0)

    run(test)


def test_json_requests_take_every_field() -> None:
    values = {
        "repetition_penalty": 1.5, "presence_penalty": -2, "frequency_penalty": 0.5, "logit_bias": {"7": -100, "0": 5},
        "min_tokens": 3, "logprobs": 20, "prompt_logprobs": 0, "use_beam_search": True, "length_penalty": 0.5,
        "early_stopping": True, "allowed_token_ids": [5, 6], "bad_words": ["x", "yz"],
    }  # fmt: skip
    params = parse_request({"prompt": "x", **values}).params
    assert params == SamplingParams(
        repetition_penalty=1.5, presence_penalty=-2.0, frequency_penalty=0.5, logit_bias={7: -100.0, 0: 5.0},
        min_tokens=3, logprobs=20, prompt_logprobs=0, use_beam_search=True, length_penalty=0.5, early_stopping=True,
        allowed_token_ids=ints(5, 6), bad_words=("x", "yz"),
    )  # fmt: skip
    for name, wrong in (
        ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", [7]), ("logit_bias", {"7": 101}),
        ("logit_bias", {"7": 1, "07": 2}), ("logprobs", 21), ("min_tokens", -1), ("repetition_penalty", 0),
        ("presence_penalty", 2.5), ("use_beam_search", 1), ("length_penalty", 11), ("allowed_token_ids", []),
        ("allowed_token_ids", [1.5]), ("bad_words", "x"), ("bad_words", [1]), ("bad_words", ["x"] * 129),
    ):  # fmt: skip
        with pytest.raises(FieldError) as caught:
            parse_request({"prompt": "x", name: wrong})
        assert caught.value.field.startswith(name)


def test_json_requests_say_how_a_prompt_is_cut() -> None:
    made = parse_request({"prompt": "x", "truncate_prompt_tokens": -1, "truncation_side": "right"})
    assert made.options["truncate_prompt_tokens"] == -1 and made.options["truncation_side"] == "right"
    assert parse_request({"prompt": "x", "truncate_prompt_tokens": None}).options["truncate_prompt_tokens"] is None
    for name, wrong in (("truncate_prompt_tokens", -2), ("truncation_side", "middle")):
        with pytest.raises(FieldError, match=name):
            parse_request({"prompt": "x", name: wrong})


def test_plain_requests_carry_nothing_of_all_this() -> None:
    assert SamplingParams(temperature=0.5).draw(3) == DrawParams(0.5, seed=3)
    before = len(encode(AddRequest(1, ints(1), 1, ints(), DrawParams())))
    assert before < 60
