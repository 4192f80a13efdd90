"""The asyncio connection against a played cluster: rows, ends, questions, refusals, silence and breaks."""

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from common.async_connection import AsyncConnection
from common.codec import PROTOCOL_VERSION, encode
from common.connection import ConnectionLost, Row, Unreachable
from common.logprobs import LogprobRows, Logprobs
from common.messages import (
    Abort,
    Beat,
    ChatMessage,
    Detokenize,
    ErrorCode,
    Finish,
    Generate,
    GetInfo,
    GetStats,
    RequestError,
    Stats,
    Text,
    TextBatch,
    Tokenize,
    Tokens,
    ints,
)
from common.sampling_params import SamplingParams
from common.stream import RequestFailed, Stream, UnreadRows
from tests.unit.fake_frontend import (
    TIMEOUT_S,
    FakeFrontend,
    choices_backwards,
    echo,
    refuse,
    rows,
    silent_after_one_row,
)
from tests.unit.frontend_world import INFO

PARAMS = SamplingParams(temperature=0.0, max_tokens=5)
Test = Callable[[FakeFrontend, AsyncConnection], Coroutine[Any, Any, None]]


def play(path: Path, answer: Callable[[Any], Iterable[Any]], test: Test, **options: Any) -> None:
    """Run `test(cluster, connection)` against a cluster that answers so."""

    async def run() -> None:
        with FakeFrontend(path, answer) as cluster:
            async with asyncio.timeout(TIMEOUT_S), AsyncConnection(cluster.address, **options) as connection:
                await test(cluster, connection)

    asyncio.run(run())


async def collect(stream: Stream) -> list[Row]:
    return [row async for row in stream]


def test_a_request_streams_its_rows(short_dir: Path) -> None:
    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        stream = connection.submit("hello", PARAMS)
        assert connection.live == 1 and not stream.ended
        found = await collect(stream)
        assert [(r.text, list(r.token_ids), r.finish) for r in found] == [
            ("h", [11], Finish.NONE),
            ("ello", [12, 13], Finish.STOP),
        ]
        assert connection.live == 0 and stream.ended and await collect(stream) == []
        assert cluster.next(Generate) == Generate(stream.rid, "hello", None, None, PARAMS)

    play(short_dir, echo, test)


def test_every_kind_of_prompt_and_option_arrives(short_dir: Path) -> None:
    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        chat = [ChatMessage("user", "u")]
        for prompt in ("text", [1, 2], chat, []):
            stream = connection.submit(prompt, PARAMS, stream=False, n=2, cache_salt="s", priority=-3, deadline_ms=9)
            await collect(stream)
            got = cluster.next(Generate)
            tokens = ints(*prompt) if prompt in ([1, 2], []) else None
            assert (got.text, got.token_ids, got.chat) == (
                prompt if prompt == "text" else None, tokens, tuple(chat) if prompt is chat else None,
            )  # fmt: skip
            assert (got.stream, got.n, got.cache_salt, got.priority, got.deadline_ms) == (False, 2, "s", -3, 9)

    play(short_dir, choices_backwards, test)


def test_streams_are_kept_apart_and_choices_end_one_by_one(short_dir: Path) -> None:
    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        streams = [connection.submit("x", PARAMS, n=n) for n in (3, 1, 2)]
        for stream, found in zip(streams, await asyncio.gather(*map(collect, streams)), strict=True):
            assert {row.rid for row in found} == {stream.rid}
            ends = [row.choice for row in found if row.finish is Finish.LENGTH]
            assert ends == sorted(ends, reverse=True) and len(found) == 2 * len(ends)

    play(short_dir, choices_backwards, test)


