"""Reading bodies, and work that ends when its client leaves."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message, Receive

from common.story import Story
from gateway_proc.errors import ApiError
from gateway_proc.http import ClientGone, EventStream, read_body, while_connected


def receiving(*parts: bytes) -> Receive:
    """A body in these parts."""
    left = list(parts)

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return receive


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_may_have_as_many_bytes_as_the_limit_says(declared: bool) -> None:
    for parts in ((b"12345678",), (b"1234", b"", b"5678")):
        headers = {"content-length": "8"} if declared else {}
        assert asyncio.run(read_body(receiving(*parts), headers, 8)) == b"12345678"
        with pytest.raises(ApiError, match="more than 7 bytes") as refused:
            asyncio.run(read_body(receiving(*parts), headers, 7))
        assert refused.value.status == 413


def test_a_body_that_says_that_it_is_too_large_is_not_waited_for() -> None:
    async def receive() -> Message:
        raise AssertionError("it may never come")

    with pytest.raises(ApiError, match="more than 7 bytes"):
        asyncio.run(read_body(receive, {"content-length": "8"}, 7))


def streamed(
    parts: list[bytes], error: ApiError | None = None, path: str = "/v1/completions", **options: Any
) -> tuple[int, bytes, Story]:
    """Status, body and story of an event stream of these parts, which an error ends."""
    sent: list[Message] = []
    story = Story("id")

    async def events() -> AsyncIterator[bytes]:
        for part in parts:
            yield part
        if error is not None:
            raise error

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path}
    asyncio.run(EventStream(events(), story, **options)(scope, receive, send))
    start, *bodies = sent
    assert start["type"] == "http.response.start" and {part["type"] for part in bodies} == {"http.response.body"}
    assert [part.get("more_body", False) for part in bodies] == [True] * (len(bodies) - 1) + [False]
    return start["status"], b"".join(part["body"] for part in bodies), story


def test_a_stream_ends_and_may_be_empty() -> None:
    assert streamed([b"data: 1\n\n", b"data: 2\n\n"])[:2] == (200, b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n")
    assert streamed([])[:2] == (200, b"data: [DONE]\n\n")
    assert streamed([], end=b"")[:2] == (200, b"")


def test_an_error_before_the_first_event_has_its_own_status() -> None:
    status, body, story = streamed([], ApiError(429, "busy", code="overloaded"))
    assert status == 429 and json.loads(body)["error"]["message"] == "busy"
    assert (story.error, story.problem) == ("overloaded", "busy")


def test_an_error_behind_events_comes_as_one() -> None:
    error = ApiError(503, "lost", code="not_ready")
    status, body, story = streamed([b"data: 1\n\n"], error)
    first, told, end = body.split(b"\n\n", 2)
    assert (status, first, end) == (200, b"data: 1", b"data: [DONE]\n\n")
    assert json.loads(told.removeprefix(b"data: ")) == error.body()
    assert (story.error, story.problem) == ("not_ready", "lost")
    assert b"event: error\ndata: " in streamed([b"data: 1\n\n"], error, "/v1/messages")[1]
    _, body, _ = streamed([b"data: 1\n\n"], error, failure=lambda error: b"own " + error.message.encode(), end=b"")
    assert body == b"data: 1\n\nown lost"


@pytest.mark.parametrize("leaves", [True, False])
def test_nothing_goes_on_behind_work_that_has_ended(leaves: bool) -> None:
    given_back = False

    async def receive() -> Message:
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def work() -> str:
        nonlocal given_back
        try:
            if leaves:
                await asyncio.Event().wait()
            return "done"
        finally:
            await asyncio.sleep(0)
            given_back = True

    async def run() -> None:
        if leaves:
            with pytest.raises(ClientGone):
                await while_connected(receive, work())
        else:
            assert await while_connected(receive, work()) == "done"
        assert given_back
        await asyncio.sleep(0)  # what was cancelled ends in the next turn
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
