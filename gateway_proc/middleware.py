"""What happens to every request around its endpoint, as plain ASGI: id, limits of the head, key, story, last resort,
and a close that lets the answer arrive."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.story import Story, request_id, shown
from gateway_proc.auth import Keys
from gateway_proc.errors import ApiError, is_anthropic, our_mistake
from gateway_proc.http import ClientGone, error_response
from gateway_proc.turnstile import Turnstile

log = logging.getLogger(__name__)

MAX_URL_BYTES = 8192
PROBES = frozenset({"/health", "/health/live", "/health/ready", "/ping"})  # need no key, and do not wait for others
OPEN_PATHS = PROBES | {"/docs", "/openapi.json", "/metrics", "/load", "/get_load"}  # scrapers have no key either
QUIET_STATUS = 400  # below it, only requests that generate get a line in the log
LINGER_S = 10.0  # for the rest of a body that nobody reads


class Observed:
    """The outermost layer: every request gets an id, and a story that is told once at its end. Probes pass at once,
    others through the turnstile."""

    def __init__(self, app: ASGIApp, began: Callable[[], None], told: Callable[[Story, float], None]):
        self._app = app
        self._began = began
        self._told = told
        self._turnstile = Turnstile()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrival_ns = time.monotonic_ns()
        if scope["path"] not in PROBES:
            await self._turnstile.enter()
        headers = Headers(scope=scope)
        story = Story(request_id(headers.get("x-request-id")), scope["method"], "unknown", arrival_ns=arrival_ns)
        story.traceparent = headers.get("traceparent", "")
        scope["story"] = story
        scope["send"] = send  # for bodies that come in many parts, at which nothing in between looks
        self._began()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                story.status = message["status"]
                own = MutableHeaders(scope=message)
                own["x-request-id"] = story.id
                if story.ignored:
                    own["x-rhizome-ignored-fields"] = ", ".join(story.ignored)[:1024]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            story.status = 499
            if not story.error:
                story.error, story.problem = "client_closed", "the client closed the connection"
        finally:
            self._tell(story)

    def _tell(self, story: Story) -> None:
        now = time.monotonic_ns()
        self._told(story, (now - story.arrival_ns) / 1e9)
        important = story.generates or story.status >= QUIET_STATUS
        log.log(logging.INFO if important else logging.DEBUG, "%s", story.line(now))


class Answered:
    """Every request gets an answer, whatever happens inside. Layers around this one add their headers to all."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        story: Story = scope["story"]
        try:
            if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_URL_BYTES:
                raise ApiError(
                    414, f"the URL has more than {MAX_URL_BYTES} bytes, which is the limit", code="too_large"
                )
            await self._app(scope, receive, send)
        except ApiError as error:
            story.fail(*error.told)
            await error_response(error, scope["path"])(scope, receive, send)
        except ClientGone:
            raise
        except Exception:
            log.exception("request %s failed", story.id)
            failed = our_mistake()
            story.fail(*failed.told)
            if story.status:
                raise  # the answer has begun: if it has not ended, all that can be done is to cut it off
            await error_response(failed, scope["path"])(scope, receive, send)


class Authorized:
    """Lets pass whoever has a key, and notes whose it is."""

    def __init__(self, app: ASGIApp, keys: Keys):
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        story: Story = scope["story"]
        story.key = shown(self._keys.name_of(_authorization(scope)))
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._keys.enter(story.key)
        try:
            await self._app(scope, receive, send)
        finally:
            self._keys.leave(story.key)


def _authorization(scope: Scope) -> str | None:
    """The Authorization header, or what Anthropic's clients send in its place."""
    headers = Headers(scope=scope)
    given, key = headers.get("authorization"), headers.get("x-api-key")
    if given is None and key is not None and is_anthropic(scope["path"]):
        return f"Bearer {key}"
    return given


class Lingering:
    """Where the connection closes behind the answer, takes what has not been read of the request before it ends: bytes
    that are left at the close reset the connection, which may cost the client the answer (RFC 9112, 9.6)."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _closes(scope):
            await self._app(scope, receive, send)
            return
        left = True

        async def noting() -> Message:
            nonlocal left
            message = await receive()
            left = message.get("more_body", False)
            return message

        async def last(message: Message) -> None:
            if left and message["type"] == "http.response.body" and not message.get("more_body", False):
                await send({**message, "more_body": True})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        while left:
                            await noting()
                message = {"type": "http.response.body"}
            await send(message)

        await self._app(scope, noting, last)


def _closes(scope: Scope) -> bool:
    """Whether a request has a body and is the last one on its connection."""
    headers = Headers(scope=scope)
    if "content-length" not in headers and "transfer-encoding" not in headers:
        return False
    return scope["http_version"] == "1.0" or "close" in headers.get("connection", "").lower()
