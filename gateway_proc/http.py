"""The pieces of HTTP that endpoints share: reading a body, watching for a disconnect, answers and event streams."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from common.story import Story
from gateway_proc.errors import ApiError

BODY_S = 60.0  # a request's body must have come by then
STALL_S = 60.0  # a reader that takes nothing for so long is cut off
DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection. Nobody is there to be told."""


def story_of(request: Request) -> Story:
    """The story of a request, which the outermost middleware began."""
    story: Story = request.scope["story"]
    return story


class StalledReader(ClientGone):
    """The client is connected and takes nothing."""


class Json(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def error_response(error: ApiError, path: str, headers: Mapping[str, str] | None = None) -> Json:
    """What is told of an error to whoever asked `path`."""
    return Json(error.body(path), error.status, {**error.headers(), **(headers or {})})


async def read_body(receive: Receive, headers: Mapping[str, str], limit: int) -> bytes:
    """The whole body. Raises ApiError for one that is too large or too slow, ClientGone when the client leaves."""
    too_large = ApiError(413, f"the body has more than {limit} bytes, which is the limit", code="too_large")
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise too_large
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_S:g} s", code="timeout") from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client leaves; then raises ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # so that what it holds is given back before we go on


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % to_json(content)


def named_event(content: Mapping[str, Any]) -> bytes:
    """One server-sent event that is named after its type."""
    return b"event: %b\ndata: %b\n\n" % (content["type"].encode(), to_json(content))


class EventStream(Response):
    """An answer of server-sent events. `events` yields bytes of whole events. An error before the first of them is an
    error response with its own status; later ones come as an event, which `failure` makes where the API has one of its
    own, and the stream ends. `end` is sent last."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        story: Story,
        end: bytes = DONE,
        failure: Callable[[ApiError], bytes] | None = None,
    ):
        super().__init__()
        self._events = events
        self._story = story
        self._end = end
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._run(scope, receive, send))
        except StalledReader:
            if "abort" in scope:
                scope["abort"]()  # a polite close would wait for the reader
                await _disconnect(receive)
            raise

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        body = _Body(scope, send)
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            try:
                async for chunk in events:
                    if not started:
                        started = True
                        await body.begin()
                    await body.write(chunk)
            except ApiError as error:
                self._story.fail(*error.told)
                if not started:
                    await error_response(error, scope["path"])(scope, receive, send)
                    return
                await body.write(self._told(error, scope["path"]))
        if not started:
            await body.begin()
        await body.write(self._end, more=False)

    def _told(self, error: ApiError, path: str) -> bytes:
        if self._failure is not None:
            return self._failure(error)
        told = error.body(path)
        return named_event(told) if "type" in told else event(told)


_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


class _Body:
    """An answer that is sent part by part. A part costs little while its reader keeps up: it goes past
    the middleware, which looks at heads only, and has no timer, as uvicorn waits only for a reader that is behind."""

    def __init__(self, scope: Scope, send: Send):
        self._start = send
        self._send: Send = scope.get("send", send)
        self._flow = scope.get("flow")

    async def begin(self) -> None:
        """Send the head. Raises StalledReader as `write` does."""
        await _patiently(self._start, _START)

    async def write(self, part: bytes, *, more: bool = True) -> None:
        """Raises StalledReader when the client takes nothing for too long: then it counts as gone."""
        message = {"type": "http.response.body", "body": part, "more_body": more}
        if self._flow is not None and not self._flow.write_paused:
            await self._send(message)
        else:
            await _patiently(self._send, message)


async def _patiently(send: Send, message: Message) -> None:
    try:
        async with asyncio.timeout(STALL_S):
            await send(message)
    except TimeoutError:
        raise StalledReader from None
