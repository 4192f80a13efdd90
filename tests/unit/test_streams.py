"""The detokenizer's streams: one terminal row per request, whatever order messages arrive in."""

from array import array
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.messages import ErrorCode, Finish, OpenStream, RequestError, TextBatch, Timing, TokenBatch, ints
from tests.examples import examples
from tests.helpers_tokenizers import SPECIAL, byte_level, sentence_piece
from tokenizer_proc.streams import REPLAYED, Streams
from tokenizer_proc.text_decoder import TextDecoders
from tokenizer_proc.token_bytes import TokenBytes

TIMES = array("q", [1, 2, 3, 4, 5])


@cache
def tokenizer() -> Tokenizer:
    return byte_level()


@cache
def decoders() -> TextDecoders:
    return TextDecoders(tokenizer())


def ids_of(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def end_id() -> int:
    number = tokenizer().token_to_id(SPECIAL.content)
    assert number is not None
    return int(number)


def batch(*rows: tuple[int, list[int], int]) -> TokenBatch:
    return TokenBatch(
        ints(*(rid for rid, _, _ in rows)),
        ints(*(len(tokens) for _, tokens, _ in rows)),
        ints(*(token for _, tokens, _ in rows for token in tokens)),
        bytes(finish for _, _, finish in rows),
        ints(*(7 for _ in rows)),
        TIMES,
    )


def rows_of(msg: TextBatch | None) -> list[tuple[int, list[int], str, int]]:
    if msg is None:
        return []
    rows, at = [], 0
    for rid, count, text, finish in zip(msg.rids, msg.counts, msg.texts, msg.finish, strict=True):
        rows.append((rid, list(msg.token_ids[at : at + count]), text, finish))
        at += count
    return rows


def opened(*stop: str, skip: bool = True) -> Streams:
    streams = Streams(decoders(), TokenBytes(tokenizer(), decoders()).of)
    assert streams.open(OpenStream(1, stop, skip)) is None
    return streams


def test_rows_of_several_requests() -> None:
    streams = opened()
    streams.open(OpenStream(2, (), True))
    fox, dog = ids_of(" fox"), ids_of(" dog")
    out = streams.push(batch((1, fox, Finish.NONE), (2, dog, Finish.LENGTH)), received=6)
    assert rows_of(out) == [(1, fox, " fox", Finish.NONE), (2, dog, " dog", Finish.LENGTH)]
    assert out is not None and list(out.times) == [1, 2, 3, 4, 5, 6] and list(out.cached) == [7, 7]
    assert len(streams) == 1


def test_the_token_that_stops_has_no_text() -> None:
    streams = opened(skip=False)
    tokens = [*ids_of(" fox"), end_id()]
    assert rows_of(streams.push(batch((1, tokens, Finish.STOP)), 6)) == [(1, tokens, " fox", Finish.STOP)]
    assert len(streams) == 0
    alone = batch((1, [end_id()], Finish.STOP))
    assert rows_of(opened(skip=False).push(alone, 6)) == [(1, [end_id()], "", Finish.STOP)]


def test_an_answer_goes_on_with_the_text_of_its_prompt() -> None:
    pieces = sentence_piece()
    made = TextDecoders(pieces)
    streams = Streams(made, TokenBytes(pieces, made).of)
    streams.open(OpenStream(1, (), True))
    fox = pieces.encode("fox", add_special_tokens=False).ids
    assert rows_of(streams.push(batch((1, fox, Finish.LENGTH)), 6)) == [(1, fox, " fox", Finish.LENGTH)]


def test_tokens_without_text_still_make_a_row() -> None:
    streams = opened()
    smile = ids_of("🙂")
    assert len(smile) > 1
    assert rows_of(streams.push(batch((1, smile[:1], Finish.NONE)), 6)) == [(1, smile[:1], "", Finish.NONE)]
    assert rows_of(streams.push(batch((1, smile[1:], Finish.LENGTH)), 6)) == [(1, smile[1:], "🙂", Finish.LENGTH)]


def test_a_cut_character_at_the_end_is_not_lost() -> None:
    streams = opened()
    first = ids_of("🙂")[:1]
    assert rows_of(streams.push(batch((1, first, Finish.LENGTH)), 6)) == [(1, first, "\ufffd", Finish.LENGTH)]
    for min_tokens, ended in ((0, ("", Finish.STOP)), (1, ("\ufffd", Finish.LENGTH))):
        streams.open(OpenStream(1, ("\ufffd",), True, min_tokens))
        assert rows_of(streams.push(batch((1, first, Finish.LENGTH)), 6)) == [(1, first, *ended)]


def test_a_stop_string_over_two_tokens_ends_the_stream_before_the_scheduler_does() -> None:
    streams = opened("fox jumps")
    before, fox, jumps, after = (ids_of(t) for t in ("The", " fox", " jumps", " over"))
    shown = [
        rows_of(streams.push(batch((1, tokens, Finish.NONE)), 6)) for tokens in (before, fox, jumps + after, after)
    ]
    assert shown[0] == [(1, before, "The", Finish.NONE)]
    assert shown[1] == [(1, fox, " ", Finish.NONE)]
    stopped = shown[2][0]
    assert stopped[2:] == ("", Finish.STOP)
    assert (jumps + after)[: len(stopped[1])] == stopped[1] and len(stopped[1]) <= len(jumps)
    assert shown[3] == [] and len(streams) == 1  # the scheduler goes on until it hears of it
    assert rows_of(streams.push(batch((1, [], Finish.ABORT)), 6)) == []
    assert len(streams) == 0


def test_a_stop_string_in_the_last_row_wins_over_its_finish_code() -> None:
    streams = opened("fox")
    tokens = ids_of(" fox")
    rows = rows_of(streams.push(batch((1, tokens, Finish.LENGTH)), 6))
    assert [(r[2], r[3]) for r in rows] == [(" ", Finish.STOP)] and len(streams) == 0


def test_what_ended_an_answer_is_shown_where_that_is_asked_for() -> None:
    fox, over, jumps = (ids_of(t) for t in (" fox", " over", " jumps"))
    for shows in (False, True):
        streams = Streams(decoders(), TokenBytes(tokenizer(), decoders()).of)
        for rid, skip in ((1, True), (2, True), (3, True), (4, False)):
            streams.open(OpenStream(rid, ("fox jumps",) if rid == 1 else (), skip, shows_stop=shows))
        ended = batch(
            (1, [*fox, *jumps, *over], Finish.NONE), (2, [*fox, *over], Finish.STOP),
            (3, [*fox, end_id()], Finish.STOP), (4, [*fox, end_id()], Finish.STOP),
        )  # fmt: skip
        texts = [row[2] for row in rows_of(streams.push(ended, 6))]
        before = tokenizer().decode([*fox, *over][:-1])
        hidden, shown = [" ", before, " fox", " fox"], [" fox jumps", " fox over", " fox", f" fox{SPECIAL.content}"]
        assert texts == (shown if shows else hidden)


def test_held_text_is_released_at_the_end() -> None:
    streams = opened("fox jumps")
    assert rows_of(streams.push(batch((1, ids_of(" fox"), Finish.NONE)), 6))[0][2] == " "
    assert rows_of(streams.push(batch((1, [], Finish.ABORT)), 6)) == [(1, [], "fox", Finish.ABORT)]


def test_output_before_its_open_stream_is_held() -> None:
    streams = Streams(decoders(), TokenBytes(tokenizer(), decoders()).of)
    fox, over = ids_of(" fox"), ids_of(" over")
    assert streams.push(batch((1, fox, Finish.NONE)), 6) is None
    assert streams.push(batch((1, over, Finish.LENGTH)), 7) is None
    assert streams.early == 1
    out = streams.open(OpenStream(1, (), True))
    assert isinstance(out, TextBatch) and list(out.times) == [*TIMES, 7] and list(out.cached) == [7]
    assert out.timings == ()
    assert rows_of(out) == [(1, fox + over, " fox over", Finish.LENGTH)]
    assert len(streams) == streams.early == 0


def test_early_rows_of_one_batch_leave_with_times_of_their_own() -> None:
    """The process appends to the times of what it sends; shared ones would grow beyond what a frame may hold."""
    streams = Streams(decoders(), TokenBytes(tokenizer(), decoders()).of)
    fox = ids_of(" fox")
    streams.push(batch(*((rid, fox, Finish.NONE) for rid in range(20))), 6)
    for rid in range(20):
        out = streams.open(OpenStream(rid, (), True))
        assert isinstance(out, TextBatch) and list(out.times) == [*TIMES, 6]
        out.times.append(7)


def test_errors_pass_once() -> None:
    error = RequestError(1, ErrorCode.TOO_LONG, "no room")
    streams = Streams(decoders(), TokenBytes(tokenizer(), decoders()).of)
    assert streams.fail(error) is None
    assert streams.open(OpenStream(1, (), True)) is error
    streams.open(OpenStream(1, ("fox",), True))
    assert streams.fail(error) is error
    streams.open(OpenStream(1, ("fox",), True))
    streams.push(batch((1, ids_of(" fox"), Finish.NONE)), 6)
    assert streams.fail(error) is None  # the stop string has ended it already
    assert len(streams) == streams.early == 0


@settings(max_examples=examples(200))
@given(
    st.lists(st.sampled_from([" fox", " jumps", "🙂", " over", "the", "é"]), max_size=8),
    st.sampled_from([Finish.STOP, Finish.LENGTH, Finish.ABORT]),
    st.lists(st.sampled_from(["fox j", "over", "🙂t", "zzz"]), max_size=2),
    st.integers(0, 8),
)
def test_one_terminal_row_and_the_text_of_all_tokens(
    words: list[str], finish: Finish, stops: list[str], open_after: int
) -> None:
    """Whenever the OpenStream comes, the joined rows say the same."""
    tokens = [token for word in words for token in ids_of(word)]
    if finish == Finish.STOP:
        tokens.append(end_id())
    steps = [batch((1, [token], Finish.NONE)) for token in tokens[:-1]] + [batch((1, tokens[-1:], finish))]
    streams = Streams(decoders(), TokenBytes(tokenizer(), decoders()).of)
    rows = []
    for i, step in enumerate(steps):
        if i == open_after:
            rows += rows_of(_text(streams.open(OpenStream(1, tuple(stops), True))))
        rows += rows_of(streams.push(step, 6))
    if open_after >= len(steps):
        rows += rows_of(_text(streams.open(OpenStream(1, tuple(stops), True))))
    full = "".join(words)
    found = [full.find(s) + len(s) for s in stops if s in full]
    if found:
        end = min(found)
        longest = max(len(s) for s in stops if full[:end].endswith(s))
        full = full[: end - longest]
    assert "".join(row[2] for row in rows) == full
    assert [row[3] for row in rows if row[3]] == [Finish.STOP if found else finish] and rows[-1][3]
    assert len(streams) == streams.early == 0


def _text(msg: TextBatch | RequestError | None) -> TextBatch | None:
    assert not isinstance(msg, RequestError)
    return msg


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_inside_the_text(skip: bool) -> None:
    streams = opened(skip=skip)
    tokens = [*ids_of(" fox"), end_id(), *ids_of(" over")]
    text = " fox over" if skip else f" fox{SPECIAL.content} over"
    assert rows_of(streams.push(batch((1, tokens, Finish.LENGTH)), 6))[0][2] == text


def test_when_a_prompt_was_begun_goes_along_with_its_first_token():
    streams = Streams(decoders(), TokenBytes(tokenizer(), decoders()).of)
    streams.open(OpenStream(1, (), True))
    tokens = ids_of("fox")[:1]
    sent = streams.push(replace(batch((2, tokens, 0), (1, tokens, 0)), started={0: 50, 1: 60}), 6)
    assert sent is not None and sent.timings == (Timing(0, started=60),), "rows are numbered anew"
    assert streams.push(batch((2, tokens, 0)), 6) is None
    late = streams.open(OpenStream(2, (), True))
    assert isinstance(late, TextBatch) and late.timings == (Timing(0, started=50),)
    more = streams.push(batch((1, tokens, 0)), 6)
    assert more is not None and more.timings == ()


def test_who_takes_up_a_long_stream_says_that_it_lives() -> None:
    streams = Streams(decoders(), TokenBytes(tokenizer(), decoders()).of)
    fox, ticks = ids_of(" fox"), []
    long = OpenStream(1, (" fox dog",), True, emitted=ints(*fox * 1000))
    assert streams.open(long, lambda: ticks.append(len(streams))) is None
    assert len(ticks) == -(-1000 * len(fox) // REPLAYED)
    out = streams.push(batch((1, ids_of(" dog"), Finish.NONE)), 6)
    assert rows_of(out)[0][3] == Finish.STOP, "what came before is known"


def test_who_takes_up_a_long_stream_counts_its_tokens() -> None:
    streams = Streams(decoders(), TokenBytes(tokenizer(), decoders()).of)
    emitted, (z,) = ints(*ids_of(" fox") * 2 * REPLAYED)[: REPLAYED + 9], ids_of("z")
    streams.open(OpenStream(1, ("z",), True, min_tokens=len(emitted) + 1, emitted=emitted))
    rows = [rows_of(streams.push(batch((1, [z], Finish.NONE)), 6)) for _ in range(2)]
    assert rows == [[(1, [z], "z", Finish.NONE)], [(1, [z], "", Finish.STOP)]]
