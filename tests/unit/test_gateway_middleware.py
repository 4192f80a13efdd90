"""What happens around an endpoint, layer by layer: heads, stories, last resorts, and bodies that nobody has read."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.story import Story
from gateway_proc.errors import ApiError
from gateway_proc.http import ClientGone
from gateway_proc.middleware import MAX_URL_BYTES, Answered, Lingering, Observed

HEAD: Message = {"type": "http.response.start", "status": 200, "headers": []}
END: Message = {"type": "http.response.body", "body": b"answer"}


def scope_of(path: str = "/v1/models", **more: Any) -> Scope:
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode()}
    return {**scope, "query_string": b"", "headers": [], "story": Story("id"), **more}


def ask(app: ASGIApp, scope: Scope, *received: Message) -> tuple[list[Message], int]:
    """What is sent, and how much of what is there was received."""
    sent: list[Message] = []
    left = list(received)

    async def receive() -> Message:
        return left.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent, len(received) - len(left)


async def answers(scope: Scope, receive: Receive, send: Send) -> None:
    await send(HEAD)
    await send(END)


def told_by(app: ASGIApp, scope: Scope) -> tuple[Story, list[Message]]:
    stories: list[Story] = []
    sent, _ = ask(Observed(app, lambda: None, lambda story, seconds: stories.append(story)), scope)
    (story,) = stories
    return story, sent


@pytest.mark.parametrize("beyond", [0, 1])
def test_an_url_has_exactly_as_many_bytes_as_the_limit_says(beyond: int) -> None:
    scope = scope_of(query_string=(MAX_URL_BYTES + beyond - len("/v1/models")) * b"q")
    sent, _ = ask(Answered(answers), scope)
    assert sent[0]["status"] == (414 if beyond else 200)
    assert scope["story"].error == ("too_large" if beyond else "")


def test_whatever_fails_is_answered_and_told(caplog: pytest.LogCaptureFixture) -> None:
    for error, status, code in ((ApiError(429, "busy", code="overloaded"), 429, "overloaded"), (KeyError(), 500, "")):

        async def fails(scope: Scope, receive: Receive, send: Send, error: Exception = error) -> None:
            raise error

        scope = scope_of()
        sent, _ = ask(Answered(fails), scope)
        assert sent[0]["status"] == status and scope["story"].error and code in scope["story"].error


def test_an_answer_that_has_begun_is_cut_off_and_not_followed_by_another() -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        await send(HEAD)
        raise KeyError("later")

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(KeyError):
            await Observed(Answered(fails), lambda: None, lambda story, seconds: None)(scope, receive, send)

    sent, _ = ask(run, scope_of())
    assert [message["type"] for message in sent] == ["http.response.start"]


@pytest.mark.parametrize("known", ["", "deadline_exceeded"])
def test_a_client_that_left_is_told_of_as_such(known: str) -> None:
    """Unless it is known already why its request has ended."""

    async def leaves(scope: Scope, receive: Receive, send: Send) -> None:
        scope["story"].error = known
        raise ClientGone

    story, sent = told_by(Answered(leaves), scope_of())
    assert (story.status, story.error, sent) == (499, known or "client_closed", [])


def test_unknown_fields_are_named_in_a_header_of_bounded_length() -> None:
    async def ignores(scope: Scope, receive: Receive, send: Send) -> None:
        scope["story"].ignored = ["a" * 600, "b" * 600]
        await answers(scope, receive, send)

    _, (head, _) = told_by(ignores, scope_of())
    assert dict(head["headers"])[b"x-rhizome-ignored-fields"] == b"a" * 600 + b", " + b"b" * 422


@pytest.mark.parametrize(("status", "generates", "line"), [(399, False, False), (400, False, True), (200, True, True)])
def test_who_gets_a_line_in_the_log(status: int, generates: bool, line: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope["story"].generates = generates
        await send({**HEAD, "status": status})

    with caplog.at_level(logging.INFO, "gateway_proc.middleware"):
        told_by(answer, scope_of())
    assert bool(caplog.records) == line


def part(body: bytes, *, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


@pytest.mark.parametrize(
    ("more", "reads", "taken"),
    [
        ({"headers": [(b"connection", b"Close"), (b"content-length", b"3")]}, 1, 3),
        ({"headers": [(b"connection", b"close"), (b"transfer-encoding", b"chunked")]}, 0, 3),
        ({"http_version": "1.0", "headers": [(b"content-length", b"3")]}, 0, 3),
        ({"http_version": "1.0", "headers": [(b"content-length", b"3")]}, 3, 3),
        ({"headers": [(b"content-length", b"3")]}, 1, 1),
        ({"headers": [(b"connection", b"close")]}, 0, 0),
    ],
)
def test_the_rest_of_a_body_is_taken_before_the_connection_closes(more: dict[str, Any], reads: int, taken: int) -> None:
    async def reading(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(reads):
            await receive()
        await answers(scope, receive, send)

    parts: Sequence[Message] = (part(b"1", more=True), part(b"2", more=True), part(b"3", more=False))
    sent, received = ask(Lingering(reading), scope_of(**more), *parts, {"type": "http.disconnect"})
    assert received == taken
    assert b"".join(message.get("body", b"") for message in sent[1:]) == b"answer"
    ends = [not message.get("more_body", False) for message in sent[1:]]
    assert ends == [False] * (len(ends) - 1) + [True]
