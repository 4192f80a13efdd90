"""The synchronous connection against a played cluster: rows, ends, refusals, silence and breaks."""

import subprocess
import sys
import time
from array import array
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.answer import Answer, result_of
from common.codec import PROTOCOL_VERSION
from common.connection import Connection, ConnectionLost, Unreachable
from common.messages import (
    Abort,
    Beat,
    ChatMessage,
    ErrorCode,
    Finish,
    Generate,
    GetInfo,
    GetStats,
    RequestError,
    Stats,
    TextBatch,
    ints,
)
from common.rows import Row
from common.sampling_params import SamplingParams
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


def collect(connection: Connection) -> list[Row | RequestError]:
    """Everything until no request is live."""
    found: list[Row | RequestError] = []
    while connection.live:
        found += connection.poll(TIMEOUT_S)
    return found


def test_a_request_streams_its_rows(short_dir: Path) -> None:
    with FakeFrontend(short_dir, echo) as cluster, Connection(cluster.address) as connection:
        rid = connection.submit("hello", PARAMS)
        found = collect(connection)
        assert cluster.next(Generate) == Generate(rid, "hello", None, None, PARAMS)
    assert all(isinstance(row, Row) for row in found)
    assert [(r.rid, r.text, list(r.token_ids), r.finish) for r in found if isinstance(r, Row)] == [
        (rid, "h", [11], Finish.NONE),
        (rid, "ello", [12, 13], Finish.STOP),
    ]


def test_prompts_of_every_kind(short_dir: Path) -> None:
    chat = [ChatMessage("system", "s"), ChatMessage("user", "u")]
    with FakeFrontend(short_dir, echo) as cluster, Connection(cluster.address) as connection:
        rids = [connection.submit(prompt, PARAMS, stream=False) for prompt in ("text", [1, 2], chat, [])]
        collect(connection)
        got = [cluster.next(Generate) for _ in rids]
    assert [(m.text, m.token_ids, m.chat) for m in got] == [
        ("text", None, None), (None, ints(1, 2), None), (None, None, tuple(chat)), (None, ints(), None),
    ]  # fmt: skip
    assert [m.rid for m in got] == rids and len(set(rids)) == 4 and not any(m.stream for m in got)


def test_a_batch_is_split_into_the_rows_of_live_requests(short_dir: Path) -> None:
    """Rows of requests that ended, or that nobody asked for, are not handed out."""

    def answer(msg: Any) -> Iterable[Any]:
        if msg.rid == 1:
            both = TextBatch(
                ints(1, 0, 99, 1), ints(0, 0, 0, 0), ints(1, 2, 1, 0), ints(5, 6, 7, 8), ("a", "b", "c", "d"),
                bytes([Finish.LENGTH, Finish.ABORT, Finish.NONE, Finish.STOP]), ints(3, 4, 5, 6), ints(0, 1, 2, 3),
                array("q", [1]),
            )  # fmt: skip
            yield both
            yield RequestError(0, ErrorCode.INTERNAL, "late")

    with FakeFrontend(short_dir, answer) as cluster, Connection(cluster.address) as connection:
        assert [connection.submit("x", PARAMS) for _ in range(2)] == [0, 1]
        found = collect(connection)
        assert connection.poll(0) == []
    assert [
        (r.rid, r.text, list(r.token_ids), r.prompt_tokens, r.cached_tokens) for r in found if isinstance(r, Row)
    ] == [
        (1, "a", [5], 3, 0),
        (0, "b", [6, 7], 4, 1),
    ]


def test_every_option_of_a_request_arrives(short_dir: Path) -> None:
    with FakeFrontend(short_dir, choices_backwards) as cluster, Connection(cluster.address) as connection:
        rid = connection.submit("x", PARAMS, stream=False, n=2, cache_salt="s", priority=-3, deadline_ms=9)
        collect(connection)
        assert cluster.next(Generate) == Generate(rid, "x", None, None, PARAMS, False, 2, "s", -3, 9)