def test_take_hands_out_all_that_is_there(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        if isinstance(msg, Generate):
            for _ in range(5):
                yield rows(msg.rid, "x", 1)
        if isinstance(msg, GetStats):
            yield Stats(msg.query, {})
        if isinstance(msg, Abort):
            yield rows(msg.rid, "", finish=Finish.ABORT)

    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        stream = connection.submit("x", PARAMS)
        await connection.stats()  # answered after the rows
        assert len(await stream.take()) == 5
        waiting = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        stream.abort()
        assert [row.finish for row in await waiting] == [Finish.ABORT]
        assert await stream.take() == []
        stream.abort()  # it has ended: nothing is sent
        await connection.stats()
        kinds = [type(cluster.received.get(timeout=TIMEOUT_S)) for _ in range(4)]
        assert kinds == [Generate, GetStats, Abort, GetStats]

    play(short_dir, answer, test)


def test_rows_of_ended_choices_are_not_handed_out(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        yield rows(msg.rid, "a", 1, choice=1, finish=Finish.LENGTH)
        yield rows(msg.rid, "b", 1, choice=1)
        yield rows(msg.rid, "c", 1, choice=2, finish=Finish.LENGTH)
        yield rows(99, "e", 1, finish=Finish.LENGTH)
        yield rows(msg.rid, "d", 1, choice=0, finish=Finish.LENGTH)

    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        found = await collect(connection.submit("x", PARAMS, n=2))
        assert [(r.choice, r.text) for r in found] == [(1, "a"), (0, "d")]

    play(short_dir, answer, test)


def test_a_refusal_raises_after_the_rows_before_it(short_dir: Path) -> None:
    error = RequestError(0, ErrorCode.DEADLINE, "too late", "deadline_ms", 512)

    def answer(msg: Any) -> Iterable[Any]:
        yield rows(msg.rid, "a", 1)
        yield replace(error, rid=msg.rid)

    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        stream = connection.submit("x", PARAMS)
        assert (await anext(stream)).text == "a"
        with pytest.raises(RequestFailed, match="too late") as caught:
            await anext(stream)
        assert caught.value.error == error and connection.live == 0

    play(short_dir, answer, test)


def test_questions(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        match msg:
            case GetStats():
                yield Stats(msg.query + 1, {"of": 1, "others": 2})
                yield Stats(msg.query, {"scheduler.free_pages": 7})
            case GetInfo():
                yield replace(INFO, rid=msg.rid)
            case Tokenize():
                pieces = ("a", "b") if msg.with_pieces else ()
                yield Tokens(msg.rid, ints(1, 2 + msg.add_special_tokens + 2 * (msg.chat is not None)), pieces)
            case Detokenize():
                yield Text(msg.rid, f"{list(msg.token_ids)} {msg.skip_special_tokens}")

    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        assert await connection.stats() == {"scheduler.free_pages": 7}
        assert replace(await connection.info(), rid=0) == INFO
        assert (await connection.tokenize("x", with_pieces=True)).pieces == ("a", "b")
        assert list((await connection.tokenize("x", add_special_tokens=False)).token_ids) == [1, 2]
        assert list((await connection.tokenize([ChatMessage("user", "x")])).token_ids) == [1, 5]
        assert await connection.detokenize([3, 4], skip_special_tokens=True) == "[3, 4] True"

    play(short_dir, answer, test)


def test_a_second_answer_to_a_question_is_passed_over(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        yield from (Stats(msg.query, {"n": n}) for n in range(2))

    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        assert await connection.stats() == await connection.stats() == {"n": 0}

    play(short_dir, answer, test)


def test_a_request_whose_answer_cannot_be_read_is_aborted(short_dir: Path) -> None:
    """Of others, nothing is lost."""

    def answer(msg: Any) -> Iterable[Any]:
        if isinstance(msg, Generate):
            frame = msgpack.unpackb(encode(rows(msg.rid, "x", 1)))
            frame[2 + [f.name for f in fields(TextBatch)].index("finish")] = b"\xff"
            yield msgpack.packb(frame) if msg.text == "damaged" else rows(msg.rid, "x", 1, finish=Finish.STOP)

    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        damaged, whole = connection.submit("damaged", PARAMS), connection.submit("whole", PARAMS)
        with pytest.raises(RequestFailed, match="finish"):
            await collect(damaged)
        assert [row.text for row in await collect(whole)] == ["x"] and connection.live == 0
        assert cluster.next(Generate) and cluster.next(Generate) and cluster.next(Abort).rid == damaged.rid

    play(short_dir, answer, test)


def test_a_refused_question(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        yield RequestError(msg.rid, ErrorCode.INVALID, "no template", "chat")

    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        with pytest.raises(RequestFailed, match="no template"):
            await connection.tokenize([ChatMessage("user", "x")])
        with pytest.raises(RequestFailed, match="no template"):
            await collect(connection.submit("x", PARAMS))  # the connection goes on

    play(short_dir, answer, test)


def test_an_unanswered_question(short_dir: Path) -> None:
    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        with pytest.raises(ConnectionLost, match=r"within 0\.05 s"):
            await connection.stats(timeout_s=0.05)
        assert connection.lost is None

    play(short_dir, lambda msg: (), test)


def test_unread_rows_are_bounded(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        if isinstance(msg, Generate):
            for _ in range(12):
                yield rows(msg.rid, "x", 1)
        elif isinstance(msg, GetStats):
            yield Stats(msg.query, {})

    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        stream = connection.submit("x", PARAMS)
        await connection.stats()
        assert cluster.next(Generate) and cluster.next(GetStats) and cluster.next(Abort).rid == stream.rid
        assert len(await stream.take()) == 9 and connection.live == 0
        with pytest.raises(UnreadRows, match="more than 8 rows"):
            await stream.take()

    play(short_dir, answer, test, max_unread=8)


def test_of_a_request_whose_rows_lie_unread_nothing_is_kept(short_dir: Path) -> None:
    """Prompt log probabilities wait for tokens of their choice, which never come where another one overflows."""

    def answer(msg: Any) -> Iterable[Any]:
        if isinstance(msg, Generate):
            scores = Logprobs(
                array("i", [7]), array("f", [-0.5]), array("i", [1]), array("i", [0]), array("i"), array("f")
            )
            yield replace(
                rows(msg.rid, "", choice=1), prompt_logprobs=LogprobRows.of({0: scores}), token_bytes={7: b"x"}
            )
            for _ in range(12):
                yield rows(msg.rid, "x", 1)
        elif isinstance(msg, GetStats):
            yield Stats(msg.query, {})

    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        stream = connection.submit("x", replace(PARAMS, prompt_logprobs=0), n=2)
        await connection.stats()
        assert len(await stream.take()) == 9 and connection.live == 0
        assert not connection._reader._prompts

    play(short_dir, answer, test, max_unread=8)


def test_bad_frames_are_counted_and_skipped(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        yield from (b"", b"\xc1", bytes([0x92, PROTOCOL_VERSION, 1]), *echo(msg))

    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        assert "".join(row.text for row in await collect(connection.submit("hi", PARAMS))) == "hi"
        assert connection.refused == 3

    play(short_dir, answer, test)


def test_a_cluster_that_dies_is_noticed_by_all(short_dir: Path) -> None:
    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        streams = [connection.submit("x", PARAMS) for _ in range(2)]
        for stream in streams:
            assert (await anext(stream)).text == "begun"
        question = asyncio.create_task(connection.info())
        await asyncio.sleep(0)
        cluster.close()
        for stream in streams:
            with pytest.raises(ConnectionLost, match="its other end is gone"):
                await anext(stream)
        with pytest.raises(ConnectionLost, match="its other end is gone"):
            await question
        with pytest.raises(ConnectionLost, match="its other end is gone"):
            connection.submit("x", PARAMS)
        assert connection.lost is not None and connection.live == 0
        streams[0].abort()
        await connection.ended()

    play(short_dir, silent_after_one_row, test)


@pytest.mark.parametrize("address", ["ipc:///nowhere/frontend.sock", "tcp://127.0.0.1:1", "nonsense"])
def test_an_address_where_nobody_is(address: str) -> None:
    async def test() -> None:
        with pytest.raises(Unreachable):
            async with asyncio.timeout(TIMEOUT_S), AsyncConnection(address) as connection:
                await collect(connection.submit("x", PARAMS))

    asyncio.run(test())


def test_silence_ends_the_wait_only_where_a_request_is_live(short_dir: Path) -> None:
    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        await asyncio.sleep(0.15)
        assert connection.lost is None
        with pytest.raises(ConnectionLost, match=r"stopped answering.*0\.05 s"):
            await collect(connection.submit("x", PARAMS))

    play(short_dir, lambda msg: (), test, silence_limit_s=0.05)


def test_a_quiet_time_before_a_request_or_a_beat_is_no_silence(short_dir: Path) -> None:
    """Each wait is shorter than the limit, all of them are longer."""
    limit_s = 0.8

    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        await connection.stats()
        await asyncio.sleep(limit_s + 0.2)  # nobody waits for anything
        connection.submit("quiet", PARAMS)
        for _ in range(3):
            await asyncio.sleep(limit_s / 2)
            assert connection.lost is None
            connection.submit("x", PARAMS)  # has a Beat as its answer

    def answer(msg: Any) -> Iterable[Any]:
        if isinstance(msg, GetStats):
            yield Stats(msg.query, {})
        elif isinstance(msg, Generate) and msg.text != "quiet":
            yield Beat()

    play(short_dir, answer, test, silence_limit_s=limit_s)


def test_silence_of_another_version_says_so(short_dir: Path) -> None:
    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        with pytest.raises(ConnectionLost, match="this version understands"):
            await collect(connection.submit("x", PARAMS))

    play(short_dir, lambda msg: [bytes([0x92, PROTOCOL_VERSION + 1, Beat.TAG])], test, silence_limit_s=0.5)


def test_closing_aborts_what_is_live(short_dir: Path) -> None:
    with FakeFrontend(short_dir, silent_after_one_row) as cluster:

        async def test() -> None:
            async with AsyncConnection(cluster.address) as connection:
                stream = connection.submit("x", PARAMS)
                await anext(stream)
            with pytest.raises(ConnectionLost, match="closed"):
                await anext(stream)
            await connection.aclose()

        asyncio.run(test())
        cluster.next(Generate)
        cluster.next(Abort)


def test_a_refused_submission_leaves_nothing(short_dir: Path) -> None:
    async def test(cluster: FakeFrontend, connection: AsyncConnection) -> None:
        with pytest.raises(ValueError, match="oversized"):
            connection.submit("x" * 2**26, PARAMS)
        assert connection.live == 0

    play(short_dir, refuse(lambda rid: RequestError(rid, ErrorCode.INVALID, "")), test)