def test_a_request_is_live_until_all_its_choices_have_ended(short_dir: Path) -> None:
    with FakeFrontend(short_dir, choices_backwards) as cluster, Connection(cluster.address) as connection:
        rid = connection.submit("x", PARAMS, n=3)
        found = collect(connection)
        assert connection.live == 0
    assert [(r.rid, r.choice, r.text, r.finish, r.cached_tokens) for r in found if isinstance(r, Row)] == [
        (rid, 0, "choice 0", Finish.NONE, 2), (rid, 1, "choice 1", Finish.NONE, 2),
        (rid, 2, "choice 2", Finish.NONE, 2), (rid, 2, "!", Finish.LENGTH, 4),
        (rid, 1, "!", Finish.LENGTH, 2), (rid, 0, "!", Finish.LENGTH, 0),
    ]  # fmt: skip


def test_rows_of_choices_that_ended_or_were_not_asked_for_are_not_handed_out(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        yield rows(msg.rid, "a", 1, choice=1, finish=Finish.LENGTH)
        yield rows(msg.rid, "b", 1, choice=1)
        yield rows(msg.rid, "c", 1, choice=2, finish=Finish.LENGTH)
        yield rows(msg.rid, "d", 1, choice=0, finish=Finish.LENGTH)

    with FakeFrontend(short_dir, answer) as cluster, Connection(cluster.address) as connection:
        connection.submit("x", PARAMS, n=2)
        assert [(r.choice, r.text) for r in collect(connection) if isinstance(r, Row)] == [(1, "a"), (0, "d")]


def test_an_error_ends_all_choices(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        yield rows(msg.rid, "a", 1, choice=1, finish=Finish.LENGTH)
        yield RequestError(msg.rid, ErrorCode.DEADLINE, "too late")
        yield rows(msg.rid, "b", 1, choice=0, finish=Finish.LENGTH)

    with FakeFrontend(short_dir, answer) as cluster, Connection(cluster.address) as connection:
        connection.submit("x", PARAMS, n=3)
        row, error = collect(connection)
        assert isinstance(row, Row) and isinstance(error, RequestError) and error.code == ErrorCode.DEADLINE
        assert connection.live == 0


def test_an_abort_in_the_middle_waits_for_the_choices_that_are_left(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        if isinstance(msg, Generate):
            yield rows(msg.rid, "a", 1, choice=1, finish=Finish.LENGTH)
        elif isinstance(msg, Abort):
            yield rows(msg.rid, "", choice=2, finish=Finish.ABORT)
            yield rows(msg.rid, "", choice=0, finish=Finish.ABORT)

    with FakeFrontend(short_dir, answer) as cluster, Connection(cluster.address) as connection:
        rid = connection.submit("x", PARAMS, n=3)
        assert [row.rid for row in connection.poll(TIMEOUT_S)] == [rid] and connection.live == 1
        connection.abort_all()
        assert [row.choice for row in collect(connection) if isinstance(row, Row)] == [2, 0]


def test_an_abort_ends_with_its_row_and_only_live_requests_are_aborted(short_dir: Path) -> None:
    with FakeFrontend(short_dir, silent_after_one_row) as cluster, Connection(cluster.address) as connection:
        first, second = (connection.submit("x", PARAMS) for _ in range(2))
        cluster.next(Generate), cluster.next(Generate)
        connection.abort(first)
        assert cluster.next(Abort).rid == first
        while connection.live > 1:
            connection.poll(TIMEOUT_S)
        connection.abort(first)
        connection.abort_all()
        assert cluster.next(Abort).rid == second
        assert [row.rid for row in collect(connection)] == [second]


def test_a_refusal_ends_the_request(short_dir: Path) -> None:
    error = RequestError(0, ErrorCode.TOO_LONG, "too long", "prompt", 512)
    with (
        FakeFrontend(short_dir, refuse(lambda rid: error)) as cluster,
        Connection(cluster.address) as connection,
    ):
        connection.submit("x", PARAMS)
        assert collect(connection) == [error]


def test_what_is_served_is_asked_once(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        if isinstance(msg, GetInfo):
            yield rows(0, "x", 1, finish=Finish.LENGTH)
            yield replace(INFO, rid=msg.rid)

    with FakeFrontend(short_dir, answer) as cluster, Connection(cluster.address) as connection:
        connection.submit("x", PARAMS)
        assert connection.info(TIMEOUT_S) == connection.info(TIMEOUT_S) == replace(INFO, rid=1)
        (row,) = connection.poll(0)
        assert isinstance(row, Row) and row.text == "x"
        cluster.next(Generate)
        cluster.next(GetInfo)
        assert cluster.received.empty()
    silent, late = FakeFrontend(short_dir, lambda msg: []), r"did not answer within 0\.1 s"
    with silent, Connection(silent.address) as connection, pytest.raises(ConnectionLost, match=late):
        connection.info(0.1)


def test_stats_do_not_swallow_rows(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        if isinstance(msg, GetStats):
            yield rows(0, "x", 1, finish=Finish.LENGTH)
            yield Stats(msg.query + 1, {"of": 1, "others": 2})
            yield Stats(msg.query, {"scheduler.free_pages": 7})

    with FakeFrontend(short_dir, answer) as cluster, Connection(cluster.address) as connection:
        connection.submit("x", PARAMS)
        assert connection.stats(TIMEOUT_S) == {"scheduler.free_pages": 7}
        assert connection.live == 0
        started = time.monotonic()
        (row,) = connection.poll(TIMEOUT_S)
        assert isinstance(row, Row) and row.text == "x"
        assert time.monotonic() - started < TIMEOUT_S / 2, "what is there is not waited for"


def test_bad_frames_are_counted_and_skipped(short_dir: Path) -> None:
    def answer(msg: Any) -> Iterable[Any]:
        yield from (b"", b"\xc1", bytes([0x92, PROTOCOL_VERSION, 1]), *echo(msg))

    with FakeFrontend(short_dir, answer) as cluster, Connection(cluster.address) as connection:
        connection.submit("hi", PARAMS)
        assert "".join(row.text for row in collect(connection) if isinstance(row, Row)) == "hi"
        assert connection.refused == 3


def test_a_cluster_that_dies_is_noticed(short_dir: Path) -> None:
    with FakeFrontend(short_dir, silent_after_one_row) as cluster, Connection(cluster.address) as connection:
        connection.submit("x", PARAMS)
        assert len(connection.poll(TIMEOUT_S)) == 1
        cluster.close()
        with pytest.raises(ConnectionLost, match="its other end is gone"):
            connection.poll(TIMEOUT_S)


@pytest.mark.parametrize(
    "address", ["ipc:///nowhere/frontend.sock", "tcp://127.0.0.1:1", "nonsense", "tcp://127.0.0.1"]
)
def test_an_address_where_nobody_is(address: str) -> None:
    with pytest.raises(Unreachable), Connection(address) as connection:
        connection.submit("x", PARAMS)
        connection.poll(TIMEOUT_S)


def test_silence_ends_the_wait(short_dir: Path) -> None:
    with (
        FakeFrontend(short_dir, lambda msg: ()) as cluster,
        Connection(cluster.address, silence_limit_s=0.05) as connection,
    ):
        assert connection.poll(0.1) == []  # nothing is live: silence is right
        connection.submit("x", PARAMS)
        with pytest.raises(ConnectionLost, match=r"stopped answering.*0\.05 s"):
            while True:
                connection.poll(0.02)


def test_only_time_spent_listening_for_answers_is_silence(short_dir: Path) -> None:
    with (
        FakeFrontend(short_dir, lambda msg: ()) as cluster,
        Connection(cluster.address, silence_limit_s=0.001) as connection,
    ):
        assert connection.poll(0.01) == []  # nothing is live
        connection.submit("x", PARAMS)
        for _ in range(1000):
            assert connection.poll(0) == []  # takes longer than the limit in all, and waits for nothing
        with pytest.raises(ConnectionLost, match="stopped answering"):
            connection.poll(0.01)


def test_silence_of_another_version_says_so(short_dir: Path) -> None:
    with (
        FakeFrontend(short_dir, lambda msg: [bytes([0x92, PROTOCOL_VERSION + 1, Beat.TAG])]) as cluster,
        Connection(cluster.address, silence_limit_s=0.05) as connection,
    ):
        connection.submit("x", PARAMS)
        cluster.next(Generate)
        with pytest.raises(ConnectionLost, match="this version understands"):
            while True:
                connection.poll(TIMEOUT_S if not connection.refused else 0.02)


def test_a_beat_breaks_the_silence(short_dir: Path) -> None:
    """Silent polls that add up to more than the limit are fine when a Beat (here: asked for) came in between."""
    with (
        FakeFrontend(short_dir, lambda msg: [Beat()] if isinstance(msg, Abort) else []) as cluster,
        Connection(cluster.address, silence_limit_s=1.0) as connection,
    ):
        rid = connection.submit("x", PARAMS)
        cluster.next(Generate)
        for _ in range(4):
            assert connection.poll(0.3) == []
            connection.abort(rid)
            cluster.next(Abort)
            assert connection.poll(0.6) == []
        assert connection.live == 1


@pytest.mark.parametrize(
    "program",
    [
        "connection = Connection(ADDRESS)",
        "connection = asyncio.run(AsyncConnection(ADDRESS).__aenter__())",
    ],
)
def test_the_garbage_collector_closes_a_forgotten_connection(short_dir: Path, program: str) -> None:
    imports = "import asyncio, gc\nfrom common.connection import Connection\n"
    imports += "from common.async_connection import AsyncConnection\n"
    program = f"ADDRESS = 'ipc://{short_dir}/nobody'\n{program}\nconnection.itself = connection\ndel connection\n"
    command = [sys.executable, "-c", imports + program + "gc.collect()\nprint('collected')"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (ended.stdout, ended.stderr) == ("collected\n", "")


def test_answer_adds_up() -> None:
    answer = Answer(sent_ns=1_000_000)
    for text, tokens, finish, at_ms in (
        ("", [], Finish.NONE, 2),
        ("ab", [5], Finish.NONE, 4),
        ("c", [6, 7], Finish.STOP, 9),
    ):
        answer.add(Row(1, 0, text, tokens, finish, 8, 4, (), at_ms * 1_000_000))
    assert answer.as_dict() == {
        "text": "abc", "token_ids": [5, 6, 7], "prompt_tokens": 8, "completion_tokens": 3, "cached_tokens": 4,
        "finish_reason": "stop", "ttft_ms": 3.0, "itl_ms": 2.5, "e2e_ms": 8.0,
    }  # fmt: skip


@pytest.mark.parametrize(("tokens", "ttft", "itl"), [([], None, None), ([3], 1.0, None)])
def test_an_answer_with_few_tokens_has_no_inter_token_latency(tokens: list[int], ttft: float | None, itl: None) -> None:
    answer = Answer(sent_ns=0)
    answer.add(Row(1, 0, "", tokens, Finish.STOP, 8, 0, (), 1_000_000))
    values = answer.as_dict()
    assert (values["ttft_ms"], values["itl_ms"], values["e2e_ms"]) == (ttft, itl, 1.0)


def test_a_result_shows_all_choices_where_there_are_several() -> None:
    answers = [Answer(sent_ns=0), Answer(sent_ns=0)]
    for at, text, finish, cached in ((0, "a", Finish.LENGTH, 0), (1, "b", Finish.STOP, 7)):
        answers[at].add(Row(1, at, text, [5 + at], finish, 8, cached, (), 1_000_000 * (at + 1)))
    assert result_of(answers[:1]) == answers[0].as_dict()
    assert result_of(answers) == answers[0].as_dict() | {
        "completion_tokens": 2,
        "choices": [
            {"index": 0, "text": "a", "token_ids": [5], "finish_reason": "length", "cached_tokens": 0},
            {"index": 1, "text": "b", "token_ids": [6], "finish_reason": "stop", "cached_tokens": 7},
        ],
    }
